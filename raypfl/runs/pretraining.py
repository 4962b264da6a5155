"""Networks that are trained on a pool, which is no client's, before the first round."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, replace

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor

from raypfl.common import files
from raypfl.common.errors import ConfigError, known_pool
from raypfl.config import Experiment
from raypfl.data import ClientData, FederatedData
from raypfl.data.store import cache_folder
from raypfl.federation.server_training import ServerContext, ServerTraining
from raypfl.federation.task import Task
from raypfl.methods import FedAvg
from raypfl.objectives.batch import Batch
from raypfl.optimizers import Adam
from raypfl.server.events import Listener, Progress
from raypfl.server.setup import make_task, pools_of_server, precision_of

BATCH = 64
"""Samples in a mini-batch."""


def with_pretrained(experiment: Experiment, data: ClientData, device: torch.device, emit: Listener) -> Experiment:
    """`experiment`, with the file of its pretrained weights as ``model.weights``.

    The network is trained if there is no file of this network, data, pool and seed in the cache yet. Weights that are
    given take precedence: then nothing is pretrained.

    Raises
    ------
    ConfigError : if there is no such pool, or it lacks the clients' labels.
    """
    model = experiment.model
    if model.pretrain is None or model.weights is not None:
        return experiment
    _refuse_unlabelled(model.pretrain, data)
    options = {name: value for name, value in model.options.items() if not name.startswith("adapter")}
    plain = replace(model, options=options, frozen=None, trained=None)
    alone = experiment.replace(model=plain, method=FedAvg())
    about = asdict(plain) | {"data": data.fingerprint, "seed": experiment.seed}
    about |= {"precision": experiment.training.precision, "objective": str(experiment.objective)}
    key = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:12]
    path = cache_folder(experiment.data) / "pretrained" / f"{model.name}-{model.pretrain}-{key}.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    with files.alone(path):
        if not path.exists():
            task = make_task(alone, data, device)
            emit(
                Progress(
                    f"pretraining {model.name} on the pool {model.pretrain!r}, {task.pools[model.pretrain]} samples"
                )
            )
            weights = {name: tensor.contiguous() for name, tensor in _trained(alone, data, task).items()}
            files.write(path, save(weights, {"pretraining": json.dumps(about)}))
    return experiment.override([f"model.weights={json.dumps(str(path))}"])


class _Central(ServerTraining):
    """Training on the server, before the first round."""

    def __init__(self, task: Task, context: ServerContext):
        self.task, self.context, self.round = task, context, 0

    def log(self, **values: float | Tensor) -> None:
        pass


def _trained(experiment: Experiment, data: ClientData, task: Task) -> dict[str, Tensor]:
    """The trained tensors of the network, but for its output layer."""
    model, settings = task.model, experiment.model
    pools = pools_of_server(experiment, data, task)
    central = _Central(task, ServerContext(pools, precision_of(experiment), lambda _: None))

    def loss(p: Tensor, batch: Batch) -> Tensor:
        return task.objective.loss(model(p, batch.x), batch)

    pool = central.pool(known_pool(str(settings.pretrain), task.pools))
    size = BATCH + (len(pool) % BATCH == 1)  # batch norm needs two samples
    batches = pool.batches(size, epochs=settings.pretrain_epochs, augment=True)
    start = model.init(experiment.seed)
    theta = central.sgd(
        loss, start, batches, lr=settings.pretrain_lr, optimizer=Adam(), schedule="cosine", text="pretraining"
    )
    return {
        name: tensor.cpu()
        for name, tensor in model.unflatten(theta).items()
        if name in model.names("feature extractor")
    }


def _refuse_unlabelled(pool: str, data: ClientData) -> None:
    known_pool(pool, data.pools if isinstance(data, FederatedData) else ())
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
