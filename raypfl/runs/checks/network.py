"""Whether the network works with the data: with their shape, batches of one, the outputs, channels-last images."""

from __future__ import annotations

import re
import warnings
from typing import Any

import numpy as np
import torch
from torch.nn.modules.batchnorm import _BatchNorm

from raypfl.clients.context import FallbackWarning
from raypfl.common import streams
from raypfl.common.errors import ConfigError
from raypfl.common.user_code import with_location
from raypfl.engine.prepared import Prepared
from raypfl.federation.exchange.backend import ONE_SAMPLE
from raypfl.learning.executor import Precision
from raypfl.learning.objectives.classification import Classification
from raypfl.learning.settings import TrainingSettings
from raypfl.methods import METHODS
from raypfl.models.lora import factor_pairs

FEW = 2
"""Samples in a batch, and clients in a group, of a smoke test."""


_FOR_TEXTS = (
    "Samples are texts; networks for them are fasttext, text_cnn, text_transformer and, up to a data.length of their "
    "own, transformers:NAME."
)


def refuse_misfit(prepared: Prepared) -> None:
    """Raise a ConfigError if the network fails for samples of the data's shape."""
    error = error_of_batch(prepared, channels_last=False)
    if error is None:
        return

    data = prepared.data
    tokens = " Its inputs are int64, which are tokens; numbers must be float32 or float64." if data.discrete else ""
    if _vocabulary(prepared):
        tokens = f" {_FOR_TEXTS}"
    raise ConfigError(
        f"model is {prepared.experiment.model.name!r}, which fails for samples of {prepared.experiment.data.name!r}, "
        f"whose shape is {tuple(data.input_shape)}.{tokens} {type(error).__name__}: {with_location(error)}"
    ) from error


def _vocabulary(prepared: Prepared) -> list[str]:
    """Return the words of the samples; of samples that are no texts, none."""
    return getattr(prepared.data, "vocabulary", None) or []


def refuse_missing_adapters(prepared: Prepared) -> None:
    """Raise a ConfigError if the method needs low-rank adapters, and the network has none with both factors trained."""
    method = prepared.experiment.method
    if not method.needs_lora or factor_pairs(prepared.model):
        return

    remedy = "the network has none. Set model.lora to their rank, such as model.lora=4."
    if prepared.model.common_parts["lora A"]:
        remedy = "model.frozen or model.trained freezes them. Leave both out, or name 'adapters' in model.trained."
    raise ConfigError(f"method is {METHODS.name_of(type(method))!r}, which is for low-rank adapters, but {remedy}")


def refuse_frozen_output_layer(prepared: Prepared) -> None:
    """Raise a ConfigError if the method changes the output layer's weight, which is frozen."""
    method = prepared.experiment.method
    if method.needs_output_layer and "weight" not in prepared.model.output_tensors:
        raise ConfigError(
            f"method is {METHODS.name_of(type(method))!r}, which changes the output layer, but its weight is "
            "frozen. Leave it out of model.frozen, name 'output layer' in model.trained, or choose another method."
        )


def refuse_mixed_samples(prepared: Prepared) -> None:
    """Raise a ConfigError if the optimizer needs the gradient of each sample, and batch norm mixes samples."""
    optimizer = prepared.experiment.training.local_optimizer
    if optimizer.per_sample and prepared.model.mixes_rows:
        raise ConfigError(
            f"training.optimizer is {type(optimizer).__name__}, which needs the gradient of each sample, but batch "
            f"norm in {prepared.experiment.model.name} mixes the samples of a batch. Choose group norm (norm: group), "
            "a network without batch norm, or freeze the layers that have it."
        )


def refuse_lone_samples(prepared: Prepared, number: int) -> None:
    """Raise a ConfigError if a client has a mini-batch of one sample, in which the network's batch norm fails.

    `number` : the network's number; if clients have different ones, only those with this one count.
    """
    experiment = prepared.experiment
    training = experiment.training
    skips_failures = experiment.failures.on_client_failure == "skip"
    has_batch_norm = any(isinstance(module, _BatchNorm) for module in prepared.model.module.modules())
    if skips_failures or experiment.privacy.protects_samples or not has_batch_norm:
        return

    clients = np.setdiff1d(np.arange(prepared.data.num_clients), prepared.data.unseen)
    if prepared.architecture_of is not None:
        clients = clients[prepared.architecture_of[clients] == number]
    sizes = prepared.data.sizes("train")[clients]
    have_lone_samples = _have_lone_samples(training, sizes)
    if not have_lone_samples.any():
        return

    error = error_of_batch(prepared, channels_last=False, samples=1)
    if error is None or ONE_SAMPLE not in str(error):
        return

    first = int(np.flatnonzero(have_lone_samples)[0])
    client = clients[first]
    size = sizes[first]
    if training.batch_size == 1:
        cause = "training.batch_size is 1"
        remedy = "Raise it"
    elif size == 1:
        cause = f"client {client} has one training sample"
        remedy = "Let the partition give every client two, such as by partition.min_samples"
    else:
        cause = f"client {client}'s {size} training samples leave one in batches of {training.batch_size}"
        remedy = "Set training.smallest_batch=2, which leaves such batches out"
    raise ConfigError(
        f"model is {experiment.model.name!r}, whose batch norm cannot train on a mini-batch of one sample, but "
        f"{cause}. {remedy}, or choose a network without batch norm (model.norm=group where the model has it)."
    )


def _have_lone_samples(training: TrainingSettings, sizes: np.ndarray) -> np.ndarray:
    """Return which clients, with ``sizes[K]`` training samples, train on a mini-batch of one: ``bool[K]``."""
    batch_size = training.batch_size
    leaves_one = (sizes > batch_size) & (sizes % batch_size == 1) & (training.smallest_batch < 2)
    if training.steps is not None:
        leaves_one &= training.steps > sizes // batch_size
    return leaves_one | (sizes == 1) | (batch_size == 1)


def refuse_outputs(prepared: Prepared, outputs: Any) -> None:
    """Raise a ConfigError if the method has a global model, and its `outputs` of a batch do not suit the objective."""
    mismatch = prepared.measures.output_mismatch(outputs)
    if not mismatch:
        return

    # Personal models may make predictions of other outputs, but every global model is judged by its own.
    method = prepared.experiment.method
    if prepared.experiment.global_model(method.start(prepared.task)) is not None:
        raise ConfigError(
            f"model is {prepared.experiment.model.name!r}, which does not fit {prepared.data.name!r}: it {mismatch}"
            + (f" {_FOR_TEXTS}" if _vocabulary(prepared) else "")
        )


def warn_of_probabilities(prepared: Prepared, outputs: Any) -> None:
    """Warn if the network ends in a softmax, as its `outputs` of a batch show; the cross-entropy applies it again."""
    # An objective of one's own may take probabilities.
    if type(prepared.objective) is not Classification:
        return

    are_tensors = isinstance(outputs, torch.Tensor) and outputs.ndim == 2 and outputs.shape[1] > 1
    if are_tensors and bool((outputs >= 0).all()) and torch.allclose(outputs.sum(1), outputs.new_ones(()), atol=1e-3):
        warnings.warn(
            f"The outputs of model {prepared.experiment.model.name!r} are probabilities: none is negative, and their "
            "sum is 1. The loss applies a softmax to them once more, so the network learns slowly. Leave its softmax "
            "out.",
            stacklevel=2,
        )


def refuse_channels_last(prepared: Prepared) -> None:
    """Raise a ConfigError if the network fails on images channels last, and only on those."""
    error = error_of_batch(prepared, channels_last=True)
    if error is None or error_of_batch(prepared, channels_last=False) is not None:
        return

    raise ConfigError(
        f"training.channels_last is true, but the network ({type(prepared.model.module).__name__}) does not work on "
        f"images in that layout: {first_line(error)} In its forward, replace x.view(len(x), -1) by x.flatten(1), or "
        "leave training.channels_last out."
    ) from error


def error_of_batch(prepared: Prepared, channels_last: bool, samples: int = FEW) -> Exception | None:
    """Return what the network raises for a batch, in training or evaluation; None if it works."""
    for train in (True, False):
        try:
            outputs_of_batch(prepared, channels_last, train, samples)
        except Exception as error:
            return error
    return None


def outputs_of_batch(prepared: Prepared, channels_last: bool, train: bool, samples: int = FEW) -> Any:
    """Return what the network returns for a batch of zeros or, of texts, of the last word of the vocabulary."""
    model = prepared.model
    precision = Precision.named(prepared.experiment.training.precision, channels_last)
    dtype = torch.int64 if prepared.data.discrete else model.dtype
    value = max(len(_vocabulary(prepared)) - 1, 0)
    inputs = torch.full((samples, *prepared.data.input_shape), value, dtype=dtype, device=model.device)
    x = precision.layout(inputs)
    with torch.no_grad(), streams.forked(model.device), precision.context(model.device), model.mode(train):
        return model(model.init(0), x)


def first_line(error: Exception) -> str:
    """Return the first line of an error; for a FallbackWarning, of the error that caused it."""
    text = str(error).rpartition(FallbackWarning.BECAUSE)[2]
    # What torch asks its own users for is of no use here.
    text = re.sub(r",? please file an issue at \S+ ?", "", text)
    if isinstance(error, FallbackWarning):
        return text.splitlines()[0]
    return f"{type(error).__name__}: {text}".splitlines()[0]
