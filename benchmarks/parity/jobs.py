"""What is compared: methods, their options, the federation, and the scores of models.

Imports torch and nothing of raypfl: fluke's environment imports this too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

HERE = "benchmarks.parity"
ROUNDS = 30
COHORT = 10
EPOCHS = 2
BATCH = 10
LR = 0.05


@dataclass(frozen=True)
class Job:
    """A method in both systems.

    Attributes
    ----------
    method : its name in raypfl, and in this benchmark.
    title : as its paper has it.
    options : in raypfl's words; `systems.fluke` has them in fluke's.
    models : which are judged, ``personal`` or ``global``.
    reading : where fluke departs from the paper: a raypfl method that does what fluke does. It has the same options.
    """

    method: str
    title: str
    models: tuple[str, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    network: str = "mlp"
    reading: str | None = None


JOBS = {
    job.method: job
    for job in (
        Job("fedavg", "FedAvg", ("global",)),
        Job("fedprox", "FedProx", ("global",), {"mu": 0.5}),
        Job("ditto", "Ditto", ("personal", "global"), {"lam": 0.75}),
        Job("fedper", "FedPer", ("personal",)),
        Job("fedrep", "FedRep", ("personal",), {"personal_epochs": EPOCHS}),
        Job("fedbn", "FedBN", ("personal",), network="benchmarks.networks:normed", reading=f"{HERE}.readings:FedBN"),
        Job(
            "apfl",
            "APFL",
            ("personal", "global"),
            {"alpha": 0.5, "adaptive": False},
            reading=f"{HERE}.readings:APFL",
        ),
        Job(
            "pfedme",
            "pFedMe",
            ("personal", "global"),
            {"lam": 15.0, "inner_steps": 5},
            reading=f"{HERE}.readings:PFedMe",
        ),
    )
}

Scores = dict[str, list[float]]
"""``accuracy`` and mean ``loss`` of each client's model on its own test samples, in the order of the clients."""


@dataclass(frozen=True)
class Order:
    """One run.

    Attributes
    ----------
    method, options, network : as raypfl has them.
    seed : of the mini-batches.
    same : whether they are those that raypfl draws from the seed, and all is done in double precision, so that rounding
        hides nothing. Else the system shuffles for itself, in single precision.
    files : the samples, as `benchmarks.peers.order.Shards` reads them.
    weights : file of the network's first weights.
    cohorts : the clients of each round.
    batch, lr, epochs : of local training.
    """

    method: str
    options: dict[str, Any]
    network: str
    seed: int
    same: bool
    files: str
    weights: str
    cohorts: list[list[int]]
    batch: int = BATCH
    lr: float = LR
    epochs: int = EPOCHS


@torch.no_grad()
def judged(models: Sequence[Callable[[Tensor], Tensor]], tests: Sequence[tuple[Tensor, Tensor]]) -> Scores:
    """Each client's model on its own test samples."""
    accuracies, losses = [], []
    for model, (x, y) in zip(models, tests, strict=True):
        logits = model(x)
        accuracies.append((logits.argmax(1) == y).double().mean().item())
        losses.append(F.cross_entropy(logits, y).item())
    return {"accuracy": accuracies, "loss": losses}
