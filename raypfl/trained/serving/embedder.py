"""PeFLL's three messages to a new client: the embedding network down, the client's descriptor up, its model down."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor, nn

from raypfl.common import rng
from raypfl.common.errors import CheckpointError, DataError
from raypfl.engine.building.data_outline import DataOutline
from raypfl.learning.sample_order import epoch_order
from raypfl.methods.personal_models.pefll import PeFLL
from raypfl.models.architectures.hypernetworks import EmbeddingNetwork
from raypfl.trained.models import TrainedModels
from raypfl.trained.new_clients import checked_samples
from raypfl.trained.saved_model import outline_in, tensors_in
from raypfl.trained.trained_model import TrainedModel

FORMAT = "raypfl embedding network 1"


@dataclass(frozen=True)
class Embedder:
    """The embedding network of a run of PeFLL, with what a client needs to describe its samples.

    Attributes
    ----------
    outline : the shapes and values of the run's data, without samples.
    network : the network of samples and their classes, in evaluation mode.
    gain, offset : the normalisation: the network sees ``x * gain + offset``.
    batch : the largest number of samples that describe a client; None: all.
    seed, round : the keys by which these samples are drawn, as the run itself draws them.
    """

    outline: DataOutline
    network: nn.Module
    gain: Tensor
    offset: Tensor
    batch: int | None
    seed: int
    round: int

    def descriptor(self, x: Any, y: Any) -> np.ndarray:
        """Return the mean embedding ``float[l]`` of a client's samples ``x[n, ...]`` and classes ``y[n]``.

        Raises
        ------
        DataError : if the samples do not fit the run's data.
        """
        inputs, classes = checked_samples(x, y, self.outline)
        batch = self._batch_indices(len(classes))
        normalised = torch.addcmul(self.offset, torch.from_numpy(inputs[batch]).to(self.gain.dtype), self.gain)

        with torch.no_grad():
            embeddings = self.network((normalised, torch.from_numpy(classes[batch])))
        return embeddings.mean(0).numpy()

    def _batch_indices(self, count: int) -> np.ndarray:
        """Return the samples of the batch, which are those that :meth:`raypfl.Clients.batches` draws for PeFLL."""
        if self.batch is None:
            return np.arange(count)
        keys = rng.keys(self.seed, "batchdescriptor", self.round, [0])  # all new clients have the draws of client 0
        visits = epoch_order(keys, np.array([count]), min(self.batch, count), steps=1)
        return visits.index[0, 0, : visits.counts[0, 0]]


def can_describe(models: TrainedModels) -> bool:
    """Return whether the run's method makes a model from a client's descriptor alone."""
    return type(models.experiment.method) is PeFLL  # a subclass may describe its clients in another way


def embedder_file(models: TrainedModels) -> bytes:
    """Return the embedding network of a run of PeFLL as safetensors, which :func:`read_embedder` reads."""
    method = models.experiment.method
    assert isinstance(method, PeFLL)
    network = models.task.networks["embed"].as_module(models.server["embed"])
    metadata = {
        "format": FORMAT,
        "data": models.origin.metadata["data"],
        "embedding": method.embedding,
        "length": str(method.vector_length(models.task)),
        "batch": json.dumps(method.batch),
        "seed": str(models.experiment.seed),
        "round": str(models.round),
    }
    gain, offset = models.normalisation
    tensors = {name: tensor.detach().clone() for name, tensor in network.state_dict().items()}
    return safetensors.torch.save(tensors | {"gain": gain, "offset": offset}, metadata)


def read_embedder(file: str | Path) -> Embedder:
    """Return the embedding network in a file.

    Raises
    ------
    CheckpointError : if the file is damaged, or has something else in it.
    """
    metadata, tensors = tensors_in(file, "an embedding network")
    if metadata.get("format") != FORMAT:
        raise CheckpointError(f"{file} is not an embedding network: its metadata do not say {FORMAT!r}.")
    outline = outline_in(metadata["data"])
    gain = tensors.pop("gain")
    offset = tensors.pop("offset")

    network = EmbeddingNetwork(
        metadata["embedding"],  # type: ignore[arg-type]
        outline.input_shape,
        outline.num_classes,
        int(metadata["length"]),
    )
    network.to(gain.dtype).load_state_dict(tensors)

    batch = json.loads(metadata["batch"])
    return Embedder(outline, network.eval(), gain, offset, batch, int(metadata["seed"]), int(metadata["round"]))


def models_of_descriptors(models: TrainedModels, descriptors: np.ndarray) -> list[TrainedModel]:
    """Return the models that PeFLL's hypernetwork makes from descriptors ``[n, l]``.

    Raises
    ------
    DataError : if it makes parameters that are not finite.
    """
    hypernetwork = models.task.networks["hyper"]
    rows = torch.from_numpy(descriptors).to(hypernetwork.dtype)
    with torch.no_grad():
        theta = hypernetwork(models.server["hyper"], rows)
    if not theta.isfinite().all():
        raise DataError("The hypernetwork makes parameters that are not finite from this descriptor.")
    return models.as_networks(theta)
