"""What clustered methods share: where several models begin, and which of them fits a client best."""

from __future__ import annotations

import torch
from torch import Tensor

from raypfl.clients.clients import Clients
from raypfl.common import rng
from raypfl.common.errors import ConfigError
from raypfl.common.messages import PerClient, per_client, unmarked
from raypfl.federation.task import Task


def different_initial_models(task: Task, count: int) -> Tensor:
    """Return different initial models ``[count, P+B]``; the first is that of other methods.

    Raises
    ------
    ConfigError : if all are the same, since nothing of the network is random.
    """
    seeds = [task.seed, *(rng.key(task.seed, "initial model", number) % 2**63 for number in range(1, count))]
    models = torch.stack([task.model.init(seed) for seed in seeds])
    if count > 1 and bool((models == models[0]).all()):
        raise ConfigError(
            f"The method begins with {count} different models, but the initial weights of this network are not random, "
            "so all would stay the same. Leave the output layer out of the file in model.weights, or model.weights out."
        )
    return models


def best_models(clients: Clients, models: Tensor) -> tuple[PerClient, PerClient]:
    """Return the model of lowest training loss for each client, ``[K, P+B]``, and its number, ``int64[K]``.

    Losses are over all training samples, in evaluation mode; of equally good models, the first is taken.
    """
    losses = torch.stack([unmarked(clients.map(clients.loss, model)) for model in models])
    best = (losses == losses.min(dim=0).values).to(torch.int8).argmax(dim=0)
    return per_client(models[best]), per_client(best)
