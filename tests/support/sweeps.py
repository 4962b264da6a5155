"""A small sweep that many tests carry out, how they interrupt it, and what MLflow has of it."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Mapping
from pathlib import Path

import yaml

from raypfl.integrations.tuning.result import SweepResult

SMALL = {
    "name": "small",
    "experiment": {
        "method": "fedavg",
        "rounds": 4,
        "data": {"name": "digits", "val_fraction": 0.2},
        "partition": {"name": "iid", "clients": 3},
        "model": {"name": "mlp", "hidden": [8]},
        "training": {"steps": 2, "batch_size": 16},
        "evaluation": {"every": 1},
        "engine": {"executor": "sequential"},
        "tracking": {"mlflow": False, "system_metrics": False},
    },
    "search": {"training.lr": {"loguniform": [0.001, 1]}},
    "trials": 3,
}


def small(**changes: object) -> dict:
    return {**SMALL, **changes}


def silent(*_: object) -> None:
    """A listener, or a display, that does nothing."""


def tracked_in(folder: Path, database: Path) -> dict:
    """Settings of ``tracking`` with a database in the folder."""
    shutil.copy(database, folder / "mlflow.db")
    return {"uri": f"sqlite:///{folder}/mlflow.db", "system_metrics": False, "models_mb": 0}


def mlflow_runs(uri: str) -> tuple[list, list]:
    """Runs without a parent, and those with one."""
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("raypfl")
    runs = client.search_runs([experiment.experiment_id])
    children = [run for run in runs if "mlflow.parentRunId" in run.data.tags]
    return [run for run in runs if run not in children], children


TOGETHER = ["engine.executor=auto", "engine.backend=inline"]
"""Changes with which the trials of `small` advance together in this process."""


class Interrupt:
    """Shows a sweep's trials; the first time that one has reached the round, Ctrl-C."""

    def __init__(self, round: int = 1):
        self._round = round
        self._is_over = False

    def __call__(self, outcome: SweepResult) -> None:
        if not self._is_over and any(trial.round >= self._round for trial in outcome.trials):
            self._is_over = True
            os.kill(os.getpid(), signal.SIGINT)


def tracked_file(folder: Path, database: Path, sweep: Mapping) -> tuple[Path, str]:
    """Write a sweep that MLflow records in the folder; return its file and MLflow's tracking URI."""
    tracking = tracked_in(folder, database)
    file = folder / "small.yaml"
    file.write_text(yaml.safe_dump(sweep | {"experiment": SMALL["experiment"] | {"tracking": tracking}}))
    return file, tracking["uri"]


def times_of_ends(sweep: Path) -> dict[Path, int]:
    """When each trial of a sweep wrote its end."""
    return {file: file.stat().st_mtime_ns for file in sweep.rglob("summary.json")}
