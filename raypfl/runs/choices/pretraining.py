"""Training a network on a pool, whose samples belong to no client, before the first round."""

from __future__ import annotations

import hashlib
import json
import math
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from raypfl.common import files, rng
from raypfl.common.errors import ConfigError
from raypfl.common.threads import threads
from raypfl.common.user_modules import source_digest
from raypfl.common.version import __version__
from raypfl.data import ClientData, FederatedData
from raypfl.data.datasets import DataConfig
from raypfl.data.store import cache_folder
from raypfl.engine.backends.cluster import connected, server_resources
from raypfl.engine.backends.session import spare_server
from raypfl.engine.building.devices import device_for
from raypfl.engine.events import Listener, Progress
from raypfl.engine.prepared import Prepared, threads_of_server
from raypfl.experiment import Experiment
from raypfl.experiment.settings import RaySettings
from raypfl.federation.server_training import ServerContext, ServerTraining
from raypfl.federation.settings import EngineSettings
from raypfl.federation.task import Task
from raypfl.learning.objectives.batch import Batch
from raypfl.learning.optimizers import Adam
from raypfl.learning.sample_pools import checked_pool
from raypfl.learning.settings import TrainingSettings
from raypfl.models import MODELS
from raypfl.runs.checks.network import outputs_of_batch, refuse_misfit, refuse_outputs
from raypfl.runs.choices.gpu_task import run_on_gpu

BATCH = 64
"""Samples in a mini-batch."""


@dataclass(frozen=True)
class Pretraining:
    """A file of pretrained weights.

    Attributes
    ----------
    path : the file.
    provenance : everything that the weights depend on: settings, hashes of data and code, device, versions.
    samples : number of samples in the pool.
    loss : mean loss over all steps.
    seconds : duration of the training; None: the file was there already.
    """

    path: Path
    provenance: dict[str, Any]
    samples: int
    loss: float
    seconds: float | None


def pretrain(experiment: Experiment, emit: Listener) -> Pretraining:
    """Train an experiment's network on the pool that ``model.pretrain`` names, unless that was done before.

    Raises
    ------
    ConfigError : if no pool is named, or weights are given, or the pool lacks labels.
    """
    model = experiment.model
    if not model.needed_pools():
        problem = "is not set" if model.pretrain is None else f"is {model.pretrain!r}, but model.weights are given too"
        raise ConfigError(
            f"model.pretrain {problem}; raypfl pretrain needs the name of a pool, and a network without weights, as "
            "in: raypfl pretrain 'data.pools={body: 0.3}' model.pretrain=body"
        )
    return _pretrained(Prepared(experiment, experiment.load_data()), emit)


def with_pretrained(prepared: Prepared, emit: Listener) -> Prepared:
    """Return the experiment with its pretrained weights as ``model.weights``; unchanged if it needs no pretraining.

    The network is trained if no file in the cache was made from the same :func:`_reduced_experiment`. Weights that are
    given take precedence: then nothing is pretrained.

    Raises
    ------
    ConfigError : if there is no such pool, or it lacks the clients' labels.
    """
    experiment = prepared.experiment
    if not experiment.model.needed_pools():
        return prepared
    path = _pretrained(prepared, emit).path
    experiment = experiment.override([f"model.weights={json.dumps(str(path))}"])
    return Prepared(experiment, prepared.data, prepared.device)


def _pretrained(prepared: Prepared, emit: Listener) -> Pretraining:
    """Return the file of pretrained weights in the cache; train them first if it is not there."""
    data = prepared.data
    pool = str(prepared.experiment.model.pretrain)
    _refuse_unlabelled(pool, data)

    on_cluster = needs_gpu_of_cluster(prepared.experiment)
    device = torch.device("cpu") if on_cluster else device_for(prepared.experiment.ray.gpus_for_server)
    reduced = Prepared(_reduced_experiment(prepared), data, device)
    settings = reduced.experiment.model
    provenance = _provenance(reduced, "cuda" if on_cluster else device.type)
    key = hashlib.sha256(json.dumps(provenance, sort_keys=True).encode()).hexdigest()[:12]
    path = cache_folder(prepared.experiment.data) / "pretrained" / f"{settings.name}-{pool}-{key}.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)

    seconds = None
    with files.locked(path), threads(threads_of_server(reduced.experiment)):
        if not path.exists():
            start = time.perf_counter()
            refuse_misfit(reduced)
            refuse_outputs(reduced, outputs_of_batch(reduced, channels_last=False, train=False))
            emit(Progress(f"pretraining {settings.name} on the pool {pool!r}, {reduced.task.pools[pool]} samples"))
            if on_cluster:
                trained, loss = _train_on_cluster(reduced, prepared.experiment.ray, emit)
            else:
                trained, loss = _train(reduced)
            weights = {name: tensor.contiguous() for name, tensor in trained.items()}
            files.write(path, save(weights, {"pretraining": json.dumps(provenance), "loss": str(loss)}))
            seconds = time.perf_counter() - start

    with safe_open(path, "pt") as file:
        loss = float((file.metadata() or {}).get("loss", "nan"))
    samples = len(data.pool(pool)) if isinstance(data, FederatedData) else 0
    return Pretraining(path, provenance, samples, loss, seconds)


def _provenance(reduced: Prepared, device: str) -> dict[str, Any]:
    """Return all that decides the pretrained weights, which are kept under a hash of it."""
    experiment = reduced.experiment
    return {
        "settings": experiment.to_dict(),
        "initial": _seed_of_initial(experiment),
        "data": reduced.data.fingerprint,
        "code": source_digest(MODELS.get(experiment.model.name)),
        "device": device,
        "versions": {"raypfl": __version__, "torch": torch.__version__},
    }


def _seed_of_initial(experiment: Experiment) -> int:
    """Return the seed of the network that pretraining begins with.

    With the run's own seed, its output layer would be that of the run, which the body would then fit already.
    """
    return rng.key(experiment.seed, "pretraining") % 2**31


def needs_gpu_of_cluster(experiment: Experiment) -> bool:
    """Return whether the network is pretrained on a GPU that Ray has to reserve: the server of the run has one."""
    if experiment.engine.backend == "inline" or experiment.ray.gpus_for_server == 0:
        return False
    return bool(experiment.model.needed_pools())


def _reduced_experiment(prepared: Prepared) -> Experiment:
    """Return all settings that pretraining may read; every other one has its default.

    The training gets this experiment in place of the run's, and the cache's key has all of it. So what is not copied
    here cannot change the weights, and what is copied makes a file of its own.
    """
    experiment = prepared.experiment
    options = {name: value for name, value in experiment.model.options.items() if not name.startswith("adapter")}
    return Experiment(
        seed=experiment.seed,
        # Only the augmentation is set: the samples are those of the prepared run.
        data=DataConfig(augmentation=experiment.data.augmentation),
        model=replace(experiment.model, options=options, lora=0, frozen=None, trained=None),
        objective=prepared.objective,
        training=TrainingSettings(precision=experiment.training.precision),
        engine=EngineSettings(threads=threads_of_server(experiment)),
    )


def _train_on_cluster(reduced: Prepared, settings: RaySettings, emit: Listener) -> tuple[dict[str, Tensor], float]:
    """Train as :func:`_train` does, in a process that reserves what the server will."""
    with connected(settings, emit) as ray:
        spare_server.release(ray)
        return run_on_gpu(ray, server_resources(settings), _train, reduced)


class _CentralTraining(ServerTraining):
    """Training on the server, before the first round."""

    def __init__(self, task: Task, context: ServerContext):
        self.task = task
        self.context = context
        self.round = 0
        self.logged: dict[str, float] = {}

    def log(self, **values: float | Tensor) -> None:
        self.logged.update({name: float(value) for name, value in values.items()})


def _train(reduced: Prepared) -> tuple[dict[str, Tensor], float]:
    """Train the network; return its tensors, except those of the output layer, and the mean loss of all steps."""
    task = reduced.task
    model = reduced.model
    settings = reduced.experiment.model
    central = _CentralTraining(task, ServerContext(reduced.server_pools, reduced.precision, lambda _: None))

    def loss(p: Tensor, batch: Batch) -> Tensor:
        return task.objective.loss(model(p, batch.x), batch)

    pool = central.pool(str(settings.pretrain))
    # Batch norm needs two samples, also in the last batch.
    size = BATCH + (len(pool) % BATCH == 1)
    batches = pool.batches(size, epochs=settings.pretrain_epochs, augment=True)
    theta = central.sgd(
        loss,
        model.init(_seed_of_initial(reduced.experiment)),
        batches,
        text="pretraining",
        lr=settings.pretrain_lr,
        optimizer=Adam(),
        schedule="cosine",
        log="loss",
    )

    body = model.names("feature extractor")
    trained = {name: tensor.cpu() for name, tensor in model.unflatten(theta).items() if name in body}
    return trained, central.logged.get("loss", math.nan)


def _refuse_unlabelled(pool: str, data: ClientData) -> None:
    checked_pool(pool, data.pools)
    if not isinstance(data, FederatedData):
        return
    labels = data.labels[data.pool(pool)]
    unlabelled = np.isnan(labels) if data.kind == "numbers" else labels < 0
    if data.kind != "tokens" and unlabelled.any():
        raise ConfigError(
            f"model.pretrain is {pool!r}, but the pool {pool!r} has no labels of the clients' classes. Train the "
            "network on that data in a run of its own, partition={name: iid, clients: 1}, and set model.weights to "
            "its weights."
        )
