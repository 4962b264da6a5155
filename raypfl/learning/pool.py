"""Pools: samples that belong to no client, in mini-batches that are the same on the server and on every client."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from raypfl.common import rng
from raypfl.common.errors import MethodError, known_pool
from raypfl.learning.batches import Samples, draws
from raypfl.learning.objectives.batch import Batch


@dataclass(frozen=True)
class Pools:
    """All pools, as one process reads them.

    Attributes
    ----------
    samples : of which pools are a part.
    indices : name -> ``int64[M]``, the numbers of a pool's samples.
    apart : name -> the same samples, normalised by the pool's own mean and standard deviation.
    """

    samples: Samples
    indices: Mapping[str, np.ndarray] = field(default_factory=dict)
    apart: Mapping[str, Samples] = field(default_factory=dict)
    seed: int = 0

    def pool(self, name: str, round: int) -> Pool:
        """A pool, whose mini-batches are drawn for this round.

        Raises
        ------
        ConfigError : if there is no such pool.
        """
        indices = self.indices[known_pool(name, self.indices)]
        return Pool(name, self.apart.get(name, self.samples), indices, self.seed, round)


@dataclass(frozen=True, eq=False)
class Pool:
    """Samples that belong to no client.

    Draws are keyed by the run's seed, the pool's name, the round and a stream, so that a mini-batch on a client is the
    same as on the server.
    """

    name: str
    _samples: Samples
    _where: np.ndarray
    _seed: int
    _round: int

    def __len__(self) -> int:
        return len(self._where)

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
        """Mini-batches of freshly shuffled epochs; the last of an epoch takes what is left.

        Parameters
        ----------
        size : samples per batch.
        epochs, steps : number of passes, or exact number of batches; neither: one pass.
        fraction : share of the samples that is used, rounded down. It has the same samples in all rounds, and a larger
            share contains a smaller one.
        augment : whether images are augmented by the experiment's ``data.augmentation``.
        stream : other names give other batches.
        """
        if size < 1 or not 0 < fraction <= 1 or (epochs is not None and steps is not None):
            raise MethodError(
                f"Batches of the pool {self.name!r} need a size of at least 1, a fraction above 0 and at most 1, and "
                f"epochs or steps, not both; they are {size}, {fraction}, {epochs} and {steps}."
            )
        count = int(fraction * len(self) + 1e-9)
        if count == 0:
            raise MethodError(f"A fraction of {fraction} of the pool {self.name!r}, {len(self)} samples, has none.")
        key = rng.key(self._seed, f"pool fraction/{self.name}")
        chosen = np.sort(rng.permutations(np.array([key], dtype=np.uint64), len(self))[0, :count])
        if steps is None:
            steps = -(-count // size) * (1 if epochs is None else epochs)
        samples = self._samples if augment else replace(self._samples, augmentation=())
        keys = [
            rng.key(self._seed, f"pool {what}/{self.name}/{stream}", self._round)
            for what in ("batches", "augmentation")
        ]
        return PoolBatches(samples, self._where[chosen], size, steps, np.array(keys, dtype=np.uint64))


@dataclass(frozen=True, eq=False)
class PoolBatches:
    """Mini-batches of a pool, made one by one, and the same in every iteration; ``len`` is their number.

    Attributes
    ----------
    indices : ``int64[m]``, the samples that they are drawn from.
    keys : ``uint64[2]``, of the order of samples, and of augmentation.
    targets : ``[v, ...]``, in place of labels: a row for each input, in the order of :meth:`once`.
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
        shuffled, visited, seen = self._shuffled(0), self._visited(), 0
        for step in range(self.steps):
            epoch, place = divmod(step, self._per_epoch)
            if step and not place:
                shuffled = self._shuffled(epoch)
            index = shuffled[place * self.size : (place + 1) * self.size]
            batch = self.samples.augmented(self._batch(index), self._draws(step, len(index)))
            if self.targets is not None:
                rows = np.searchsorted(visited, index)
                if self.samples.augmentation:
                    rows = np.arange(seen, seen + len(index))
                targets = self.targets[torch.from_numpy(rows).to(self.targets.device)]
                batch = batch._replace(y=targets.to(batch.weight.device))
            seen += len(index)
            yield batch

    def once(self, size: int) -> Iterator[Batch]:
        """Every input once, at most `size` per batch: the visited samples in ascending order.

        If they are augmented, every visit is another input: then these are the mini-batches themselves.
        """
        if self.samples.augmentation:
            for batch in self:
                yield from (Batch(*part) for part in zip(*(field.split(size) for field in batch), strict=True))
            return
        visited = self._visited()
        for first in range(0, len(visited), size):
            yield self._batch(visited[first : first + size])

    def with_targets(self, rows: Tensor) -> PoolBatches:
        """The same batches with rows ``[v, ...]`` in place of labels, where :meth:`once` gives v inputs.

        A teacher then runs once on each input, however often the student sees it.
        """
        if len(rows) != self._inputs:
            raise MethodError(
                f"Targets have {len(rows)} rows, but {self._inputs} samples are visited. Give a row for each "
                "sample of once(), in that order."
            )
        return replace(self, targets=rows)

    @property
    def _inputs(self) -> int:
        """How many inputs :meth:`once` gives."""
        if not self.samples.augmentation:
            return len(self._visited())
        epochs, rest = divmod(self.steps, self._per_epoch)
        return epochs * len(self.indices) + min(rest * self.size, len(self.indices))

    @property
    def _per_epoch(self) -> int:
        return -(-len(self.indices) // self.size)

    def _visited(self) -> np.ndarray:
        """Positions in `indices` of the visited samples, ascending."""
        if self.steps >= self._per_epoch:
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
        drawn = draws(key, count, sum(one.draws for one in self.samples.augmentation))[0]
        return torch.from_numpy(drawn).to(self.samples.gain.device)
