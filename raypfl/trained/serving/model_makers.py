"""How a served run makes models for new clients: from the client's descriptor, or from its samples."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from raypfl.common.errors import DataError, RaypflError
from raypfl.trained.models import TrainedModels
from raypfl.trained.new_clients import Labelled, checked_samples, require_new_client_models
from raypfl.trained.serving.embedder import can_describe, embedder_file, models_of_descriptors
from raypfl.trained.trained_model import TrainedModel

HELD_OUT = 0.25
"""The share of a client's samples that its model is tested on, unless the request has another."""


@dataclass(frozen=True)
class ClientModel:
    """A model that was made for a client, and the facts about it that its file has."""

    model: TrainedModel
    facts: Mapping[str, Any]


class ModelMaker(ABC):
    """How a run makes models for new clients.

    Attributes
    ----------
    path : the path of requests for a model.
    arrays : the names of the arrays in their bodies.
    files : further files that a client can get, by path.
    """

    path: ClassVar[str]
    arrays: ClassVar[tuple[str, ...]]

    def __init__(self, models: TrainedModels):
        self.models = models
        self.files: dict[str, bytes] = {}

    @abstractmethod
    def checked(self, arrays: Mapping[str, np.ndarray], held_out: float | None) -> Any:
        """Return what a model is made from, if it fits the run.

        Parameters
        ----------
        held_out : the share of the samples that the model is only tested on; None: the request has none.

        Raises
        ------
        DataError : if it does not fit the run, with the reason.
        """

    def make(self, inputs: Sequence[Any]) -> list[ClientModel | RaypflError]:
        """Return a model for each client, or why there is none.

        Parameters
        ----------
        inputs : what :meth:`checked` returned for each client.
        """
        try:
            return [*self.make_together(inputs)]
        except RaypflError as error:
            if len(inputs) == 1:
                return [error]
            # Only one of them may have failed, so each is tried alone.
            return [self.make([client])[0] for client in inputs]

    @abstractmethod
    def make_together(self, inputs: Sequence[Any]) -> list[ClientModel]:
        """Return a model for each client; raise a RaypflError if there is none for one of them."""


class DescriptorModelMaker(ModelMaker):
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

    def make_together(self, inputs: Sequence[np.ndarray]) -> list[ClientModel]:
        return [ClientModel(model, {}) for model in models_of_descriptors(self.models, np.stack(inputs))]


class SampleModelMaker(ModelMaker):
    """Methods that train for a new client: the client uploads its labelled samples."""

    path: ClassVar[str] = "/personalize"
    arrays: ClassVar[tuple[str, ...]] = ("x", "y")

    def checked(self, arrays: Mapping[str, np.ndarray], held_out: float | None) -> tuple[Labelled, float]:
        samples = checked_samples(arrays["x"], arrays["y"], self.models.outline)
        return samples, HELD_OUT if held_out is None else held_out

    def make_together(self, inputs: Sequence[tuple[Labelled, float]]) -> list[ClientModel]:
        models: dict[int, ClientModel] = {}
        # Only clients that hold out the same share can be made models together.
        for held_out in dict.fromkeys(share for _, share in inputs):
            positions = [position for position, (_, share) in enumerate(inputs) if share == held_out]
            clients = self.models.personalize_all([inputs[position][0] for position in positions], held_out)
            for position, client in zip(positions, clients, strict=True):
                models[position] = ClientModel(client.model, client.facts)
        return [models[position] for position in range(len(inputs))]


def model_maker_of(models: TrainedModels) -> ModelMaker:
    """Return what makes a run's models for new clients.

    Raises
    ------
    ConfigError : if the method makes none.
    """
    if can_describe(models):
        return DescriptorModelMaker(models)
    require_new_client_models(models.experiment)
    return SampleModelMaker(models)
