"""fluke, in one process; clients keep no model between rounds unless the method needs it, as its documentation says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from fluke import DDict, FlukeENV
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
    FlukeENV().set_seed(0)
    FlukeENV().set_device("cpu")
    FlukeENV().set_eval_cfg(pre_fit=False, post_fit=False, locals=False, server=False)
    net = network(order, shards)
    client: dict[str, Any] = {
        "batch_size": order.batch,
        "local_epochs": order.epochs,
        "loss": "CrossEntropyLoss",
        "optimizer": {"name": "SGD", "lr": order.lr, "momentum": order.momentum},
        "scheduler": {"name": "StepLR", "step_size": 1, "gamma": 1.0},
        "persistency": False,
    }
    algorithm = FedAVG
    if order.method == "ditto":
        algorithm = Ditto
        client |= {"model": net, "tau": order.epochs, "lam": order.lam}
        del client["optimizer"]["momentum"]
    settings = DDict(client=client, server={"weighted": True}, model=net)
    federation = algorithm(order.clients, SimpleNamespace(assign=dealt(shards)), settings)
    federation.set_callbacks(Timed(Stamps(order.report)))
    federation.run(
        n_rounds=ENDLESS, eligible_perc=(order.cohort + 0.5) / order.clients if order.cohort < order.clients else 1
    )


def dealt(shards: Shards) -> Any:
    """fluke's way to ask who holds what, answered with views of all samples."""

    def assign(clients: int, batch_size: int) -> tuple[tuple[list[FastDataLoader], list[None]], None]:
        x, y = shards.everything()
        rows = [slice(*shards.offsets[k : k + 2].tolist()) for k in range(clients)]
        options = {"num_labels": shards.num_classes, "batch_size": batch_size, "shuffle": True, "skip_singleton": False}
        return ([FastDataLoader(x[r], y[r], **options) for r in rows], [None] * clients), None

    return assign
