"""The samples of a group, and the order in which its clients visit them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from raypfl.common import rng
from raypfl.learning.augmentation import Augmentation, augmented
from raypfl.learning.objectives.batch import Batch, spread_over_labels

NORMALISE_ONCE_LIMIT = 2**21
"""Numbers that are normalised once for all batches; more would not fit into a CPU cache."""

StackedBatches = Callable[..., Batch]
"""See :meth:`GroupSamples.stacked`."""


def device_data_budget(device: torch.device, share: float, gpus: float) -> float:
    """Bytes of data that may stay on an actor's device; on the CPU data are memory-mapped, so there is no limit.

    Parameters
    ----------
    share : of a GPU's memory, for the data of all actors on it.
    gpus : that the actor reserves; of several it uses one.
    """
    if device.type == "cpu":
        return math.inf
    return torch.cuda.get_device_properties(device).total_memory * share * min(gpus, 1.0)


def to_device(rows: np.ndarray, device: torch.device) -> Tensor:
    """Rows as a tensor on a device; copies to a GPU are asynchronous, from pinned memory."""
    tensor = torch.from_numpy(rows)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


@dataclass(frozen=True)
class Samples:
    """The samples that batches are drawn from.

    Attributes
    ----------
    inputs : ``uint8[N, C, H, W]``: a read-only, memory-mapped NumPy array, from which groups and batches are copied to
        the device; or a tensor on the device.
    labels : ``int64[N]``, or ``int8[N, L]``.
    gain, offset : ``[C, 1, 1]``: the normalised input is ``uint8 * gain + offset``.
    augmentation : of the images that SGD steps on, and of no others.
    """

    inputs: np.ndarray | Tensor
    labels: np.ndarray | Tensor
    gain: Tensor
    offset: Tensor
    augmentation: Sequence[Augmentation] = ()

    @property
    def resident(self) -> int:
        """Bytes of the samples that are tensors on the device."""
        return sum(part.nbytes for part in (self.inputs, self.labels) if isinstance(part, Tensor))

    def take(self, where: np.ndarray) -> tuple[Tensor, Tensor]:
        """``(uint8[n, C, H, W], int64[n])`` of the samples at ``where[n]``, on the device."""
        return self._rows(self.inputs, where), self._rows(self.labels, where)

    def labels_of(self, where: np.ndarray) -> Tensor:
        """``int64[n]`` labels of the samples at ``where[n]``, on the device; inputs are not read."""
        return self._rows(self.labels, where)

    def _rows(self, part: np.ndarray | Tensor, where: np.ndarray) -> Tensor:
        device = self.gain.device
        if isinstance(part, np.ndarray):
            return to_device(np.asarray(part[where]), device)
        return part[torch.tensor(where, device=device)]  # a copy: the numbers may be in read-only memory

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Of one sample."""
        return tuple(self.inputs.shape[1:])

    def normalise(self, x: Tensor) -> Tensor:
        """Inputs in floating point, as networks see them; tokens are returned unchanged."""
        if x.dtype == torch.int64:
            return x
        return torch.addcmul(self.offset, x.to(self.gain.dtype), self.gain)

    def augmented(self, batch: Batch, draws: Tensor | None) -> Batch:
        """A batch with its images augmented by ``draws[..., b, D]``; None: unchanged."""
        return batch if draws is None else batch._replace(x=augmented(batch.x, self.augmentation, draws, self.offset))


class GroupSamples:
    """One split of a group's clients, gathered once: all samples of the first client, then the second's, and so on."""

    def __init__(self, samples: Samples, indices: list[np.ndarray]):
        self._source = samples
        self._ready: Tensor | None = None
        self.sizes = np.array([len(i) for i in indices], dtype=np.int64)
        self.width = int(self.sizes.max(initial=0))
        self._starts = np.concatenate([[0], np.cumsum(self.sizes)])
        self.x, self.y = samples.take(np.concatenate(indices))

    def client(self, k: int, index: Tensor | None = None) -> Batch:
        """Client k's samples at ``index[b]`` (positions in its own list; None: all of them), without padding."""
        rows = self._rows(k)
        x, y = self.x[rows], self.y[rows]
        if index is not None:
            x, y = x[index], y[index]
        return Batch(self._source.normalise(x), y, torch.ones(len(y), dtype=self._source.gain.dtype, device=y.device))

    def subset(self, k: int, count: int) -> Batch:
        """At most `count` of client k's samples, spread over its labels, the largest label included."""
        return self.client(k, spread_over_labels(self.y[self._rows(k)], count))

    def step(self, k: int, visits: SampleOrder, s: int, ready: Batch | None = None) -> Batch:
        """Client k's batch in step s, without padding; `ready` are all its samples, if already normalised."""
        count = visits.counts[k, s]
        index = torch.from_numpy(visits.index[k, s, :count]).to(self.y.device)
        draws = None if visits.draws is None else torch.from_numpy(visits.draws[k, s, :count]).to(self.y.device)
        batch = self.client(k, index) if ready is None else Batch(ready.x[index], ready.y[index], ready.weight[:count])
        return self._source.augmented(batch, draws)

    def steps(self, k: int, visits: SampleOrder) -> Callable[[int], Batch]:
        """``batch(s)``: :meth:`step` of client k, with samples normalised only once where that is cheaper."""
        few = visits.counts[k].sum() < self.sizes[k] or self.sizes[k] * self.x[0].numel() > NORMALISE_ONCE_LIMIT
        ready = None if few else self.client(k)
        return lambda s: self.step(k, visits, s, ready)

    def stacked(self, clients: np.ndarray, visits: SampleOrder) -> StackedBatches:
        """``batch(which, s)``: the batches of some of `clients` in step s, padded and stacked, ``[k, b, ...]``.

        `which` is a slice of `clients`, or ``int64[k]`` positions in it on the device. ``batch(which, s, width)`` has
        at most the first `width` samples of each batch.
        """
        device = self.y.device
        real = np.arange(visits.index.shape[-1]) < visits.counts[clients][:, :, None]
        at = torch.from_numpy(self._starts[clients][:, None, None] + visits.index[clients]).to(device)
        weight = torch.from_numpy(real).to(self._source.gain)
        draws = None if visits.draws is None else torch.from_numpy(visits.draws[clients]).to(device)
        if self._ready is None and self.x.numel() <= NORMALISE_ONCE_LIMIT:
            self._ready = self._source.normalise(self.x)

        def batch(which: slice | Tensor, s: int, width: int | None = None) -> Batch:
            where = at[which, s, :width]
            x = self._source.normalise(self.x[where]) if self._ready is None else self._ready[where]
            mine = None if draws is None else draws[which, s, :width]
            return self._source.augmented(Batch(x, self.y[where], weight[which, s, :width]), mine)

        return batch

    def _rows(self, k: int) -> slice:
        return slice(int(self._starts[k]), int(self._starts[k + 1]))


class StepBatches:
    """The batches of some clients in one step, made on first use: one by one, or padded and stacked."""

    def __init__(self, alone: Callable[[], list[Batch]], padded: Callable[[], Batch]):
        self._make_alone = alone
        self._make_padded = padded

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.alone)

    @cached_property
    def alone(self) -> list[Batch]:
        """A batch for each client, without padding."""
        return self._make_alone()

    @cached_property
    def padded(self) -> Batch:
        """One batch ``[k, b, ...]``; clients with fewer samples than the largest have rows of weight 0."""
        return self._make_padded()


Batches = list[Batch] | StepBatches


@dataclass(frozen=True)
class SampleOrder:
    """Which samples a group's clients visit, step by step.

    Attributes
    ----------
    index : ``int64[K, S, b]`` positions in each client's own list; padding repeats position 0.
    counts : ``int64[K, S]`` real samples in each batch; 0 once a client has done its steps.
    steps : ``int64[K]`` steps of each client.
    draws : ``float64[K, S, b, D]`` in [0, 1), for the augmentation of each visited image; None: no augmentation.
    """

    index: np.ndarray
    counts: np.ndarray
    steps: np.ndarray
    draws: np.ndarray | None = None

    @property
    def sizes_differ(self) -> bool:
        """Whether batches differ in size, so that stacking them takes padding."""
        return bool(((self.counts > 0) & (self.counts != self.counts.max(initial=0))).any())

    def drawn(self, keys: np.ndarray, each: int) -> SampleOrder:
        """With `each` random numbers per visit; they depend on ``keys[k]``, ``uint64[K]``, the step and the place in
        the batch only."""
        _, steps, size = self.index.shape
        with np.errstate(over="ignore"):
            of_step = rng.mix(keys[:, None] + np.arange(steps, dtype=np.uint64))
        return replace(self, draws=draws(of_step, size, each))


def draws(keys: np.ndarray, size: int, each: int) -> np.ndarray:
    """``float64[..., size, each]`` in [0, 1) for the batches with these keys, ``uint64[...]``."""
    with np.errstate(over="ignore"):
        of_place = rng.mix(keys[..., None] + np.arange(size, dtype=np.uint64))
        return rng.uniform(of_place[..., None] + np.arange(each, dtype=np.uint64))


def epoch_order(
    keys: np.ndarray,
    sizes: np.ndarray,
    batch_size: int,
    epochs: int = 1,
    steps: int | None = None,
    smallest: int = 1,
) -> SampleOrder:
    """Batches of ``batch_size``, reshuffled every epoch; the last batch of an epoch may be smaller.

    Row k depends only on ``keys[k]`` and ``sizes[k]``, so a client's batches are the same in every group.

    Parameters
    ----------
    keys : ``uint64[K]``. sizes : ``int64[K]``, at least 1.
    epochs, steps : `epochs` passes, or exactly `steps` batches if given.
    smallest : a last batch of fewer samples is left out, unless it is the client's only one.
    """
    per_epoch = num_steps(sizes, batch_size, smallest=smallest)
    totals = num_steps(sizes, batch_size, epochs, steps, smallest)
    step = np.arange(int(totals.max(initial=0)))
    epoch, place = np.divmod(step, per_epoch[:, None])
    at = place[:, :, None] * batch_size + np.arange(batch_size)
    real = (at < sizes[:, None, None]) & (step < totals[:, None])[:, :, None]
    shuffled, begins = _shuffled(keys, -(-totals // per_epoch), sizes)
    begun = begins[:, None] + epoch * sizes[:, None]
    index = np.zeros(at.shape, dtype=np.int64)
    index[real] = shuffled[(begun[:, :, None] + at)[real]]
    return SampleOrder(index, real.sum(2), totals)


def sampled_order(
    keys: np.ndarray, sizes: np.ndarray, batch_size: int, epochs: int = 1, steps: int | None = None
) -> SampleOrder:
    """As many batches as :func:`epoch_order` gives; each takes each of n samples with chance ``batch_size / n``.

    A batch may be empty, or larger than `batch_size`. Row k depends only on ``keys[k]`` and ``sizes[k]``.
    """
    totals = num_steps(sizes, batch_size, epochs, steps)
    rates, taken = sampling_rates(sizes, batch_size), []
    for k, n in enumerate(sizes.tolist()):
        with np.errstate(over="ignore"):
            of_step = rng.mix(keys[k] + np.arange(totals[k], dtype=np.uint64))
            chances = rng.uniform(rng.mix(of_step[:, None] + np.arange(n, dtype=np.uint64)))
        taken.append(chances < rates[k])
    counts = np.zeros((len(sizes), int(totals.max(initial=0))), dtype=np.int64)
    for k, chosen in enumerate(taken):
        counts[k, : totals[k]] = chosen.sum(1)
    index = np.zeros((*counts.shape, int(counts.max(initial=0))), dtype=np.int64)
    for k, chosen in enumerate(taken):
        step, sample = chosen.nonzero()
        index[k, step, np.arange(len(step)) - (np.cumsum(chosen.sum(1)) - chosen.sum(1))[step]] = sample
    return SampleOrder(index, counts, totals)


def sampling_rates(sizes: np.ndarray, batch_size: int) -> np.ndarray:
    """``float64[K]``: the chance of each client's samples to be in a batch of :func:`sampled_order`."""
    return np.minimum(1.0, batch_size / sizes)


def num_steps(
    sizes: np.ndarray, batch_size: int, epochs: int = 1, steps: int | None = None, smallest: int = 1
) -> np.ndarray:
    """``int64[K]``: how many batches :func:`epoch_order` gives each client."""
    rest = sizes % batch_size
    left_out = (rest > 0) & (rest < smallest) & (sizes > batch_size)
    per_epoch = -(-sizes // batch_size) - left_out
    return per_epoch * epochs if steps is None else np.full_like(per_epoch, steps)


def _shuffled(keys: np.ndarray, epochs: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each client's samples, shuffled for each of its ``epochs[k]``, one after the other; and where each client begins.

    All rows of a draw are as long as its largest client, so only clients within a factor of two are drawn together.
    """
    parts, begins, done = [], np.zeros_like(sizes), 0
    doublings = np.frexp(sizes)[1]
    for doubling in np.unique(doublings):
        alike = np.flatnonzero(doublings == doubling)
        numbers = epochs[alike] * sizes[alike]
        begins[alike] = done + np.cumsum(numbers) - numbers
        done += int(numbers.sum())
        parts.append(_drawn(keys[alike], epochs[alike], sizes[alike]))
    return np.concatenate(parts), begins


def _drawn(keys: np.ndarray, epochs: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """``int64[sum of epochs * sizes]``: the clients' shuffled samples, drawn in rows of equal length."""
    client = np.repeat(np.arange(len(keys)), epochs)
    epoch = np.arange(len(client)) - np.repeat(np.cumsum(epochs) - epochs, epochs)
    width, mine = int(sizes.max()), sizes[client]
    rows = rng.permutations(rng.mix(keys[client] + epoch.astype(np.uint64)), width, mine)
    return rows[np.arange(width) < mine[:, None]]
