"""Outputs of a group's models on test samples, batch by batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from raypfl.common.transfer import to_device
from raypfl.learning.batches import Samples
from raypfl.learning.executor import Executor
from raypfl.learning.vectorised import Vectorised
from raypfl.models.predictor import Predictor

InputChange = Callable[[Tensor, np.ndarray, int], Tensor]
"""``change(x, indices, first)``: the changed inputs ``uint8[n, C, H, W]`` of the samples ``indices[n]``, which begin at
position `first` of the test set."""

MODELS_WITH_FULL_BATCHES = 25
"""Number of models that get full batches in one forward pass; more models get smaller ones, which bounds memory."""


class ModelOutputs(NamedTuple):
    """The outputs of some of a group's models on a batch.

    Attributes
    ----------
    models : the positions of the models in the group.
    outputs : the outputs, ``[k, b, ...]``.
    y : the classes ``int64[k, b]``, or L labels of zeros and ones per sample, ``[k, b, L]``; k is 1 if all models see
        the same samples.
    weight : the samples' weights, ``[k, b]``, 0 for padding; None: there is no padding.
    owners : the clients to whom the samples belong, ``int64[b]``, where one model is tested for several clients; None:
        each model is tested on its own client's samples.
    """

    models: slice
    outputs: Tensor
    y: Tensor
    weight: Tensor | None
    owners: Tensor | None = None


def outputs_on_own_samples(
    executor: Executor, samples: Samples, models: Tensor | Predictor, indices: Sequence[np.ndarray], size: int
) -> Iterator[ModelOutputs]:
    """Run each of K models, ``[K, P+B]`` or a predictor's, on its samples ``indices[k]``, at most `size` at a time."""
    if isinstance(executor, Vectorised) and len(models) > 1:
        yield from _vectorised_on_own_samples(executor, samples, models, indices, size)
        return

    for k, model_indices in enumerate(indices):
        for first in range(0, len(model_indices), size):
            x, y = samples.take(model_indices[first : first + size])
            outputs = executor.predict(models[k : k + 1], samples.normalise(x)[None], own_inputs=True)
            yield ModelOutputs(slice(k, k + 1), outputs, y[None], None)


def outputs_on_shared_samples(
    executor: Executor,
    samples: Samples,
    models: Tensor | Predictor,
    indices: np.ndarray,
    size: int,
    change: InputChange | None = None,
) -> Iterator[ModelOutputs]:
    """Run all of K models, ``[K, P+B]`` or a predictor's, on the samples ``indices[n]``."""
    for first in range(0, len(indices), size):
        batch_indices = indices[first : first + size]
        x, y = samples.take(batch_indices)
        if change is not None:
            x = change(x, batch_indices, first)
        outputs = executor.predict(models, samples.normalise(x), own_inputs=False)
        yield ModelOutputs(slice(0, len(models)), outputs, y[None], None)


def _vectorised_on_own_samples(
    executor: Executor, samples: Samples, models: Tensor | Predictor, indices: Sequence[np.ndarray], size: int
) -> Iterator[ModelOutputs]:
    sizes = np.array([len(model_indices) for model_indices in indices])
    size = min(size, max(1, MODELS_WITH_FULL_BATCHES * size // len(indices)))

    # Shorter rows are padded with a sample of weight 0. It is one of this group's own: any other sample might not
    # exist, or might have to be fetched.
    padding_sample = next((model_indices[0] for model_indices in indices if len(model_indices)), 0)
    padded = np.full((len(indices), int(sizes.max(initial=0))), padding_sample, dtype=np.int64)
    for row, model_indices in zip(padded, indices, strict=True):
        row[: len(model_indices)] = model_indices

    for first in range(0, padded.shape[1], size):
        part = padded[:, first : first + size]
        remaining = sizes[:, None] - first
        x, y = samples.take(part.reshape(-1))
        x = samples.normalise(x)
        x = x.reshape(*part.shape, *x.shape[1:])
        y = y.reshape(*part.shape, *y.shape[1:])

        weight = None
        if int(remaining.min()) < part.shape[1]:
            weight = to_device(np.arange(part.shape[1]) < remaining, x.device).to(x.dtype)
        yield ModelOutputs(slice(0, len(models)), executor.predict(models, x, own_inputs=True), y, weight)
