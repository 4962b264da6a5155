"""A group's models on test samples, batch by batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from raypfl.learning.batches import Samples
from raypfl.learning.executor import Executor
from raypfl.learning.vectorised import Vectorised
from raypfl.models.predictor import Predictor

InputChange = Callable[[Tensor, np.ndarray, int], Tensor]
"""``change(x, where, first)``: the inputs ``uint8[n, C, H, W]`` to test on, of the samples ``where[n]``, which begin at
position `first` of the test set."""

TOGETHER = 25
"""Models that get full batches in one forward pass; more models get smaller batches, which bounds memory."""


class ModelOutputs(NamedTuple):
    """The outputs of some of a group's models on a batch.

    Attributes
    ----------
    models : which of the group's.
    outputs : ``[k, b, ...]``.
    y : classes ``int64[k, b]``, or L labels a sample, ``[k, b, L]`` zeros and ones; k is 1 if all models see the same.
    weight : ``[k, b]``, 0 for padding; None: there is none.
    owners : ``int64[b]``, the clients whose samples one model was tested on; None: each model's answers are its own.
    """

    models: slice
    outputs: Tensor
    y: Tensor
    weight: Tensor | None
    owners: Tensor | None = None


def outputs_on_own_samples(
    executor: Executor, samples: Samples, models: Tensor | Predictor, where: Sequence[np.ndarray], size: int
) -> Iterator[ModelOutputs]:
    """Each of K models, ``[K, P+B]`` or a predictor's, on its samples ``where[k]``, at most `size` per forward pass."""
    if isinstance(executor, Vectorised) and len(models) > 1:
        yield from _together(executor, samples, models, where, size)
        return
    for k, mine in enumerate(where):
        for first in range(0, len(mine), size):
            x, y = samples.take(mine[first : first + size])
            outputs = executor.predict(models[k : k + 1], samples.normalise(x)[None], own=True)
            yield ModelOutputs(slice(k, k + 1), outputs, y[None], None)


def outputs_on_shared_samples(
    executor: Executor,
    samples: Samples,
    models: Tensor | Predictor,
    where: np.ndarray,
    size: int,
    change: InputChange | None = None,
) -> Iterator[ModelOutputs]:
    """All of K models, ``[K, P+B]`` or a predictor's, on the samples ``where[n]``."""
    for first in range(0, len(where), size):
        part = where[first : first + size]
        x, y = samples.take(part)
        x = samples.normalise(x if change is None else change(x, part, first))
        yield ModelOutputs(slice(0, len(models)), executor.predict(models, x, own=False), y[None], None)


def _together(
    executor: Executor, samples: Samples, models: Tensor | Predictor, where: Sequence[np.ndarray], size: int
) -> Iterator[ModelOutputs]:
    sizes = np.array([len(mine) for mine in where])
    size = min(size, max(1, TOGETHER * size // len(where)))
    index = np.zeros((len(where), int(sizes.max(initial=0))), dtype=np.int64)
    for row, mine in zip(index, where, strict=True):
        row[: len(mine)] = mine
    for first in range(0, index.shape[1], size):
        part = index[:, first : first + size]
        left = sizes[:, None] - first
        x, y = samples.take(part.reshape(-1))
        x, y = (t.reshape(*part.shape, *t.shape[1:]) for t in (samples.normalise(x), y))
        weight = None
        if int(left.min()) < part.shape[1]:
            weight = torch.from_numpy(np.arange(part.shape[1]) < left).to(x)
        yield ModelOutputs(slice(0, len(models)), executor.predict(models, x, own=True), y, weight)
