"""Folders in which runs are recorded, and what a listener is told of a run."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa

from raypfl.engine.events import Checkpointed, Evaluated, Event, RoundFinished, RunFinished, RunStarted
from raypfl.engine.job import checkpoints_of
from raypfl.experiment import Experiment
from raypfl.integrations.tracking.connection import tracking_uri
from raypfl.integrations.tracking.listener import MLflowListener


def with_database(folder: Path, made: Path) -> Path:
    """A folder in which runs are recorded."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(made, folder / "mlflow.db")
    return folder


def events(
    folder: Path,
    rounds: range = range(1, 4),
    status: str = "finished",
    name: str = "digits-ditto",
    location: str | None = None,
    **settings: Any,
) -> list[Event]:
    """Those of a run of Ditto; `location` : of its checkpoints. `settings` : of tracking."""
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
    happened: list[Event] = [RunStarted(name, str(run_dir), experiment, metadata, rounds.start - 1)]
    for round in rounds:
        sent = {"bytes_up_total": 10 * round, "bytes_down_total": 20 * round}
        happened.append(RoundFinished(round, 1.0 / round, 0.1, 10, 20, clients=5, dropped=0, failed=0, **sent))
    happened.append(Evaluated(rounds.stop - 1, [{"protocol": "local", "model": "personal", **score}]))
    saved = f"{checkpoints_of(experiment, str(run_dir))}/000001-round-3"
    happened.append(Checkpointed(rounds.stop - 1, saved))
    tables = {"rounds": pa.table({"round": [1]})}
    happened.append(RunFinished(status, rounds.stop - 1, "abc", "a client's loss is NaN", tables))  # type: ignore[arg-type]
    return happened


def record(happened: list[Event]) -> list[str]:
    """Tell a listener what happened; its warnings."""
    warnings: list[str] = []
    listener = MLflowListener(warn=warnings.append)
    for event in happened:
        listener(event)
    return warnings


def client_of(folder: Path) -> Any:
    """Asks for what is recorded in a folder."""
    import mlflow

    return mlflow.MlflowClient(tracking_uri(Experiment(output=str(folder))))


def runs_of(folder: Path, filter: str = "") -> list[Any]:
    """Runs recorded in a folder, the oldest first, and a parent before the child that began with it."""
    client = client_of(folder)
    home = client.get_experiment_by_name("raypfl").experiment_id
    runs = client.search_runs([home], filter, order_by=["attributes.start_time ASC"])
    return sorted(runs, key=lambda run: (run.info.start_time, "mlflow.parentRunId" in run.data.tags))
