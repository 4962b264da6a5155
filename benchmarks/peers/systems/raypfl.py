"""raypfl, in this process or on Ray; rounds are stamped where the server is."""

from __future__ import annotations

import tempfile
import time
from functools import partial
from typing import Any

import torch

import raypfl
from benchmarks.noise import ONLY_ROUNDS
from benchmarks.peers.order import Order, Stamps
from raypfl.common.messages import Mean
from raypfl.engine.events import Event, RunStarted
from raypfl.methods import FedAvg, Method
from raypfl.methods.personal_models.ditto import Ditto

HERE = "benchmarks.peers.systems.raypfl"
ENDLESS = 1_000_000


class TimedFedAvg(FedAvg):
    """FedAvg that reports the end of every round."""

    report: str = ""

    def round(self, server: dict[str, Any], cohort: Any) -> None:
        super().round(server, cohort)
        Stamps(self.report).add()


class TimedDitto(TimedFedAvg, Ditto):
    """Ditto that does."""


class Kept(Method):
    """Every client has a model of its own, which nobody trains; reports every evaluation, which follows each round."""

    report: str = ""

    def start(self, task: raypfl.Task) -> dict[str, Any]:
        return {"ended": None}

    def round(self, server: dict[str, Any], cohort: Any) -> None:
        if server["ended"] is None:
            cohort.run(self.keep)
        else:
            Stamps(self.report).add(server["ended"])
        server["ended"] = time.monotonic()

    def keep(self, clients: Any) -> dict[str, Mean]:
        number = torch.tensor(clients.ids, dtype=clients.initial.dtype)
        clients.state["personal"] = clients.initial.expand(len(clients), -1) + 1e-6 * number[:, None]
        return {}

    def personal_model(self, clients: Any, server: dict[str, Any]) -> torch.Tensor:
        return clients.state["personal"]


METHODS = {"fedavg": TimedFedAvg, "ditto": TimedDitto, "evaluation": Kept}


def run(order: Order) -> None:
    with tempfile.TemporaryDirectory() as folder:
        raypfl.run(experiment(order, folder), listeners=[partial(note_choice, order.report)])


def note_choice(report: str, event: Event) -> None:
    """Note what was settled as a run began: the executor, and the layout of images."""
    if isinstance(event, RunStarted):
        settled = event.experiment
        Stamps(report).note(executor=settled.engine.executor, channels_last=settled.training.channels_last)


def experiment(order: Order, folder: str) -> raypfl.Experiment:
    """The order in raypfl's words. ``options``: ``actors`` (none: in this process) and settings of ``training``."""
    training = dict(order.options)
    actors = training.pop("actors", 0)
    method: dict[str, Any] = {"name": f"{HERE}:{METHODS[order.method].__name__}", "report": order.report}
    if order.method == "ditto":
        method["lam"] = order.lam
    parts: dict[str, Any] = {
        **ONLY_ROUNDS,
        **order.source,
        "model": order.network,
        "method": method,
        "cohort": {"size": order.cohort},
        "training": {
            "lr": order.lr,
            "momentum": order.momentum,
            "batch_size": order.batch,
            "epochs": order.epochs,
            **training,
        },
        "evaluation": {"every": int(order.method == "evaluation"), "protocols": ["local"]},
        "engine": {"backend": "ray" if actors else "inline", "threads": 1},
        "ray": {"actors": actors or None},
    }
    return raypfl.Experiment(name="peers", rounds=ENDLESS, output=folder, **parts)
