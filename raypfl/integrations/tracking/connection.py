"""The connection to MLflow: its URI, its module without its messages, and errors that may be printed."""

from __future__ import annotations

import logging
import os
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from raypfl.common.errors import RaypflError
from raypfl.common.files import draft, locked
from raypfl.experiment import Experiment

if TYPE_CHECKING:
    from mlflow import MlflowClient

_EXPERIMENT_KIND = {"mlflow.experimentKind": "custom_model_development"}
"""The tag of our experiments. MLflow opens those of other kinds on a page for language models."""

_LOCAL_SERVER = "http://127.0.0.1:5000"


def tracking_uri(experiment: Experiment) -> str:
    """Return where runs are recorded: ``tracking.uri``, else $MLFLOW_TRACKING_URI, else a SQLite file in `output`."""
    configured = experiment.tracking.uri or os.environ.get("MLFLOW_TRACKING_URI")
    return configured or f"sqlite:///{Path(experiment.output).absolute()}/mlflow.db"


def experiment_id(client: MlflowClient, experiment: Experiment, uri: str) -> str:
    """Return the id of MLflow's experiment for this one, which is created if it does not exist."""
    name = experiment.tracking.experiment
    existing = client.get_experiment_by_name(name)
    if existing is None:
        artifacts = _artifacts_in(experiment.output) if uri.startswith("sqlite:") else None  # a server chooses its own
        try:
            return str(client.create_experiment(name, artifacts, _EXPERIMENT_KIND))
        except quiet_mlflow().MlflowException:  # another process may have created it meanwhile
            existing = client.get_experiment_by_name(name)
            if existing is None:
                raise
    return str(existing.experiment_id)


def how_to_view(experiment: Experiment, experiment_id: str = "") -> str:
    """Return where to see the runs, with the command that starts a server if there is none; empty if not tracked.

    Parameters
    ----------
    experiment_id : the id of MLflow's experiment; empty: not known.
    """
    uri = tracking_uri(experiment)
    if not experiment.tracking.mlflow:
        return ""
    page = f"/#/experiments/{experiment_id}/runs" if experiment_id else ""
    if uri.startswith("http"):
        return f"{without_password(uri).rstrip('/')}{page}"
    command = shlex.join(["mlflow", "ui", "--backend-store-uri", uri])
    return f"{command}  then {_LOCAL_SERVER}{page}" if page else command


def quiet_mlflow() -> Any:
    """Import MLflow without telemetry, progress bars and messages; return the module."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")  # stdout is for results, such as --json
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")
    import mlflow

    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for name in ("environment", "git_utils"):  # they warn where there is no pip (uv installs none) or no git
        logging.getLogger(f"mlflow.utils.{name}").setLevel(logging.ERROR)
    return mlflow


@contextmanager
def opening_database(uri: str) -> Iterator[None]:
    """Hold a lock while a client opens a database file: the first process creates its tables, and others wait for it.

    A new file has all of its tables: MLflow cannot open one whose tables were created half-way.

    Raises
    ------
    RaypflError : if the URI is that of a folder.
    """
    if urlsplit(uri).scheme in ("", "file") and uri != "databricks":
        raise RaypflError(
            "It is a folder, and MLflow's store in folders cannot keep both loss and loss/local. Name a database: "
            "tracking.uri=sqlite:////FOLDER/mlflow.db, and --uri for `raypfl track`."
        )
    match = re.match(r"sqlite(?:\+\w+)?:///(?!:memory:|file:)([^?]+)", uri)
    if not match:
        yield
        return

    # MLflow holds a connection while it waits for another one. With more runs at a time than SQLAlchemy allows
    # connections, 15, each waits for the others until it fails.
    if "MLFLOW_SQLALCHEMYSTORE_POOLCLASS" not in os.environ:
        os.environ.setdefault("MLFLOW_SQLALCHEMYSTORE_MAX_OVERFLOW", "-1")  # any number

    file = Path(match[1])
    file.parent.mkdir(parents=True, exist_ok=True)
    with locked(file):
        if not file.exists():
            with draft(file) as unfinished:
                _create_tables(f"{uri[: match.start(1)]}{unfinished}{uri[match.end(1) :]}", file.parent)
        yield


def _create_tables(uri: str, folder: Path) -> None:
    quiet_mlflow()
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    SqlAlchemyStore(uri, _artifacts_in(folder)).engine.dispose()


def _artifacts_in(folder: str | Path) -> str:
    """Return where the artifacts of a database in a folder are; MLflow would put them into the current folder."""
    return (Path(folder).absolute() / "mlartifacts").as_uri()


def without_password(text: str) -> str:
    """Remove user names and passwords, which precede an @, from the URIs in a text."""
    return re.sub(r"//[^/@\s]*@", "//", text)


def first_line(error: BaseException) -> str:
    """Return the first line of an error, as a sentence without passwords."""
    line = without_password(str(error).partition("\n")[0].strip()) or type(error).__name__
    return line if line.endswith(".") else f"{line}."
