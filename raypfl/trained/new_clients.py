"""Models for clients that were not in the run, each from some labelled samples of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from raypfl.clients.context import Context
from raypfl.common.errors import ConfigError, DataError
from raypfl.data.datasets import RawData
from raypfl.data.datasets.raw_data import as_array, class_numbers, in_single_precision, refuse_unknown_tokens
from raypfl.data.datasets.settings import SPLITS
from raypfl.data.partitions import Traits
from raypfl.data.splits import hold_out
from raypfl.learning.batches import Samples
from raypfl.methods import METHODS
from raypfl.trained.saved_model import Origin, inputs_of, save
from raypfl.trained.trained_model import TrainedModel

if TYPE_CHECKING:
    from raypfl.engine.building.data_outline import DataOutline
    from raypfl.experiment import Experiment

Labelled = tuple[np.ndarray, np.ndarray]
"""Inputs ``x[n, ...]`` as the run's data set has them, and their targets ``y[n]``."""

_INTEGER_TARGETS = {"classes": np.int64, "labels": np.int8, "tokens": np.int64}
"""Kinds of targets that are integers, and the types in which they are stored."""


@dataclass(frozen=True)
class NewClient:
    """A model that was made for a client that was not in the run.

    Attributes
    ----------
    model : the model, in evaluation mode, for inputs as the run's data set has them.
    samples : the number of samples that it was made from.
    held_out : the number of samples that it was tested on.
    metrics : its metrics on those, by name; empty if there are none.
    seconds : the time to make it, or all models that were made together with it.
    epsilon : the client's privacy that making it spent, if the run's ``privacy`` protects samples; else None.
    origin : the description of the run.
    """

    model: TrainedModel
    samples: int
    held_out: int
    metrics: dict[str, float]
    seconds: float
    epsilon: float | None
    origin: Origin

    @property
    def facts(self) -> dict[str, Any]:
        """The attributes that describe the model, without the model and the run."""
        return {name: getattr(self, name) for name in ("samples", "held_out", "metrics", "seconds", "epsilon")}

    def save(self, file: str | Path) -> Path:
        """Write the model as safetensors, which :func:`raypfl.load_model` reads; see there."""
        return save(self.model, self.origin, file, self.facts)


@dataclass(eq=False)
class _NewClients(Context):
    """The context of new clients. All have the same draws, so a model depends on its own client's samples alone."""

    def keys(self, purpose: str, rounds: np.ndarray, clients: Sequence[int]) -> np.ndarray:
        return super().keys(purpose, rounds, [0] * len(clients))


def require_new_client_models(experiment: Experiment) -> None:
    """Raise a ConfigError if a run's method makes no models for clients that were not in the run."""
    if experiment.model.is_heterogeneous:
        raise ConfigError(
            "model is heterogeneous, and nothing says which of its networks a new client would have. Keep clients of "
            "the run out of its training, with data.unseen_fraction, or use a run of one network."
        )

    method = experiment.method
    if not (method.has("unseen_model") or method.has("personalize")):
        advice = "It has no global model either, which such a client could get."
        if method.has("global_model"):
            advice = "A new client gets the global model as it is, by raypfl.trained_models(RUN).global_model()."
        if type(method).__module__.startswith("raypfl."):
            advice += " Or run a method that makes one, such as fedavg-ft, which fine-tunes the global model."
        else:
            advice += " A method of your own makes one if it defines unseen_model or personalize: docs/new_clients.md."
        raise ConfigError(f"{METHODS.name_of(type(method))} has no way to make a model for a new client. {advice}")


def checked_samples(x: Any, y: Any, outline: DataOutline) -> Labelled:
    """Return the samples of a new client, as the run's data set would have them; classes may be given by name.

    Raises
    ------
    DataError : if they do not fit, with the reason.
    """
    x = checked_inputs(x, outline, "x")
    y = as_array(y, "y")
    names = class_names(outline)
    if names is not None:
        y = class_numbers(y, names)
    if y.shape[:1] != x.shape[:1]:
        raise DataError(f"x has {len(x)} samples, but y has the shape {list(y.shape)}; y needs a target for each.")

    kind = outline.kind
    if kind in _INTEGER_TARGETS and y.dtype.kind not in "iub":
        raise DataError(f"y is {y.dtype}, but the run's targets are {kind}, which are integers.")
    if y.dtype.kind not in "iufb":
        raise DataError(f"y is {y.dtype}, not numbers.")
    targets = y.astype(_INTEGER_TARGETS[kind]) if kind in _INTEGER_TARGETS else in_single_precision(y)
    if kind in _INTEGER_TARGETS and not np.array_equal(targets, y):
        raise DataError(f"y has numbers that are not {kind} of the run: they must fit into {targets.dtype}.")

    raw = RawData(x, targets, [str(number) for number in range(outline.num_classes)])
    if raw.kind != kind:
        raise DataError(f"y has the shape {list(y.shape)}, in which it has {raw.kind}; the run's targets are {kind}.")
    return x, targets


def class_names(outline: DataOutline) -> list[str] | None:
    """Return the names of the run's classes or labels; None if its targets are neither."""
    if outline.kind not in ("classes", "labels"):
        return None
    return list(getattr(outline, "class_names", None) or map(str, range(outline.num_classes)))


def checked_inputs(x: Any, outline: DataOutline, name: str) -> np.ndarray:
    """Return inputs as the run's data set would have them.

    Parameters
    ----------
    name : the name of the inputs in messages.

    Raises
    ------
    DataError : if they do not fit, with the reason.
    """
    x = as_array(x, name)
    if x.ndim != 1 + len(outline.input_shape) or x.shape[1:] != tuple(outline.input_shape):
        raise DataError(f"{name} has the shape {list(x.shape)}, but the run's inputs are {inputs_of(outline)}.")
    if not len(x):
        raise DataError(f"{name} is empty; it needs at least one sample.")
    if x.dtype.kind not in "iufb":
        raise DataError(f"{name} is {x.dtype}, not numbers.")
    if outline.discrete:
        if x.dtype.kind not in "iu":
            raise DataError(f"{name} is {x.dtype}, but the run's inputs are tokens, which are integers.")
        refuse_unknown_tokens(x, getattr(outline, "vocabulary", None), name)
        return x.astype(np.int64)

    is_finite = np.isfinite(in_single_precision(x))
    if not is_finite.all():
        raise DataError(f"Sample {np.argwhere(~is_finite)[0][0]} of {name} has an input that is not finite.")
    if outline.scale > 1:  # images, whose values are known
        if x.min() < 0 or x.max() > outline.scale:
            raise DataError(
                f"{name} has values from {x.min():g} to {x.max():g}, but the run's images have 0 to {outline.scale:g}; "
                "give them as they are stored, without normalisation."
            )
        if x.dtype.kind == "f" and x.max() <= 1 and (x % 1 != 0).any():
            raise DataError(
                f"{name} has values from {x.min():g} to {x.max():g}, as if it had been divided; the run's images have "
                f"0 to {outline.scale:g}."
            )
    return x if x.dtype == np.uint8 else x.astype(np.float32)


def context_of(context: Context, outline: DataOutline, clients: Sequence[Labelled], shares: Sequence[float]) -> Context:
    """Return the context of a run, with these clients' samples in place of its own; clients are numbered from 0.

    Parameters
    ----------
    shares : those of a client's samples in its test and its validation split, class by class; the rest is for training.
    """
    counts = [len(y) for _, y in clients]
    ends = np.cumsum(counts)
    splits = [_splits(y, outline, shares, context.seed) for _, y in clients]

    def split(client: int, name: str) -> np.ndarray:
        first = int(ends[client]) - counts[client]
        return first + np.flatnonzero(splits[client] == SPLITS.index(name))

    inputs = np.concatenate([x for x, _ in clients])
    targets = np.concatenate([y for _, y in clients])
    run_samples = context.samples
    samples = Samples(inputs, targets, run_samples.gain, run_samples.offset, run_samples.augmentation)
    attributes = {field.name: getattr(context, field.name) for field in fields(Context)}
    attributes |= {"samples": samples, "split": split, "num_clients": len(clients)}
    return _NewClients(**attributes | {"left_out": frozenset(), "_unions": {}})


def _splits(y: np.ndarray, outline: DataOutline, shares: Sequence[float], seed: int) -> np.ndarray:
    zeros = np.zeros(len(y), dtype=np.int64)
    traits = Traits(y, outline.num_classes) if outline.kind == "classes" else Traits(zeros, 1)
    return hold_out(traits, zeros, shares[0], shares[1], seed)
