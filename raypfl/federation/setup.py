"""From an experiment's description to what works on it: the same in the server and in every actor."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from raypfl import rng
from raypfl.data import FederatedData
from raypfl.federation.batches import Samples
from raypfl.federation.clients import Bench
from raypfl.federation.executor import Executor, Precision, Sequential, Vectorised
from raypfl.methods.base import Task
from raypfl.models import MODELS, FlatModel

if TYPE_CHECKING:
    from raypfl.config import Experiment


def make_model(experiment: Experiment, data: FederatedData, device: torch.device) -> FlatModel:
    """The clients' network for this data."""
    entry = MODELS.get(experiment.model.name)
    factory = partial(entry, input_shape=data.input_shape, num_classes=data.num_classes, **experiment.model.options)
    dtype = torch.float64 if experiment.training.precision == "fp64" else torch.float32
    return FlatModel(factory, seed=rng.key(experiment.seed, "network") % 2**31, dtype=dtype, device=device)


def make_task(experiment: Experiment, data: FederatedData, device: torch.device) -> Task:
    """What the method may know, its own networks built."""
    model = make_model(experiment, data, device)
    task = Task(
        model=model,
        seed=experiment.seed,
        rounds=experiment.rounds,
        num_clients=data.num_clients,
        num_classes=data.num_classes,
        input_shape=data.input_shape,
        num_samples=data.sizes("train"),
    )
    return replace(task, networks=experiment.method.networks(task))


def make_bench(experiment: Experiment, data: FederatedData, task: Task, executor: str) -> Bench:
    """What the clients of one process share."""
    precision = Precision(experiment.training.precision == "bf16", experiment.training.channels_last)
    made: Executor = (
        Vectorised(task.model, precision) if executor == "vectorised" else Sequential(task.model, precision)
    )
    return Bench(
        model=task.model,
        executor=made,
        samples=_samples(data, task.model),
        split=data.indices,
        num_clients=data.num_clients,
        num_classes=data.num_classes,
        training=experiment.training,
        seed=experiment.seed,
        pools={name: data.pool(name) for name in data.pools},
        networks=task.networks,
        loss_limit=experiment.failures.loss_limit,
        evaluation_batch=experiment.evaluation.batch_size,
    )


def client_costs(experiment: Experiment, sizes: np.ndarray) -> np.ndarray:
    """``float[num_clients]``: SGD steps of each client's round, the measure by which groups are cut and ordered."""
    training = experiment.training
    if training.steps is not None:
        return np.full(len(sizes), float(training.steps))
    return np.ceil(sizes / training.batch_size) * training.epochs


def _samples(data: FederatedData, model: FlatModel) -> Samples:
    gain = 1.0 / (data.scale * data.std.astype(np.float64))
    offset = -data.mean.astype(np.float64) / data.std

    def channels(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(model.device, model.dtype).reshape(-1, 1, 1)

    inputs, labels = data.inputs, data.labels
    if model.device.type == "cpu":
        return Samples(inputs, labels, channels(gain), channels(offset))
    resident = torch.from_numpy(np.array(inputs)).to(model.device), torch.from_numpy(np.array(labels)).to(model.device)
    return Samples(*resident, channels(gain), channels(offset))
