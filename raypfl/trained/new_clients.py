"""Models for clients that were not in the run, each from some labelled samples of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from raypfl.clients.context import Context
from raypfl.common.errors import ConfigError, DataError, did_you_mean
from raypfl.data.datasets import RawData
from raypfl.data.datasets.settings import SPLITS
from raypfl.data.partitions import Traits
from raypfl.data.splits import hold_out
from raypfl.learning.batches import Samples
from raypfl.models.trained_model import TrainedModel
from raypfl.trained.saved_model import Origin, inputs_of, save

if TYPE_CHECKING:
    from raypfl.engine.outline import DataOutline
    from raypfl.federation.method import Method

Labelled = tuple[np.ndarray, np.ndarray]
"""Inputs ``x[n, ...]`` as the run's data set has them, and their targets ``y[n]``."""

_TRAIN, _TEST = SPLITS.index("train"), SPLITS.index("test")
_CAST = {"classes": np.int64, "labels": np.int8, "tokens": np.int64}


@dataclass(frozen=True)
class NewClient:
    """A model that was made for a client that was not in the run.

    Attributes
    ----------
    model : in evaluation mode, for inputs as the run's data set has them.
    samples : number of samples that it was made from.
    held_out : number of samples that it was tested on.
    metrics : what it reached on those, by name; empty if there are none.
    seconds : that it took to make it, or those that were asked for together with it.
    epsilon : what the model spent of the client's privacy, if the run's ``privacy`` protects samples; else None.
    origin : what the run says about it.
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
        """All that is known about the model, except the model."""
        return {name: getattr(self, name) for name in ("samples", "held_out", "metrics", "seconds", "epsilon")}

    def save(self, file: str | Path) -> Path:
        """Write the model as safetensors, which :func:`raypfl.load_model` reads; see there."""
        return save(self.model, self.origin, file, self.facts)


@dataclass(eq=False)
class _NewClients(Context):
    """What new clients share. All have the same draws, so a model depends on its own client's samples alone."""

    def keys(self, purpose: str, round: int, clients: Sequence[int]) -> np.ndarray:
        return super().keys(purpose, round, [0] * len(clients))


def refuse_without_way(method: Method) -> None:
    """Raise a ConfigError if a method makes no models for clients that were not in the run."""
    if not (method.has("unseen_model") or method.has("personalize")):
        raise ConfigError(
            f"{type(method).__name__} has no way to make a model for a new client. It gets the global model, if there "
            "is one: raypfl.trained_models(RUN).global_model()."
        )


def checked(x: Any, y: Any, outline: DataOutline) -> Labelled:
    """The samples of a new client, as the run's data set would have them.

    Raises
    ------
    DataError : if they do not fit, with the reason.
    """
    x, y = np.asarray(x), np.asarray(y)
    _refuse_other_shape(x, outline, "x")
    if y.shape[:1] != x.shape[:1]:
        raise DataError(f"x has {len(x)} samples, but y has the shape {list(y.shape)}; y needs a target for each.")
    if not len(x):
        raise DataError("x and y are empty; a model is made from at least one labelled sample.")
    x = _inputs(x, outline, "x")
    kind = outline.kind
    if kind in _CAST and y.dtype.kind not in "iub":
        raise DataError(f"y is {y.dtype}, but the run's targets are {kind}, which are integers.")
    targets = y.astype(_CAST.get(kind, np.float32))
    if kind in _CAST and not np.array_equal(targets, y):
        raise DataError(f"y has numbers that are no {kind} of the run: they must fit into {targets.dtype}.")
    raw = RawData(x, targets, [str(number) for number in range(outline.num_classes)])
    if raw.kind != kind:
        raise DataError(f"y has the shape {list(y.shape)}, in which it has {raw.kind}; the run's targets are {kind}.")
    return x, targets


def numbered(y: Any, names: Sequence[str]) -> np.ndarray:
    """Targets with classes by number, where they are given by name.

    Raises
    ------
    DataError : if there is no class of that name.
    """
    y = np.asarray(y)
    if y.dtype.kind != "U":
        return y
    given = y.ravel().tolist()
    for name in given:
        if name not in names:
            raise DataError(f"y has {name!r}, which is no class of the run; {did_you_mean(name, names)}")
    return np.array([names.index(name) for name in given], np.int64).reshape(y.shape)


def checked_inputs(x: Any, outline: DataOutline, name: str) -> np.ndarray:
    """Inputs to predict for, as the run's data set would have them; `name` is theirs in messages.

    Raises
    ------
    DataError : if they do not fit, with the reason.
    """
    x = np.asarray(x)
    _refuse_other_shape(x, outline, name)
    if not len(x):
        raise DataError(f"{name} is empty.")
    return _inputs(x, outline, name)


def _refuse_other_shape(x: np.ndarray, outline: DataOutline, name: str) -> None:
    if x.ndim != 1 + len(outline.input_shape) or x.shape[1:] != tuple(outline.input_shape):
        raise DataError(f"{name} has the shape {list(x.shape)}, but the run's inputs are {inputs_of(outline)}.")


def _inputs(x: np.ndarray, outline: DataOutline, name: str) -> np.ndarray:
    if x.dtype.kind not in "iufb":
        raise DataError(f"{name} is {x.dtype}, not numbers.")
    if outline.discrete:
        if x.dtype.kind not in "iu":
            raise DataError(f"{name} is {x.dtype}, but the run's inputs are tokens, which are integers.")
        return x.astype(np.int64)
    if not np.isfinite(x).all():
        raise DataError(f"Sample {np.argwhere(~np.isfinite(x))[0][0]} of {name} has an input that is not finite.")
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


def context_of(context: Context, outline: DataOutline, clients: Sequence[Labelled], held_out: float) -> Context:
    """The context of a run, with these clients' samples in place of its own; clients are numbered from 0.

    `held_out` : share of each client's samples that is its test split, class by class; the rest is its train split.
    """
    counts = [len(y) for _, y in clients]
    ends, of = np.cumsum(counts), context.samples
    splits = [_splits(y, outline, held_out, context.seed) for _, y in clients]

    def split(client: int, name: str) -> np.ndarray:
        first = int(ends[client]) - counts[client]
        return first + np.flatnonzero(splits[client] == SPLITS.index(name))

    inputs, labels = (np.concatenate(part) for part in zip(*clients, strict=True))
    known = {one.name: getattr(context, one.name) for one in fields(Context)}
    own = Samples(inputs, labels, of.gain, of.offset, of.augmentation)
    return _NewClients(**known | {"samples": own, "split": split, "_unions": {}})


def _splits(y: np.ndarray, outline: DataOutline, held_out: float, seed: int) -> np.ndarray:
    classes = outline.kind == "classes"
    labels = y if classes else np.zeros(len(y), dtype=np.int64)
    traits = Traits(labels, outline.num_classes if classes else 1)
    return hold_out(traits, np.zeros(len(y), dtype=np.int64), held_out, 0.0, seed)
