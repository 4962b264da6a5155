"""Pools: samples that belong to no client, in mini-batches that are the same on the server and on every client."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from raypfl.common import rng
from raypfl.common.errors import MethodError, checked_pool
from raypfl.learning.batches import Samples, draws
from raypfl.learning.objectives.batch import Batch


@dataclass(frozen=True)
class Pools:
    """All pools, as one process reads them.

    Attributes
    ----------
    samples : the data set's samples, which include those of pools.
    indices : the numbers of each pool's samples, name -> ``int64[M]``.
    own_samples : the samples of pools that are normalised by their own mean and standard deviation, by name.
    seed : the run's seed.
    """

    samples: Samples
    indices: Mapping[str, np.ndarray] = field(default_factory=dict)
    own_samples: Mapping[str, Samples] = field(default_factory=dict)
    seed: int = 0

    def pool(self, name: str, round: int) -> Pool:
        """Return a pool, whose mini-batches are drawn for this round.

        Raises
        ------
        ConfigError : if there is no such pool.
        """
        indices = self.indices[checked_pool(name, self.indices)]
        return Pool(name, self.own_samples.get(name, self.samples), indices, self.seed, round)


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
            raise MethodError(f"A fraction of {fraction} of the pool {self.name!r}, {len(self)} samples, has none.")
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
        shuffled = self._shuffled(0)
        visited = self._visited()
        num_seen = 0
        for step in range(self.steps):
            epoch, batch_in_epoch = divmod(step, self._batches_per_epoch)
            if step and not batch_in_epoch:
                shuffled = self._shuffled(epoch)
            index = shuffled[batch_in_epoch * self.size : (batch_in_epoch + 1) * self.size]
            batch = self.samples.augmented(self._batch(index), self._draws(step, len(index)))

            if self.targets is not None:
                if self.samples.augmentation:
                    rows = np.arange(num_seen, num_seen + len(index))
                else:
                    rows = np.searchsorted(visited, index)
                targets = self.targets[torch.from_numpy(rows).to(self.targets.device)]
                batch = batch._replace(y=targets.to(batch.weight.device))
            num_seen += len(index)
            yield batch

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
        for first in range(0, len(visited), size):
            yield self._batch(visited[first : first + size])

    def with_targets(self, rows: Tensor) -> PoolBatches:
        """Return the same batches with rows ``[v, ...]`` in place of labels, where :meth:`once` yields v inputs.

        A teacher then runs once on each input, however often the student sees it.
        """
        if len(rows) != self._num_inputs:
            raise MethodError(
                f"Targets have {len(rows)} rows, but {self._num_inputs} samples are visited. Give a row for each "
                "sample of once(), in that order."
            )
        return replace(self, targets=rows)

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

    def _batch(self, index: np.ndarray) -> Batch:
        x, y = self.samples.take(self.indices[index])
        gain = self.samples.gain
        return Batch(self.samples.normalise(x), y, torch.ones(len(index), dtype=gain.dtype, device=gain.device))

    def _draws(self, step: int, count: int) -> Tensor | None:
        if not self.samples.augmentation:
            return None
        with np.errstate(over="ignore"):
            key = rng.mix(self.keys[1:] + np.uint64(step))
        draws_per_image = sum(augmentation.draws for augmentation in self.samples.augmentation)
        return torch.from_numpy(draws(key, count, draws_per_image)[0]).to(self.samples.gain.device)
