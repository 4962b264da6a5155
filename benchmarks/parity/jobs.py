"""What is compared: methods, their options, and the federation that all of them run in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

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
        Job("fedbn", "FedBN", ("personal",), network=f"{HERE}.networks:normed", reading=f"{HERE}.readings:FedBN"),
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
