"""A listener that records runs in MLflow, from a thread of its own, and that never stops one."""

from __future__ import annotations

import logging
import os
import queue
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq

from raypfl.federation.events import Checkpointed, Evaluated, Event, RoundFinished, RunFinished, RunStarted

if TYPE_CHECKING:
    from mlflow import MlflowClient

    from raypfl.config import Experiment

RUN_ID_FILE = "mlflow_run_id"
_STATUS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
_LONGEST_VALUE = 5000


def tracking_uri(experiment: Experiment) -> str:
    """Where runs are recorded: ``tracking.uri``, else $MLFLOW_TRACKING_URI, else a SQLite file in the output folder."""
    configured = experiment.tracking.uri or os.environ.get("MLFLOW_TRACKING_URI")
    return configured or f"sqlite:///{Path(experiment.output).absolute()}/mlflow.db"


class MLflowListener:
    """Records parameters, metrics per round, tags and tables of every run that it hears of.

    Recording happens behind the run's back: a tracking server that is slow costs it nothing until its end, where it
    waits for what is left. What MLflow refuses is tried again with the next event, and a person is told once a run. A
    resumed run goes on in its MLflow run, whose id is kept in the run's folder.

    Parameters
    ----------
    warn : is told in a sentence when recording fails, from another thread; None: a log message.
    """

    def __init__(self, warn: Callable[[str], None] | None = None):
        self._warn = warn or logging.getLogger("raypfl").warning
        self._recordings: list[_Recording] = []
        self._current: _Recording | None = None

    def __call__(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self._current = _Recording(event, self._warn) if event.experiment.tracking.mlflow else None
            self._recordings += [self._current] if self._current else []
        elif self._current:
            self._current.put(event)

    def attach(self, file: str | Path) -> None:
        """Add a file, such as the picture of a comparison, to the artifacts of every run recorded so far."""
        for recording in self._recordings:
            recording.attach(Path(file))


class _Recording:
    """One run on its way into MLflow."""

    def __init__(self, started: RunStarted, warn: Callable[[str], None]):
        self._started = started
        self._uri = tracking_uri(started.experiment)
        self._warn = warn
        self._warned = False
        self._client: MlflowClient | None = None
        self._run_id = ""
        self._bytes = (0, 0)  # up, down, of all rounds recorded
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        # A daemon, so that a run which dies without a last event does not keep the process alive.
        self._thread = threading.Thread(target=self._work, name="raypfl-mlflow", daemon=True)
        self._thread.start()

    def put(self, event: Event) -> None:
        """Hand an event over; the last one is waited for."""
        self._events.put(event)
        if isinstance(event, RunFinished):
            self._thread.join()

    def attach(self, file: Path) -> None:
        """Add a file to the run's artifacts, if there is a run."""
        if self._client:
            self._attempt(lambda client: client.log_artifact(self._run_id, str(file)))

    def _work(self) -> None:
        self._attempt(lambda client: None)  # importing MLflow takes seconds: begin before there is anything to record
        pending: list[Event] = []
        last: Event | None = None
        while not isinstance(last, RunFinished):
            pending += self._arrived()
            last = pending[-1]
            if self._attempt(self._record, pending):
                pending = []
        self._attempt(self._finish, last)

    def _arrived(self) -> Iterator[Event]:
        """The next event, once there is one, and those that came meanwhile."""
        yield self._events.get()
        while not self._events.empty():
            yield self._events.get()

    def _attempt(self, action: Callable[..., object], *arguments: object) -> bool:
        """Whether MLflow took it; if not, say so once."""
        try:
            self._client = self._client or self._open()
            action(self._client, *arguments)
        except Exception as error:  # whatever a tracking server, a database or a network may come up with
            if not self._warned:
                self._warn(
                    f"MLflow at {_without_password(self._uri)} does not record the run: {_first_line(error)} The run "
                    f"goes on and MLflow is tried again; all results are in {self._started.run_dir}."
                )
            self._warned = True
            return False
        return True

    def _open(self) -> MlflowClient:
        """Start the MLflow run or, if the run is resumed, go on with the one it had."""
        mlflow = _mlflow()
        client = mlflow.MlflowClient(self._uri)
        known = self._known_run(client)
        self._run_id = known.info.run_id if known else self._new_run(client)
        client.update_run(self._run_id, status="RUNNING")
        params = _flat(self._started.experiment.to_dict())
        before = known.data.params if known else {}
        new = [mlflow.entities.Param(key, value) for key, value in params.items() if key not in before]
        for some in _slices(new, 100):
            client.log_batch(self._run_id, params=some)
        for key in params.keys() & before.keys():
            if params[key] != before[key]:  # MLflow lets nobody change a parameter
                client.set_tag(self._run_id, f"resumed.{key}", params[key])
        if known:
            self._bytes = self._bytes_before(client, "up"), self._bytes_before(client, "down")
        return client

    def _known_run(self, client: MlflowClient) -> Any:
        file = Path(self._started.run_dir, RUN_ID_FILE)
        if not file.exists():
            return None
        try:
            return client.get_run(file.read_text().strip())
        except _mlflow().MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return None
            raise

    def _new_run(self, client: MlflowClient) -> str:
        experiment = self._started.experiment
        run = client.create_run(self._experiment_id(client), tags=_tags(self._started), run_name=self._started.run)
        Path(self._started.run_dir, RUN_ID_FILE).write_text(run.info.run_id)
        client.log_text(run.info.run_id, experiment.to_yaml(), "experiment.yaml")
        return run.info.run_id

    def _experiment_id(self, client: MlflowClient) -> str:
        experiment = self._started.experiment
        if known := client.get_experiment_by_name(experiment.tracking.experiment):
            return known.experiment_id
        # A server knows where its artifacts go; beside a local database they would land in the current folder.
        local = self._uri.startswith("sqlite:")
        artifacts = (Path(experiment.output).absolute() / "mlartifacts").as_uri() if local else None
        return client.create_experiment(experiment.tracking.experiment, artifact_location=artifacts)

    def _bytes_before(self, client: MlflowClient, way: str) -> int:
        history = client.get_metric_history(self._run_id, f"bytes_{way}_total")
        return int(max((point.value for point in history if point.step <= self._started.first_round), default=0))

    def _record(self, client: MlflowClient, events: Sequence[Event]) -> None:
        up, down = self._bytes
        points: list[tuple[str, float, int]] = []
        for event in events:
            if isinstance(event, RoundFinished):
                up, down = up + event.bytes_up, down + event.bytes_down
                points += _round_points(event, up, down)
            elif isinstance(event, Evaluated):
                points += _evaluation_points(event)
            elif isinstance(event, Checkpointed):
                client.set_tag(self._run_id, "checkpoint", event.location)
        now = int(time.time() * 1000)
        metrics = [_mlflow().entities.Metric(key, value, now, step) for key, value, step in points]
        for some in _slices(metrics, 1000):
            client.log_batch(self._run_id, metrics=some)
        self._bytes = up, down

    def _finish(self, client: MlflowClient, finished: RunFinished) -> None:
        client.set_tag(self._run_id, "weights_hash", finished.weights_hash)
        if finished.error:
            client.set_tag(self._run_id, "error", finished.error[:_LONGEST_VALUE])
        client.set_terminated(self._run_id, _STATUS[finished.status])
        with tempfile.TemporaryDirectory() as folder:
            for name, table in finished.tables.items():
                pq.write_table(table, f"{folder}/{name}.parquet")
            client.log_artifacts(self._run_id, folder)


def _mlflow() -> Any:
    """MLflow, quiet: it neither reports to its makers nor prints what a person did not ask for."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")
    import mlflow

    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)
    return mlflow


def _tags(started: RunStarted) -> dict[str, str]:
    experiment = started.experiment.to_dict()
    return {
        "method": experiment["method"]["name"],
        "data": experiment["data"]["name"],
        "seed": str(experiment["seed"]),
        "run_dir": started.run_dir,
        **_flat(started.facts, "facts."),
    }


def _round_points(event: RoundFinished, up: int, down: int) -> list[tuple[str, float, int]]:
    values = {key: value for key, value in vars(event).items() if key != "round"}
    return [
        (key, value, event.round) for key, value in {**values, "bytes_up_total": up, "bytes_down_total": down}.items()
    ]


def _evaluation_points(event: Evaluated) -> list[tuple[str, float, int]]:
    return [
        (f"{key}/{row['protocol']}/{row['model']}", value, event.round)
        for row in event.summary
        for key, value in row.items()
        if key not in ("protocol", "model")
    ]


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested dicts as dotted keys and texts."""
    flat: dict[str, str] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = str(value)[:_LONGEST_VALUE]
    return flat


def _slices(items: list[Any], size: int) -> Iterator[list[Any]]:
    """Pieces no longer than what MLflow takes in one call."""
    return (items[start : start + size] for start in range(0, len(items), size))


def _without_password(uri: str) -> str:
    return re.sub(r"//[^/@]*@", "//", uri)


def _first_line(error: Exception) -> str:
    line = _without_password(str(error).partition("\n")[0].strip()) or type(error).__name__
    return line if line.endswith(".") else line + "."
