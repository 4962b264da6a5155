"""A group's samples, and the order in which its clients walk through them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from raypfl import rng


class Batch(NamedTuple):
    """One client's samples as a loss sees them; for a whole group every field has a leading client axis.

    Attributes
    ----------
    x : ``[b, C, H, W]``, normalised.
    y : ``int64[b]`` labels.
    weight : ``[b]``, 1 for a sample and 0 for padding. A loss must weigh its samples with it, as :meth:`mean` does.
    """

    x: Tensor
    y: Tensor
    weight: Tensor

    def mean(self, values: Tensor) -> Tensor:
        """Average of ``values[b, ...]`` over the samples of the batch, padding left out."""
        weight = self.weight.reshape(-1, *[1] * (values.dim() - 1))
        return (values * weight).sum(0) / self.weight.sum().clamp_min(1)


@dataclass(frozen=True)
class Samples:
    """The resident samples that batches are drawn from.

    Attributes
    ----------
    inputs : ``uint8[N, C, H, W]``, read-only NumPy (memory-mapped), or a tensor resident on the device.
    labels : ``int64[N]``.
    gain, offset : ``[C, 1, 1]``: the normalised input is ``uint8 * gain + offset``.
    """

    inputs: np.ndarray | Tensor
    labels: np.ndarray | Tensor
    gain: Tensor
    offset: Tensor

    def take(self, where: np.ndarray) -> tuple[Tensor, Tensor]:
        """``(uint8[n, C, H, W], int64[n])`` of the samples at ``where[n]``, on the device."""
        if isinstance(self.inputs, np.ndarray) and isinstance(self.labels, np.ndarray):
            x, y = torch.from_numpy(self.inputs[where]), torch.from_numpy(np.asarray(self.labels[where]))
            return x.to(self.gain.device), y.to(self.gain.device)
        index = torch.from_numpy(where).to(self.gain.device)
        return self.inputs[index], self.labels[index]

    def normalise(self, x: Tensor) -> Tensor:
        """``uint8[..., C, H, W]`` to the floating point that networks see."""
        return torch.addcmul(self.offset, x.to(self.gain.dtype), self.gain)


class GroupSamples:
    """One split of a group's clients, gathered once: row k holds client k's samples, padded to the longest."""

    def __init__(self, samples: Samples, indices: list[np.ndarray]):
        self._source = samples
        self.sizes = np.array([len(i) for i in indices], dtype=np.int64)
        self.width = int(self.sizes.max(initial=0))
        self._starts = np.concatenate([[0], np.cumsum(self.sizes)])
        self.x, self.y = samples.take(np.concatenate(indices))

    def client(self, k: int, index: Tensor | None = None) -> Batch:
        """Client k's samples at ``index[b]`` (positions in its own list; None: all of them), without padding."""
        rows = slice(int(self._starts[k]), int(self._starts[k + 1]))
        x, y = self.x[rows], self.y[rows]
        if index is not None:
            x, y = x[index], y[index]
        return Batch(self._source.normalise(x), y, torch.ones(len(y), dtype=self._source.gain.dtype, device=y.device))

    def walk(self, clients: np.ndarray, visits: Order) -> tuple[Tensor, Tensor]:
        """Where the batches of ``clients[k]`` lie, and which of their rows are real: ``(int64, float)[k, S, b]``."""
        at = self._starts[clients][:, None, None] + visits.index[clients]
        real = np.arange(at.shape[-1]) < visits.counts[clients][:, :, None]
        return torch.from_numpy(at).to(self.y.device), torch.from_numpy(real).to(self._source.gain)

    def group(self, at: Tensor, weight: Tensor) -> Batch:
        """The batch at ``at[k, b]``, as :meth:`walk` gives it."""
        return Batch(self._source.normalise(self.x[at]), self.y[at], weight)


@dataclass(frozen=True)
class Order:
    """Which samples a group's clients visit, step by step.

    Attributes
    ----------
    index : ``int64[K, S, b]`` positions in each client's own list; padding repeats position 0.
    counts : ``int64[K, S]`` real samples in each batch; 0 once a client has done its steps.
    """

    index: np.ndarray
    counts: np.ndarray

    @property
    def steps(self) -> np.ndarray:
        """``int64[K]`` steps of each client."""
        return (self.counts > 0).sum(1)


def order(keys: np.ndarray, sizes: np.ndarray, batch_size: int, epochs: int = 1, steps: int | None = None) -> Order:
    """Batches of ``batch_size`` from freshly shuffled epochs; the last batch of an epoch takes what is left.

    Row k depends on ``keys[k]`` and ``sizes[k]`` alone, so a client's batches are the same in every group.

    Parameters
    ----------
    keys : ``uint64[K]``. sizes : ``int64[K]``, at least 1.
    epochs, steps : `epochs` passes, or exactly `steps` batches if that is given.
    """
    per_epoch = -(-sizes // batch_size)
    if steps is not None:
        epochs = int(-(-steps // per_epoch.min())) if steps else 0
    totals = np.minimum(per_epoch * epochs, steps) if steps is not None else per_epoch * epochs
    longest = int(totals.max(initial=0))
    width = int(sizes.max())
    index = np.zeros((len(keys), longest, batch_size), dtype=np.int64)
    counts = np.zeros((len(keys), longest), dtype=np.int64)
    shuffled = [_shuffle(keys, epoch, sizes, width) for epoch in range(epochs)]
    for k, (n, batches, total) in enumerate(zip(sizes, per_epoch, totals, strict=True)):
        for epoch in range(-(-int(total) // int(batches))):
            first = epoch * batches
            last = min(first + batches, total)
            visited = shuffled[epoch][k, : min(n, (last - first) * batch_size)]
            index[k, first:last].reshape(-1)[: len(visited)] = visited
            counts[k, first:last] = np.minimum(batch_size, n - batch_size * np.arange(last - first))
    return Order(index, counts)


def _shuffle(keys: np.ndarray, epoch: int, sizes: np.ndarray, width: int) -> np.ndarray:
    with np.errstate(over="ignore"):
        epoch_keys = rng.mix(np.asarray(keys, dtype=np.uint64) + np.uint64(epoch))
    return rng.permutations(epoch_keys, width, sizes)
