"""Folders with an MLflow database, and the events of a run that was never run."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from raypfl.engine.events import Checkpointed, Evaluated, Event, RoundFinished, RunFinished, RunStarted
from raypfl.engine.job import checkpoints_of
from raypfl.experiment import Experiment
from raypfl.integrations.tracking.connection import tracking_uri
from raypfl.integrations.tracking.listener import MLflowListener
from raypfl.storage.filesystems import absolute, join


def forget_mlflow_settings(patch: pytest.MonkeyPatch) -> None:
    """Unset the variables that would lead MLflow to another server or folder."""
    for name in [name for name in os.environ if name.startswith("MLFLOW_")]:
        patch.delenv(name)


def with_database(folder: Path, empty_database: Path) -> Path:
    """Make a folder with a copy of an empty tracking database."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(empty_database, folder / "mlflow.db")
    return folder


def events(
    folder: Path,
    rounds: range = range(1, 4),
    status: str = "finished",
    name: str = "digits-ditto",
    location: str | None = None,
    **settings: Any,
) -> list[Event]:
    """Return the events of a run of Ditto, with its checkpoints at `location` and these `settings` of tracking."""
    tracking = {"system_metrics": False, "models_mb": 0, **settings}
    experiment = Experiment(
        rounds=rounds.stop - 1,
        method="ditto",
        tracking=tracking,
        output=str(folder),
        checkpoint={"location": location},
    )
    run_dir = folder / name
    run_dir.mkdir(exist_ok=True)

    score = {"accuracy": 0.5, "std": 0.1, "worst_decile": 0.2, "weighted": 0.6, "loss": 1.5}
    metadata = {"actors": 2, "data": "f" * 64, "versions": {"raypfl": "1"}}
    events: list[Event] = [RunStarted(name, str(run_dir), experiment, metadata, rounds.start - 1)]
    for round in rounds:
        totals = {"bytes_up_total": 10 * round, "bytes_down_total": 20 * round}
        events.append(RoundFinished(round, 1.0 / round, 0.1, 10, 20, clients=5, dropped=0, failed=0, **totals))
    events.append(Evaluated(rounds.stop - 1, [{"protocol": "local", "model": "personal", **score}]))

    checkpoint = join(absolute(checkpoints_of(experiment, str(run_dir))), "000001-round-3")
    events.append(Checkpointed(rounds.stop - 1, checkpoint))
    tables = {"rounds": pa.table({"round": [1]})}
    error = None if status == "finished" else "a client's loss is NaN"
    events.append(RunFinished(status, rounds.stop - 1, "abc", error, tables))  # type: ignore[arg-type]
    return events


def record(events: list[Event]) -> list[str]:
    """Pass events to an MLflow listener; returns its warnings."""
    warnings: list[str] = []
    listener = MLflowListener(warn=warnings.append)
    for event in events:
        listener(event)
    return warnings


def client_of(folder: Path) -> Any:
    """Return an MLflow client of what is recorded in a folder."""
    import mlflow

    return mlflow.MlflowClient(tracking_uri(Experiment(output=str(folder))))


def runs_of(folder: Path, filter: str = "") -> list[Any]:
    """Return the runs recorded in a folder, oldest first; a parent comes before a child that began with it."""
    client = client_of(folder)
    experiment_id = client.get_experiment_by_name("raypfl").experiment_id
    runs = client.search_runs([experiment_id], filter, order_by=["attributes.start_time ASC"])
    return sorted(runs, key=lambda run: (run.info.start_time, "mlflow.parentRunId" in run.data.tags))
