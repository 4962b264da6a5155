"""The connection to MLflow: its URI, its module without its messages, and errors that may be printed."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raypfl.common.files import alone, draft
from raypfl.experiment import Experiment

if TYPE_CHECKING:
    from mlflow import MlflowClient

RUN_ID_FILE = "mlflow_run_id"
KIND, MODELS = "mlflow.experimentKind", "custom_model_development"
_LOCAL_SERVER = "http://127.0.0.1:5000"


def tracking_uri(experiment: Experiment) -> str:
    """Where runs are recorded: ``tracking.uri``, else $MLFLOW_TRACKING_URI, else a SQLite file in the output folder."""
    configured = experiment.tracking.uri or os.environ.get("MLFLOW_TRACKING_URI")
    return configured or f"sqlite:///{Path(experiment.output).absolute()}/mlflow.db"


def experiment_id(client: MlflowClient, experiment: Experiment, uri: str) -> str:
    """MLflow's experiment of this name, which is made if there is none."""
    name = experiment.tracking.experiment
    if known := client.get_experiment_by_name(name):
        return str(known.experiment_id)
    artifacts = _artifacts_in(experiment.output) if uri.startswith("sqlite:") else None  # a server decides itself
    try:
        return str(client.create_experiment(name, artifacts, {KIND: MODELS}))
    except quiet_mlflow().MlflowException:  # another process has made it meanwhile
        if known := client.get_experiment_by_name(name):
            return str(known.experiment_id)
        raise


def how_to_look(experiment: Experiment, experiment_id: str = "") -> str:
    """Where to see the runs, with the command that starts a server if there is none; empty: they are not tracked.

    `experiment_id` : MLflow's; empty: it is not known.
    """
    uri = tracking_uri(experiment)
    if not experiment.tracking.mlflow:
        return ""
    page = f"/#/experiments/{experiment_id}/runs" if experiment_id else ""
    if uri.startswith("http"):
        return f"{without_password(uri).rstrip('/')}{page}"
    return f"mlflow ui --backend-store-uri {uri}" + (f"  then {_LOCAL_SERVER}{page}" if page else "")


def quiet_mlflow() -> Any:
    """The module, without telemetry, progress bars and messages."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")
    import mlflow

    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for name in ("environment", "git_utils"):  # they warn where there is no pip (uv installs none) or no git
        logging.getLogger(f"mlflow.utils.{name}").setLevel(logging.ERROR)
    return mlflow


def known_run(client: MlflowClient, file: Path) -> Any:
    """The MLflow run whose id is in a file; None if there is no file, or the run was deleted."""
    if not file.exists():
        return None
    try:
        run = client.get_run(file.read_text().strip())
    except quiet_mlflow().MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            return None
        raise
    return run if run.info.lifecycle_stage == "active" else None


def is_recorded(experiment: Experiment, run_dir: Path) -> bool:
    """Whether MLflow has a run to its end, or is not asked to record it; False if MLflow does not answer."""
    if not experiment.tracking.mlflow:
        return True
    mlflow, uri = quiet_mlflow(), tracking_uri(experiment)
    try:
        with opening(uri):
            known = known_run(mlflow.MlflowClient(uri), run_dir / RUN_ID_FILE)
    except mlflow.MlflowException:
        return False
    return known is not None and known.info.status != "RUNNING"


@contextmanager
def opening(uri: str) -> Iterator[None]:
    """To be held while a client opens a database file: the first process makes its tables, and others wait for it.

    A new file has all of its tables: MLflow cannot open one whose tables were made half-way.
    """
    named = re.match(r"sqlite(?:\+\w+)?:///(?!:memory:|file:)([^?]+)", uri)
    if not named:
        yield
        return
    file = Path(named[1])
    file.parent.mkdir(parents=True, exist_ok=True)
    with alone(file):
        if not file.exists():
            with draft(file) as unfinished:
                _make_tables(f"{uri[: named.start(1)]}{unfinished}{uri[named.end(1) :]}", file.parent)
        yield


def _make_tables(uri: str, folder: Path) -> None:
    quiet_mlflow()
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    SqlAlchemyStore(uri, _artifacts_in(folder)).engine.dispose()


def _artifacts_in(folder: str | Path) -> str:
    """Where the artifacts are of a database in a folder; MLflow would put them into the current one."""
    return (Path(folder).absolute() / "mlartifacts").as_uri()


def without_password(text: str) -> str:
    """URIs without what precedes an @ in them."""
    return re.sub(r"//[^/@\s]*@", "//", text)


def first_line(error: BaseException) -> str:
    """The first line of an error, as a sentence without passwords."""
    line = without_password(str(error).partition("\n")[0].strip()) or type(error).__name__
    return line if line.endswith(".") else f"{line}."
