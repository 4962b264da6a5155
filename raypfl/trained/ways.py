"""What a served run makes a new client's model from: the client's descriptor, or its samples."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from raypfl.common.errors import DataError, RaypflError
from raypfl.models.trained_model import TrainedModel
from raypfl.trained.describing import can_describe, embedder_file, models_of_descriptors
from raypfl.trained.models import TrainedModels
from raypfl.trained.new_clients import Labelled, checked, numbered, refuse_without_way

HELD_OUT = 0.25
"""Share of a client's samples that its model is tested on, unless a request says another."""


@dataclass(frozen=True)
class Made:
    """A model that was made for a client, and what is known about it."""

    model: TrainedModel
    facts: Mapping[str, Any]


class Way(ABC):
    """How a run makes models for new clients.

    Attributes
    ----------
    path : of the request for a model.
    arrays : what is in its body, by name.
    files : further files that a client can get, by path.
    """

    path: ClassVar[str]
    arrays: ClassVar[tuple[str, ...]]

    def __init__(self, models: TrainedModels):
        self.models = models
        self.files: dict[str, bytes] = {}

    @abstractmethod
    def checked(self, arrays: Mapping[str, np.ndarray], held_out: float | None) -> Any:
        """What a model is made from.

        `held_out` : share of the samples that the model is only tested on; None: it was not asked for.

        Raises
        ------
        DataError : if it does not fit the run, with the reason.
        """

    @abstractmethod
    def make(self, given: Sequence[Any]) -> list[Made | RaypflError]:
        """The model for each client, or why there is none."""


class FromDescriptor(Way):
    """PeFLL: the client describes its samples with the embedding network, and they stay with it."""

    path: ClassVar[str] = "/model"
    arrays: ClassVar[tuple[str, ...]] = ("descriptor",)

    def __init__(self, models: TrainedModels):
        super().__init__(models)
        self.files = {"/embedding": embedder_file(models)}
        self._length = models.experiment.method.vector_length(models.task)  # type: ignore[attr-defined]

    def checked(self, arrays: Mapping[str, np.ndarray], held_out: float | None) -> np.ndarray:
        if held_out is not None:
            raise DataError("held_out is for services that get samples; hold some out yourself, and test the model.")
        descriptor = arrays["descriptor"]
        if descriptor.shape != (self._length,) or descriptor.dtype.kind not in "iuf":
            raise DataError(
                f"descriptor is {descriptor.dtype}{list(descriptor.shape)}, but must be {self._length} numbers: the "
                "mean embedding of a client's samples, by the network of GET /embedding."
            )
        if not np.isfinite(descriptor).all():
            raise DataError("descriptor has a number that is not finite.")
        return descriptor.astype(np.float64)

    def make(self, given: Sequence[np.ndarray]) -> list[Made | RaypflError]:
        try:
            return [Made(model, {}) for model in models_of_descriptors(self.models, np.stack(given))]
        except RaypflError as error:
            if len(given) == 1:
                return [error]
            return [self.make([descriptor])[0] for descriptor in given]  # the others can do without it


class FromSamples(Way):
    """Methods that train for a new client: the client uploads its labelled samples."""

    path: ClassVar[str] = "/personalize"
    arrays: ClassVar[tuple[str, ...]] = ("x", "y")

    def checked(self, arrays: Mapping[str, np.ndarray], held_out: float | None) -> tuple[Labelled, float]:
        y = numbered(arrays["y"], class_names(self.models) or [])
        return checked(arrays["x"], y, self.models.outline), HELD_OUT if held_out is None else held_out

    def make(self, given: Sequence[tuple[Labelled, float]]) -> list[Made | RaypflError]:
        """Clients that hold out the same share are made together."""
        made: dict[int, Made | RaypflError] = {}
        for held_out in dict.fromkeys(share for _, share in given):
            places = [place for place, (_, share) in enumerate(given) if share == held_out]
            together = self._together([given[place][0] for place in places], held_out)
            made |= dict(zip(places, together, strict=True))
        return [made[place] for place in range(len(given))]

    def _together(self, samples: list[Labelled], held_out: float) -> list[Made | RaypflError]:
        try:
            clients = self.models.personalize_all(samples, held_out)
        except RaypflError as error:
            if len(samples) == 1:
                return [error]
            return [self._together([client], held_out)[0] for client in samples]  # the others can do without it
        return [Made(client.model, client.facts) for client in clients]


def way_of(models: TrainedModels) -> Way:
    """How a run makes models for new clients.

    Raises
    ------
    ConfigError : if it has no way.
    """
    if can_describe(models):
        return FromDescriptor(models)
    refuse_without_way(models.experiment.method)
    return FromSamples(models)


def class_names(models: TrainedModels) -> list[str] | None:
    """The names of the run's classes or labels; None: its targets are neither."""
    outline = models.outline
    if outline.kind not in ("classes", "labels"):
        return None
    return list(getattr(outline, "class_names", None) or map(str, range(outline.num_classes)))
