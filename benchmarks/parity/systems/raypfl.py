"""raypfl, in this process."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import torch

import raypfl
from benchmarks.parity.data import SOURCE, digits
from benchmarks.parity.jobs import BATCH, COHORT, EPOCHS, LR, ROUNDS, Job, Scores
from raypfl.engine.prepared import Prepared


def experiment(
    job: Job, seed: int, method: str, same: bool, rounds: int = ROUNDS, output: str = "runs"
) -> raypfl.Experiment:
    """A job in raypfl's words; `method` is the job's, or its reading. See `Order` for `same`."""
    return raypfl.Experiment(
        **SOURCE,
        name="parity",
        seed=seed,
        rounds=rounds,
        output=output,
        model=job.network,
        method={"name": method, **job.options},
        cohort={"size": COHORT},
        training={"lr": LR, "batch_size": BATCH, "epochs": EPOCHS, "precision": "fp64" if same else "fp32"},
        evaluation={"every": 0, "protocols": ["local"]},
        checkpoint={"every": 0},
        engine={"backend": "inline", "executor": "vectorised", "threads": 1},
        tracking={"mlflow": False},
    )


def run(
    job: Job, seed: int, method: str, same: bool, rounds: int = ROUNDS
) -> tuple[Mapping[str, Scores], list[list[int]]]:
    """The scores of the models that are judged, and the clients of each round."""
    with tempfile.TemporaryDirectory() as folder:
        result = raypfl.run(experiment(job, seed, method, same, rounds, folder))
    scores = {model: _scores(result, model) for model in job.models}
    return scores, result.rounds["cohort"].to_pylist()


def first_weights(job: Job, seed: int, same: bool, file: Path) -> None:
    """Write down the weights that raypfl's run from this seed begins with, as a state dict."""
    task = Prepared(experiment(job, seed, job.method, same), digits()).task
    theta = task.model.init(task.seed)
    torch.save(
        {name: theta[s.start : s.stop].reshape(s.shape).clone() for name, s in task.model.segments.items()}, file
    )


def _scores(result: raypfl.Result, model: str) -> Scores:
    rows = result.evaluations.filter(
        pc.and_(pc.equal(result.evaluations["model"], model), pc.equal(result.evaluations["protocol"], "local"))
    ).sort_by("client")
    columns: dict[str, Any] = rows.select(["accuracy", "loss"]).to_pydict()
    return columns
