"""fluke, in one process; clients keep no model between rounds unless the method needs it, as its documentation says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from fluke import DDict, FlukeENV
from fluke.algorithms import CentralizedFL
from fluke.algorithms.ditto import Ditto
from fluke.algorithms.fedavg import FedAVG
from fluke.data import FastDataLoader
from fluke.utils import FederationObserver

from benchmarks.peers.order import Order, Shards, Stamps, network

ENDLESS = 1_000_000


class Timed(FederationObserver):
    """Reports the end of every round."""

    def __init__(self, stamps: Stamps):
        self._stamps = stamps

    def end_round(self, round: int) -> None:
        self._stamps.add()


def run(order: Order) -> None:
    shards = Shards(order.files)
    net = network(order, shards)
    client = training(order.batch, order.epochs, order.lr) | {"persistency": False}
    client["optimizer"]["momentum"] = order.momentum
    algorithm = FedAVG
    if order.method == "ditto":
        algorithm = Ditto
        client |= {"model": net, "tau": order.epochs, "lam": order.lam}
        del client["optimizer"]["momentum"]
    settings = {"client": client, "server": {"weighted": True}, "model": net}
    simulation = federation(algorithm, 0, shards, settings, loader)
    simulation.set_callbacks(Timed(Stamps(order.report)))
    share = 1.0
    if order.cohort < order.clients:
        share = (order.cohort + 0.5) / order.clients
    simulation.run(n_rounds=ENDLESS, eligible_perc=share)


def training(batch: int, epochs: int, lr: float) -> dict[str, Any]:
    """fluke's settings of a client."""
    return {
        "batch_size": batch,
        "local_epochs": epochs,
        "loss": "CrossEntropyLoss",
        "optimizer": {"name": "SGD", "lr": lr},
        "scheduler": {"name": "StepLR", "step_size": 1, "gamma": 1.0},
    }


def loader(client: int, *samples: Any, **options: Any) -> FastDataLoader:
    """fluke's own loader of a client's samples."""
    return FastDataLoader(*samples, shuffle=True, **options)


def federation(
    algorithm: Callable[..., CentralizedFL],
    seed: int,
    shards: Shards,
    settings: Mapping[str, Any],
    make_loader: Callable[..., FastDataLoader],
) -> CentralizedFL:
    """An algorithm of fluke's on these clients, without evaluation; ``make_loader(client, x, y, **options)``."""
    FlukeENV().set_seed(seed)
    FlukeENV().set_device("cpu")
    FlukeENV().set_eval_cfg(pre_fit=False, post_fit=False, locals=False, server=False)

    def assign(clients: int, batch_size: int) -> tuple[tuple[list[FastDataLoader], list[None]], None]:
        options = {"num_labels": shards.num_classes, "batch_size": batch_size, "skip_singleton": False}
        loaders = [make_loader(k, *shards.client(k), **options) for k in range(clients)]
        return (loaders, [None] * clients), None

    return algorithm(len(shards), SimpleNamespace(assign=assign), DDict(**settings))
