"""Pools: samples that belong to no client, in mini-batches that are the same on the server and on every client."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from raypfl.common import rng
from raypfl.common.errors import ConfigError, MethodError, did_you_mean
from raypfl.common.transfer import to_device
from raypfl.learning.batches import Samples
from raypfl.learning.objectives.batch import Batch
from raypfl.learning.sample_order import augmentation_draws


def checked_pool(name: str, pools: Collection[str]) -> str:
    """Return `name` if there is such a pool.

    Raises
    ------
    ConfigError : if there is no such pool.
    """
    if name not in pools:
        hint = did_you_mean(name, pools) if pools else "data.pools has none."
        raise ConfigError(
            f"There is no pool called {name!r}; {hint} To make one from a tenth of the training samples, set "
            f"data.pools={{{name}: 0.1}}."
        )
    return name


@dataclass(frozen=True)
class Pools:
    """All pools, as one process reads them.

    Attributes
    ----------
    samples : the data set's samples, which include those of pools.
    indices : the numbers of each pool's samples, name -> ``int64[M]``.
    own_samples : the samples of pools that are normalised by their own mean and standard deviation, by name.
    room : the most bytes of pools that are kept on a GPU, besides `samples`.
    """

    samples: Samples
    indices: Mapping[str, np.ndarray] = field(default_factory=dict)
    own_samples: Mapping[str, Samples] = field(default_factory=dict)
    seed: int = 0
    room: float = 0.0
    _kept: dict[str, Samples] = field(default_factory=dict, init=False)

    def pool(self, name: str, round: int) -> Pool:
        """Return a pool, whose mini-batches are drawn for this round.

        Raises
        ------
        ConfigError : if there is no such pool.
        """
        indices = self.indices[checked_pool(name, self.indices)]
        samples = self.own_samples.get(name, self.samples)
        self._keep(name, samples, indices)
        if name in self._kept:
            return Pool(name, self._kept[name], np.arange(len(indices)), self.seed, round)
        return Pool(name, samples, indices, self.seed, round)

    def _keep(self, name: str, samples: Samples, indices: np.ndarray) -> None:
        """Copy a pool to the GPU when it is first used, if there is room."""
        device = samples.gain.device
        inputs = samples.inputs
        labels = samples.labels
        if device.type == "cpu" or name in self._kept or isinstance(inputs, Tensor) or isinstance(labels, Tensor):
            return

        bytes_per_sample = (inputs.nbytes + labels.nbytes) / max(1, len(labels))
        used = sum(samples.resident for samples in self._kept.values())
        if used + bytes_per_sample * len(indices) <= self.room:
            # Not pinned: this happens once, and PyTorch never returns pinned memory.
            on_device = [torch.from_numpy(np.array(array[indices])).to(device) for array in (inputs, labels)]
            self._kept[name] = replace(samples, inputs=on_device[0], labels=on_device[1])


@dataclass(frozen=True, eq=False)
class Pool:
    """Samples that belong to no client.

    Draws are keyed by the run's seed, the pool's name, the round and a stream, so that a mini-batch on a client is the
    same as on the server.
    """

    name: str
    _samples: Samples
    _indices: np.ndarray
    _seed: int
    _round: int

    def __len__(self) -> int:
        return len(self._indices)

    def batches(
        self,
        size: int,
        *,
        epochs: int | None = None,
        steps: int | None = None,
        fraction: float = 1.0,
        augment: bool = False,
        stream: str = "",
    ) -> PoolBatches:
        """Return mini-batches of freshly shuffled epochs; the last of an epoch may be smaller.

        Parameters
        ----------
        size : the number of samples per batch.
        epochs, steps : the number of passes, or the exact number of batches; neither: one pass.
        fraction : the share of the samples that is used, rounded down. It has the same samples in all rounds, and a
            larger share contains a smaller one.
        augment : whether images are augmented by the experiment's ``data.augmentation``.
        stream : the name of a stream of batches; another name gives other batches.
        """
        if size < 1 or not 0 < fraction <= 1 or (epochs is not None and steps is not None):
            raise MethodError(
                f"Batches of the pool {self.name!r} need a size of at least 1, a fraction above 0 and at most 1, and "
                f"epochs or steps, not both; here size={size}, fraction={fraction}, epochs={epochs}, steps={steps}."
            )

        # The tolerance keeps 0.29 * 100, which is 28.999999999999996, at 29.
        count = int(fraction * len(self) + 1e-9)
        if count == 0:
            raise MethodError(
                f"A fraction of {fraction} of the pool {self.name!r} is less than one of its {len(self)} samples."
            )
        fraction_key = rng.key(self._seed, f"pool fraction/{self.name}")
        shuffled = rng.permutations(np.array([fraction_key], dtype=np.uint64), len(self))[0]
        chosen = np.sort(shuffled[:count])

        if steps is None:
            steps = -(-count // size) * (1 if epochs is None else epochs)
        samples = self._samples if augment else replace(self._samples, augmentation=())
        batches_key = rng.key(self._seed, f"pool batches/{self.name}/{stream}", self._round)
        augmentation_key = rng.key(self._seed, f"pool augmentation/{self.name}/{stream}", self._round)
        keys = np.array([batches_key, augmentation_key], dtype=np.uint64)
        return PoolBatches(samples, self._indices[chosen], size, steps, keys)


@dataclass(frozen=True, eq=False)
class PoolBatches:
    """Mini-batches of a pool, produced one by one, and the same in every iteration; ``len`` is their number.

    Attributes
    ----------
    samples : the samples that `indices` refers to.
    indices : the numbers of the samples that batches are drawn from, ``int64[m]``.
    size : the number of samples per batch.
    steps : the number of batches.
    keys : the keys of the order of samples and of augmentation, ``uint64[2]``.
    targets : a row for each input, in the order of :meth:`once`, that replaces labels, ``[v, ...]``; None: labels.
    """

    samples: Samples
    indices: np.ndarray
    size: int
    steps: int
    keys: np.ndarray
    targets: Tensor | None = None

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[Batch]:
        per_epoch = self._batches_per_epoch
        for epoch in range(-(-self.steps // per_epoch)):
            steps = np.arange(epoch * per_epoch, min((epoch + 1) * per_epoch, self.steps))
            yield from self._epoch(epoch, steps)

    def _epoch(self, epoch: int, steps: np.ndarray) -> Iterator[Batch]:
        """Yield the batches of an epoch, whose order and draws go to the device at once."""
        order = self._shuffled(epoch)[: len(steps) * self.size]
        take = self.samples.take_parts(self.indices[order])
        draws = self._draws(steps)
        targets = self._take_targets(epoch, order)
        for s in range(len(steps)):
            part = slice(s * self.size, (s + 1) * self.size)
            batch = self._batch(*take(part))
            if draws is not None:
                batch = self.samples.augmented(batch, draws[s, : len(batch.weight)])
            yield batch if targets is None else batch._replace(y=targets(part))

    def once(self, size: int) -> Iterator[Batch]:
        """Yield every input once, at most `size` per batch: the visited samples in ascending order.

        If images are augmented, every visit is another input, so these are the mini-batches themselves.
        """
        if self.samples.augmentation:
            for batch in self:
                pieces = [field.split(size) for field in batch]
                for fields in zip(*pieces, strict=True):
                    yield Batch(*fields)
            return

        visited = self._visited()
        take = self.samples.take_parts(self.indices[visited])
        for first in range(0, len(visited), size):
            yield self._batch(*take(slice(first, first + size)))

    def with_targets(self, rows: Tensor) -> PoolBatches:
        """Return the same batches with rows ``[v, ...]`` in place of labels, where :meth:`once` yields v inputs.

        A teacher then runs once on each input, however often the student sees it.
        """
        if len(rows) != self._num_inputs:
            raise MethodError(
                f"Targets have {len(rows)} rows, but {self._num_inputs} samples are visited. Give a row for each "
                "sample of once(), in that order."
            )
        return replace(self, targets=rows.to(self.samples.gain.device))

    @property
    def _num_inputs(self) -> int:
        """The number of inputs that :meth:`once` yields."""
        if not self.samples.augmentation:
            return len(self._visited())
        epochs, steps_of_last = divmod(self.steps, self._batches_per_epoch)
        return epochs * len(self.indices) + min(steps_of_last * self.size, len(self.indices))

    @property
    def _batches_per_epoch(self) -> int:
        return -(-len(self.indices) // self.size)

    def _visited(self) -> np.ndarray:
        """Positions in `indices` of the visited samples, ascending."""
        if self.steps >= self._batches_per_epoch:
            return np.arange(len(self.indices))
        return np.sort(self._shuffled(0)[: self.steps * self.size])

    def _shuffled(self, epoch: int) -> np.ndarray:
        with np.errstate(over="ignore"):
            key = rng.mix(self.keys[:1] + np.uint64(epoch))
        return rng.permutations(key, len(self.indices))[0]

    def _batch(self, x: Tensor, y: Tensor) -> Batch:
        gain = self.samples.gain
        return Batch(self.samples.normalise(x), y, torch.ones(len(x), dtype=gain.dtype, device=gain.device))

    def _draws(self, steps: np.ndarray) -> Tensor | None:
        """Return random numbers for the augmentation of some steps' images, ``float64[S, size, D]``; None: none."""
        if not self.samples.augmentation:
            return None
        with np.errstate(over="ignore"):
            keys = rng.mix(self.keys[1:] + steps.astype(np.uint64))
        draws_per_image = sum(augmentation.draws for augmentation in self.samples.augmentation)
        return to_device(augmentation_draws(keys, self.size, draws_per_image), self.samples.gain.device)

    def _take_targets(self, epoch: int, order: np.ndarray) -> Callable[[slice], Tensor] | None:
        """Return ``take(part)``, the targets of the epoch's samples ``order[part]``; None: their labels."""
        targets = self.targets
        if targets is None:
            return None
        if self.samples.augmentation:
            rows = epoch * len(self.indices) + np.arange(len(order))
        else:
            rows = np.searchsorted(self._visited(), order)
        positions = to_device(rows, targets.device)
        return lambda part: targets[positions[part]]
