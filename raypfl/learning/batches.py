"""Samples of a group of clients, and the order in which the clients visit them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from raypfl.common import rng
from raypfl.common.transfer import to_device
from raypfl.learning.augmentation import Augmentation, augmented
from raypfl.learning.objectives.batch import Batch, spread_over_labels

NORMALISE_ONCE_LIMIT = 2**21
"""Most numbers in samples that are normalised once for all batches; more would not fit into a CPU cache."""


def device_data_budget(device: torch.device, share: float, gpus: float) -> float:
    """Return the bytes of data that may stay on an actor's device; unlimited on the CPU, where data are memory-mapped.

    Parameters
    ----------
    share : the share of a GPU's memory for the data of all actors on it.
    gpus : the number of GPUs that the actor reserves; of several it uses one.
    """
    if device.type == "cpu":
        return math.inf
    return torch.cuda.get_device_properties(device).total_memory * share * min(gpus, 1.0)


@dataclass(frozen=True)
class Samples:
    """The samples of a data set, and how batches of them are normalised and augmented.

    Attributes
    ----------
    inputs : the images ``uint8[N, C, H, W]``: a read-only, memory-mapped NumPy array, from which groups and batches are
        copied to the device; or a tensor on the device.
    labels : the labels, ``int64[N]`` or ``int8[N, L]``.
    gain, offset : the normalisation ``uint8 * gain + offset``, ``[C, 1, 1]``.
    augmentation : the augmentations of the images that SGD steps on; other images are never augmented.
    """

    inputs: np.ndarray | Tensor
    labels: np.ndarray | Tensor
    gain: Tensor
    offset: Tensor
    augmentation: Sequence[Augmentation] = ()

    @property
    def resident(self) -> int:
        """Number of bytes of the samples on the device."""
        return sum(array.nbytes for array in (self.inputs, self.labels) if isinstance(array, Tensor))

    def take(self, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        """Return inputs ``uint8[n, C, H, W]`` and labels ``int64[n]`` of the samples ``indices[n]``, on the device."""
        return self._rows(self.inputs, indices), self._rows(self.labels, indices)

    def take_parts(self, indices: np.ndarray) -> Callable[[slice], tuple[Tensor, Tensor]]:
        """Return ``take(part)``, :meth:`take` of the samples ``indices[part]``.

        If the samples are on the device, so are the indices, which then get there once for all parts.
        """
        inputs = self.inputs
        labels = self.labels
        if isinstance(inputs, np.ndarray) or isinstance(labels, np.ndarray):
            return lambda part: self.take(indices[part])
        positions = to_device(np.array(indices), self.gain.device)
        return lambda part: (inputs[positions[part]], labels[positions[part]])

    def labels_of(self, indices: np.ndarray) -> Tensor:
        """Return the labels ``int64[n]`` of the samples ``indices[n]``, on the device, without reading inputs."""
        return self._rows(self.labels, indices)

    def _rows(self, array: np.ndarray | Tensor, indices: np.ndarray) -> Tensor:
        device = self.gain.device
        if isinstance(array, np.ndarray):
            return to_device(np.asarray(array[indices]), device)
        # A copy, since the indices may be in read-only memory.
        return array[to_device(np.array(indices), device)]

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one sample."""
        return tuple(self.inputs.shape[1:])

    def normalise(self, x: Tensor) -> Tensor:
        """Return inputs in floating point, as networks see them; tokens are returned unchanged."""
        if x.dtype == torch.int64:
            return x
        return torch.addcmul(self.offset, x.to(self.gain.dtype), self.gain)

    def augmented(self, batch: Batch, draws: Tensor | None) -> Batch:
        """Augment a batch's images by ``draws[..., b, D]``; None leaves them unchanged."""
        return batch if draws is None else batch._replace(x=augmented(batch.x, self.augmentation, draws, self.offset))


class GroupSamples:
    """One split of a group's clients, gathered once, client after client.

    Parameters
    ----------
    indices : the numbers of each client's samples, ``int64[n]`` per client.

    Attributes
    ----------
    sizes : each client's number of samples, ``int64[K]``.
    width : the largest of these numbers.
    """

    def __init__(self, samples: Samples, indices: list[np.ndarray]):
        self._source = samples
        self._normalised: Tensor | None = None
        self.sizes = np.array([len(client_indices) for client_indices in indices], dtype=np.int64)
        self.width = int(self.sizes.max(initial=0))
        self._starts = np.cumsum(self.sizes) - self.sizes
        self.x, self.y = samples.take(np.concatenate(indices))

    @property
    def normalises_once(self) -> bool:
        """Whether all samples are normalised once, not in every step."""
        return self.x.numel() <= NORMALISE_ONCE_LIMIT

    def normalised(self) -> Tensor:
        """Return all samples as the network sees them."""
        if self._normalised is None:
            self._normalised = self._source.normalise(self.x)
        return self._normalised

    def client(self, k: int, index: Tensor | None = None) -> Batch:
        """Return client k's samples at ``index[b]`` (positions in its own list; None: all), without padding."""
        rows = self._rows(k)
        x = self.x[rows]
        y = self.y[rows]
        if index is not None:
            x = x[index]
            y = y[index]
        return Batch(self._source.normalise(x), y, torch.ones(len(y), dtype=self._source.gain.dtype, device=y.device))

    def subset(self, k: int, count: int) -> Batch:
        """Return at most `count` of client k's samples, spread over its labels, the largest label included."""
        return self.client(k, spread_over_labels(self.y[self._rows(k)], count))

    def steps(self, k: int, order: SampleOrder, normalise_once: bool = True) -> Callable[[int], Batch]:
        """Return ``batch(s)``, client k's batch in step s, without padding.

        The order goes to the device here, once for all steps.

        Parameters
        ----------
        normalise_once : whether all samples of the client are normalised here, if that is cheaper than in every step.
        """
        device = self.y.device
        index = to_device(order.index[k], device)
        draws = None if order.draws is None else to_device(order.draws[k], device)
        counts = order.counts[k].tolist()
        takes_fewer_than_all = sum(counts) < self.sizes[k]
        too_large = self.sizes[k] * self.x[0].numel() > NORMALISE_ONCE_LIMIT
        normalised = self.client(k) if normalise_once and not takes_fewer_than_all and not too_large else None

        def batch(s: int) -> Batch:
            count = counts[s]
            step_index = index[s, :count]
            if normalised is None:
                plain = self.client(k, step_index)
            else:
                plain = Batch(normalised.x[step_index], normalised.y[step_index], normalised.weight[:count])
            return self._source.augmented(plain, None if draws is None else draws[s, :count])

        return batch

    def stacked(self, clients: np.ndarray, order: SampleOrder) -> StackedBatches:
        """Return the batches of some of `clients`, padded and stacked."""
        device = self.y.device
        real = np.arange(order.index.shape[-1]) < order.counts[clients][:, :, None]
        rows = to_device(self._starts[clients][:, None, None] + order.index[clients], device)
        weight = to_device(real, device).to(self._source.gain.dtype)
        draws = None if order.draws is None else to_device(order.draws[clients], device)
        if self.normalises_once:
            self.normalised()

        is_normalised = self._normalised is not None
        x = self.x if self._normalised is None else self._normalised
        return StackedBatches(self._source, x, self.y, rows, weight, draws, is_normalised)

    def _rows(self, k: int) -> slice:
        start = int(self._starts[k])
        return slice(start, start + int(self.sizes[k]))


@dataclass(frozen=True)
class StackedBatches:
    """The batches of a group's clients in all steps.

    Attributes
    ----------
    source : how samples are normalised and augmented.
    x, y : the clients' samples, ``[n, ...]`` and ``int64[n]``.
    rows : the samples of each batch, ``int64[K, S, b]``; padding has any.
    weight : the samples' weights, ``[K, S, b]``, 0 for padding.
    draws : the numbers that augment each sample, ``[K, S, b, D]``; None: no augmentation.
    is_normalised : whether `x` is normalised already.
    """

    source: Samples
    x: Tensor
    y: Tensor
    rows: Tensor
    weight: Tensor
    draws: Tensor | None
    is_normalised: bool

    FREE_AXES: ClassVar[Mapping[str, int]] = {"x": 0, "y": 0, "rows": 1, "weight": 1}
    """Axes of `tensors` along which they are only indexed."""

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors of which batches without augmentation are made, by name."""
        normalisation = {"gain": self.source.gain, "offset": self.source.offset}
        return {"x": self.x, "y": self.y, "rows": self.rows, "weight": self.weight, **normalisation}

    def __call__(self, which: slice | Tensor, s: int | Tensor, width: int | None = None) -> Batch:
        """Return the batches of some clients in step s, padded and stacked, ``[k, b, ...]``.

        Parameters
        ----------
        which : a slice of the clients, or ``int64[k]`` positions among them on the device.
        s : a number, or ``int64[1]`` on the device, which is not read there.
        width : the most samples of each batch; None: all.
        """

        def in_step(values: Tensor) -> Tensor:
            if isinstance(s, Tensor):
                return values[which].index_select(1, s)[:, 0, :width]
            return values[which, s, :width]

        index = in_step(self.rows)
        x = self.x[index] if self.is_normalised else self.source.normalise(self.x[index])
        batch = Batch(x, self.y[index], in_step(self.weight))
        return self.source.augmented(batch, None if self.draws is None else in_step(self.draws))


class StepBatches:
    """The batches of some clients in one step, built on first use: one by one, or padded and stacked."""

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
    """The samples that a group's clients visit, step by step.

    Attributes
    ----------
    index : the positions of the samples in each client's own list, ``int64[K, S, b]``; padding repeats position 0.
    counts : the number of real samples in each batch, ``int64[K, S]``; 0 after a client's last step.
    steps : the number of steps of each client, ``int64[K]``.
    draws : random numbers in [0, 1) for the augmentation of each visited image, ``float64[K, S, b, D]``; None: no
        augmentation.
    """

    index: np.ndarray
    counts: np.ndarray
    steps: np.ndarray
    draws: np.ndarray | None = None

    @property
    def sizes_differ(self) -> bool:
        """Whether batches differ in size, so that stacking them takes padding."""
        return bool(((self.counts > 0) & (self.counts != self.counts.max(initial=0))).any())

    def limited(self, shares: np.ndarray) -> SampleOrder:
        """Return the first steps of each client, a share ``float64[K]`` of them; see :func:`share_of_steps`."""
        steps = share_of_steps(self.steps, shares)
        longest = int(steps.max(initial=0))
        counts = np.where(np.arange(longest) < steps[:, None], self.counts[:, :longest], 0)
        return replace(self, index=self.index[:, :longest], counts=counts, steps=steps)

    def with_draws(self, keys: np.ndarray, draws_per_visit: int) -> SampleOrder:
        """Add random numbers to each visit.

        They depend only on ``keys[k]``, ``uint64[K]``, the step and the position in the batch.
        """
        _, steps, size = self.index.shape
        with np.errstate(over="ignore"):
            step_keys = rng.mix(keys[:, None] + np.arange(steps, dtype=np.uint64))
        return replace(self, draws=draws(step_keys, size, draws_per_visit))


def draws(keys: np.ndarray, size: int, draws_per_visit: int) -> np.ndarray:
    """Draw numbers ``float64[..., size, draws_per_visit]`` in [0, 1) for batches with keys ``uint64[...]``."""
    with np.errstate(over="ignore"):
        position_keys = rng.mix(keys[..., None] + np.arange(size, dtype=np.uint64))
        return rng.uniform(position_keys[..., None] + np.arange(draws_per_visit, dtype=np.uint64))


def epoch_order(
    keys: np.ndarray,
    sizes: np.ndarray,
    batch_size: int,
    epochs: int = 1,
    steps: int | None = None,
    smallest: int = 1,
) -> SampleOrder:
    """Draw batches of ``batch_size``, reshuffled every epoch; the last batch of an epoch may be smaller.

    Row k depends only on ``keys[k]`` and ``sizes[k]``, so a client's batches are the same in every group.

    Parameters
    ----------
    keys : the clients' keys, ``uint64[K]``.
    sizes : the clients' numbers of samples, ``int64[K]``, at least 1.
    epochs, steps : the number of passes; or the exact number of batches, if not None.
    smallest : the smallest last batch; one of fewer samples is left out, unless it is the client's only one.
    """
    per_epoch = num_steps(sizes, batch_size, smallest=smallest)
    totals = num_steps(sizes, batch_size, epochs, steps, smallest)
    step = np.arange(int(totals.max(initial=0)))
    epoch, batch_in_epoch = np.divmod(step, per_epoch[:, None])

    # Positions in the shuffled epoch; a batch may run over its end, or the client may have no more steps.
    position = batch_in_epoch[:, :, None] * batch_size + np.arange(batch_size)
    real = (position < sizes[:, None, None]) & (step < totals[:, None])[:, :, None]

    num_epochs = -(-totals // per_epoch)
    index = np.empty(position.shape, dtype=np.int64)
    # All rows of a draw are as long as its largest client, so only clients within a factor of two are drawn together.
    exponents = np.frexp(sizes)[1]
    different = set(exponents.tolist())
    for exponent in different:
        alike: slice | np.ndarray = slice(None)
        if len(different) > 1:
            alike = np.flatnonzero(exponents == exponent)
        rows, first_row = _shuffled_epochs(keys[alike], num_epochs[alike], sizes[alike])
        row = np.where(real[alike], (first_row[:, None] + epoch[alike])[:, :, None], 0)
        index[alike] = rows[row, np.where(real[alike], position[alike], 0)]
    index[~real] = 0
    return SampleOrder(index, real.sum(2), totals)


def sampled_order(
    keys: np.ndarray, sizes: np.ndarray, batch_size: int, epochs: int = 1, steps: int | None = None
) -> SampleOrder:
    """Draw as many batches as :func:`epoch_order`, each with each of n samples at probability ``batch_size / n``.

    This is the Poisson sampling that the accounting of DP-SGD assumes. A batch may be empty, or larger than
    `batch_size`. Row k depends only on ``keys[k]`` and ``sizes[k]``.
    """
    totals = num_steps(sizes, batch_size, epochs, steps)
    rates = sampling_rates(sizes, batch_size)

    chosen_of_clients = []
    for k, n in enumerate(sizes.tolist()):
        with np.errstate(over="ignore"):
            step_keys = rng.mix(keys[k] + np.arange(totals[k], dtype=np.uint64))
            uniform = rng.uniform(rng.mix(step_keys[:, None] + np.arange(n, dtype=np.uint64)))
        chosen_of_clients.append(uniform < rates[k])

    counts = np.zeros((len(sizes), int(totals.max(initial=0))), dtype=np.int64)
    for k, chosen in enumerate(chosen_of_clients):
        counts[k, : totals[k]] = chosen.sum(1)

    index = np.zeros((*counts.shape, int(counts.max(initial=0))), dtype=np.int64)
    for k, chosen in enumerate(chosen_of_clients):
        step, sample = chosen.nonzero()
        first_of_step = np.cumsum(chosen.sum(1)) - chosen.sum(1)
        index[k, step, np.arange(len(step)) - first_of_step[step]] = sample
    return SampleOrder(index, counts, totals)


def sampling_rates(sizes: np.ndarray, batch_size: int) -> np.ndarray:
    """Return the probability that a sample is in a batch of :func:`sampled_order`, ``float64[K]``."""
    return np.minimum(1.0, batch_size / sizes)


def num_steps(
    sizes: np.ndarray, batch_size: int, epochs: int = 1, steps: int | None = None, smallest: int = 1
) -> np.ndarray:
    """Return the number of batches that :func:`epoch_order` gives each client, ``int64[K]``."""
    rest = sizes % batch_size
    left_out = (rest > 0) & (rest < smallest) & (sizes > batch_size)
    per_epoch = -(-sizes // batch_size) - left_out
    return per_epoch * epochs if steps is None else np.full_like(per_epoch, steps)


def share_of_steps(steps: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """Return a share ``float64[K]`` of ``int64[K]`` steps, rounded down; at least one step of those that have any."""
    return np.minimum(np.maximum((shares * steps).astype(np.int64), 1), steps)


def _shuffled_epochs(keys: np.ndarray, epochs: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Shuffle each client's samples for each of its ``epochs[k]``.

    Returns
    -------
    A row for each epoch, client after client, which begins with its samples, ``int64[sum of epochs, largest size]``;
    and the number of each client's first row, ``int64[K]``.
    """
    first_row = np.cumsum(epochs) - epochs
    client = np.repeat(np.arange(len(keys)), epochs)
    epoch = np.arange(len(client)) - first_row[client]
    row_keys = rng.mix(keys[client] + epoch.astype(np.uint64))
    return rng.permutations(row_keys, int(sizes.max()), sizes[client]), first_row
