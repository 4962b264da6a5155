"""The ids of a folder's MLflow runs: one on each server that has recorded it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raypfl.common.errors import RaypflError
from raypfl.common.files import write
from raypfl.experiment import Experiment
from raypfl.integrations.tracking.connection import opening_database, quiet_mlflow, tracking_uri, without_password

if TYPE_CHECKING:
    from mlflow import MlflowClient

RUN_ID_FILE = "mlflow_run_id"
"""The file with the id on the server that recorded the folder first."""

SERVERS_FILE = "mlflow_servers.json"
"""The file with the id on each server, by tracking URI."""


def existing_run(client: MlflowClient, folder: Path) -> Any:
    """Return the folder's MLflow run on the client's server; None if it has none there, or the run was deleted."""
    first_id = _first_id(folder)
    if not first_id:
        return None
    # A database file may have been moved together with the folder.
    run_id = _ids(folder).get(_server(client), first_id)
    try:
        run = client.get_run(run_id)
    except quiet_mlflow().MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            return None
        raise
    return run if run.info.lifecycle_stage == "active" else None


def keep_run_id(client: MlflowClient, folder: Path, run_id: str) -> None:
    """Write the id of the folder's MLflow run on the client's server, and leave those on other servers as they are."""
    server = _server(client)
    first_id = _first_id(folder)
    ids = _ids(folder) if first_id else {}
    if not first_id or ids.get(server) == first_id:
        write(folder / RUN_ID_FILE, run_id)
    write(folder / SERVERS_FILE, json.dumps({**ids, server: run_id}, indent=1))


def has_run_id(folder: Path) -> bool:
    """Return whether a server has recorded the folder, at least in part."""
    return bool(_first_id(folder))


def is_recorded(experiment: Experiment, run_dir: Path) -> bool:
    """Return whether MLflow has recorded a run to its end, or need not; False if MLflow does not answer."""
    if not experiment.tracking.mlflow:
        return True

    mlflow = quiet_mlflow()
    uri = tracking_uri(experiment)
    try:
        with opening_database(uri):
            run = existing_run(mlflow.MlflowClient(uri), run_dir)
    except (mlflow.MlflowException, OSError, RaypflError):
        return False
    return run is not None and run.info.status != "RUNNING"


def _first_id(folder: Path) -> str:
    file = folder / RUN_ID_FILE
    return file.read_text().strip() if file.exists() else ""


def _ids(folder: Path) -> dict[str, str]:
    file = folder / SERVERS_FILE
    return json.loads(file.read_text()) if file.exists() else {}


def _server(client: MlflowClient) -> str:
    return without_password(str(client.tracking_uri))
