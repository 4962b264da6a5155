"""One run on its way into MLflow, in a thread of its own."""

from __future__ import annotations

import io
import json
import logging
import os
import queue
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq

from raypfl.common.files import alone, write
from raypfl.federation.logged import ANALYSIS
from raypfl.server.events import Checkpointed, Evaluated, Event, RoundFinished, RunFinished, RunStarted
from raypfl.tracking import entries

if TYPE_CHECKING:
    from mlflow import MlflowClient

    from raypfl.config import Experiment

RUN_ID_FILE = "mlflow_run_id"
PARENT, NOTE, TABLES = "mlflow.parentRunId", "mlflow.note.content", "mlflow.loggedArtifacts"
_OPENING = threading.Lock()
"""Of runs that begin at the same time, one makes their common experiment and parent."""
STATUS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}


def tracking_uri(experiment: Experiment) -> str:
    """Where runs are recorded: ``tracking.uri``, else $MLFLOW_TRACKING_URI, else a SQLite file in the output folder."""
    configured = experiment.tracking.uri or os.environ.get("MLFLOW_TRACKING_URI")
    return configured or f"sqlite:///{Path(experiment.output).absolute()}/mlflow.db"


def quiet_mlflow() -> Any:
    """MLflow, quiet: it neither reports to its makers nor prints what a person did not ask for."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")
    import mlflow

    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for name in ("environment", "git_utils"):  # which miss a pip that uv does not install, and a git that need not be
        logging.getLogger(f"mlflow.utils.{name}").setLevel(logging.ERROR)
    return mlflow


class Comparison:
    """The parent of the runs of a comparison; it is made with the first of them.

    Attributes
    ----------
    name : of the comparison. run_id : of the parent; empty until there is one.

    Parameters
    ----------
    kept_in : a folder for the parent's id, from which a comparison that was cut off goes on in the same parent.
    """

    def __init__(self, name: str, tags: Mapping[str, str], kept_in: Path | None = None):
        self.name = name
        self.run_id = ""
        self._tags = tags
        self._file = kept_in and kept_in / RUN_ID_FILE
        self._place: tuple[str, str] | None = None

    def parent_in(self, client: MlflowClient, place: tuple[str, str], began: int) -> dict[str, str]:
        """Tags that put a run below the parent; `place` is the run's tracking URI and experiment id.

        A run in another place than the first cannot be below the same parent, and has none.
        """
        if self._place is None:
            self.run_id = self._known(client, place[1]) or self._new(client, place[1], began)
            self._place = place
        return {PARENT: self.run_id, "comparison": self.name} if place == self._place else {"comparison": self.name}

    def _known(self, client: MlflowClient, home: str) -> str:
        """Of the parent that was kept, if it is there."""
        run = known_run(client, self._file) if self._file else None
        if run is None or run.info.experiment_id != home:
            return ""
        client.update_run(run.info.run_id, status="RUNNING")
        return str(run.info.run_id)

    def _new(self, client: MlflowClient, home: str, began: int) -> str:
        tags = {**_context(), **self._tags, "kind": "comparison", "comparison": self.name}
        run_id: str = client.create_run(home, began, tags, self.name).info.run_id
        if self._file:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            write(self._file, run_id)
        return run_id


def known_run(client: MlflowClient, file: Path) -> Any:
    """The MLflow run whose id is in a file; None if there is no file, or no such run (any more)."""
    if not file.exists():
        return None
    try:
        run = client.get_run(file.read_text().strip())
    except quiet_mlflow().MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            return None
        raise
    return run if run.info.lifecycle_stage == "active" else None


@dataclass(frozen=True)
class _Heard:
    """An event and when it came, in milliseconds: recorded later or again, it is the same entry."""

    event: Event
    at: int


class RunRecord:
    """Records a run.

    Parameters
    ----------
    comparison : that the run is part of. tags : of the person's own.
    warn : is told in a sentence what is not recorded, each only once.
    """

    def __init__(
        self,
        started: RunStarted,
        comparison: Comparison | None,
        tags: Mapping[str, str],
        warn: Callable[[str], None],
    ):
        self.run_dir = started.run_dir
        self.status = ""
        self.client: MlflowClient | None = None
        self.run_id = ""
        self._started = started
        self._began = _now()
        self._comparison = comparison
        self._tags = tags
        self._uri = tracking_uri(started.experiment)
        self._warn = warn
        self._warned = False
        self._rounds = self._evaluations = -1  # the last ones recorded before, if the run is resumed
        self._monitor: Any = None
        self._events: queue.SimpleQueue[_Heard] = queue.SimpleQueue()
        # A daemon, so that a run which dies without a last event does not keep the process alive.
        self._thread = threading.Thread(target=self._work, name="raypfl-mlflow", daemon=True)
        self._thread.start()

    def put(self, event: Event) -> None:
        """Hand an event over; the last one is waited for."""
        self._events.put(_Heard(event, _now()))
        if isinstance(event, RunFinished):
            self.status = event.status
            self._thread.join()

    def attempt(self, action: Callable[..., object], *arguments: object) -> bool:
        """Whether MLflow took it; if not, say so once."""
        try:
            with _OPENING, self._alone():
                self.client = self.client or self._open()
            action(self.client, *arguments)
        except Exception as error:  # whatever a tracking server, a database or a network may come up with
            if not self._warned:
                self._warn(
                    f"MLflow at {entries.without_password(self._uri)} does not record the run: "
                    f"{entries.first_line(error)} The run goes on and MLflow is tried again; all results are in "
                    f"{self.run_dir}, and `raypfl track {self.run_dir}` records them later."
                )
            self._warned = True
            return False
        return True

    def _work(self) -> None:
        self.attempt(lambda client: None)  # importing MLflow takes seconds: begin before there is anything to record
        pending: list[_Heard] = []
        last, recorded = None, False
        while last is None or not isinstance(last.event, RunFinished):
            pending += self._arrived()
            last = pending[-1]
            if recorded := self.attempt(self._record, pending):
                pending = []
        if recorded:  # a server that does not answer is not asked twice at the end: every time may take a minute
            self.attempt(self._finish, last.event, last.at)
        if self._monitor:
            self._monitor.finish()

    def _arrived(self) -> Iterator[_Heard]:
        """The next event, once there is one, and those that came meanwhile."""
        yield self._events.get()
        while not self._events.empty():
            yield self._events.get()

    def _alone(self) -> AbstractContextManager[None]:
        """Until a database is open: whoever finds none makes its tables, and only one can."""
        file = None if self.client else entries.database(self._uri)
        if file is None:
            return nullcontext()
        file.parent.mkdir(parents=True, exist_ok=True)
        return alone(file)

    def _open(self) -> MlflowClient:
        """Start the MLflow run or, if the run is resumed, go on with the one it had."""
        mlflow = quiet_mlflow()
        client = mlflow.MlflowClient(self._uri)
        known = known_run(client, Path(self.run_dir, RUN_ID_FILE))
        self.run_id = known.info.run_id if known else self._new_run(client)
        client.update_run(self.run_id, status="RUNNING")
        params = entries.params_of(self._started.experiment)
        before = known.data.params if known else {}
        new = [mlflow.entities.Param(key, value) for key, value in params.items() if key not in before]
        for some in _slices(new, 100):
            client.log_batch(self.run_id, params=some)
        for key in params.keys() & before.keys():
            if params[key] != before[key]:  # MLflow lets nobody change a parameter
                client.set_tag(self.run_id, f"resumed.{key}", params[key])
        if known:
            self._learn_what_is_there(client, known.data.metrics)
            self._put_below(client, known)
        if self._started.experiment.tracking.system_metrics and self._monitor is None:
            self._monitor = _monitor(self.run_id, self._uri, bool(known))
        return client

    def _new_run(self, client: MlflowClient) -> str:
        experiment = self._started.experiment
        home = self._experiment_id(client)
        tags = {**_context(), **entries.tags_of(self._started), **self._tags, **self._above(client, home)}
        name = " ".join(filter(None, [entries.name_of(experiment), self._tags.get("settings")]))
        run = client.create_run(home, self._began, tags, name)
        run_id = run.info.run_id
        write(Path(self.run_dir, RUN_ID_FILE), run_id)
        client.set_tag(run_id, NOTE, entries.description_of(self._started, run_id, self._uri))
        client.log_text(run_id, entries.without_password(experiment.to_yaml()), "experiment.yaml")
        client.log_inputs(run_id, datasets=[_dataset(self._started)])
        return run_id

    def _above(self, client: MlflowClient, home: str) -> dict[str, str]:
        return self._comparison.parent_in(client, (self._uri, home), self._began) if self._comparison else {}

    def _put_below(self, client: MlflowClient, known: Any) -> None:
        """A run that goes on stays below the parent that it has."""
        above = self._above(client, known.info.experiment_id)
        if PARENT not in known.data.tags:
            for key, value in above.items():
                client.set_tag(self.run_id, key, value)

    def _experiment_id(self, client: MlflowClient) -> str:
        experiment = self._started.experiment
        if known := client.get_experiment_by_name(experiment.tracking.experiment):
            return known.experiment_id
        # A server knows where its artifacts go; beside a local database they would land in the current folder.
        local = self._uri.startswith("sqlite:")
        artifacts = (Path(experiment.output).absolute() / "mlartifacts").as_uri() if local else None
        try:
            return client.create_experiment(experiment.tracking.experiment, artifact_location=artifacts)
        except quiet_mlflow().MlflowException:  # another run has made it meanwhile
            if known := client.get_experiment_by_name(experiment.tracking.experiment):
                return known.experiment_id
            raise

    def _learn_what_is_there(self, client: MlflowClient, metrics: Mapping[str, float]) -> None:
        def last(metric: str) -> int:
            return max((point.step for point in client.get_metric_history(self.run_id, metric)), default=-1)

        self._rounds, primary = last("clients"), self._started.experiment.measures.primary.name
        judged = next((key for key in metrics if key.startswith(f"{primary}/")), None)
        self._evaluations = last(judged) if judged else -1

    def _record(self, client: MlflowClient, heard: Sequence[_Heard]) -> None:
        points: list[tuple[int, entries.Point]] = []
        rounds: list[tuple[_Heard, RoundFinished]] = []
        for one in heard:
            event = one.event
            # What a killed run had recorded after its last checkpoint comes again, the same.
            if isinstance(event, RoundFinished) and event.round > self._rounds:
                points += [(one.at, point) for point in entries.round_points(event)]
                rounds.append((one, event))
            elif isinstance(event, Evaluated) and event.round > self._evaluations:
                points += [(one.at, point) for point in entries.evaluation_points(event)]
            elif isinstance(event, Checkpointed):
                client.set_tag(self.run_id, "checkpoint", event.location)
        metrics = [quiet_mlflow().entities.Metric(key, value, at, step) for at, (key, value, step) in points]
        for some in _slices(metrics, 1000):
            client.log_batch(self.run_id, metrics=some)
        for one, finished in rounds:
            for name, png in finished.logged.images.items():
                self._log_image(client, name, png, finished.round, one.at)

    def _log_image(self, client: MlflowClient, name: str, png: bytes, round: int, at: int) -> None:
        from PIL import Image

        with Image.open(io.BytesIO(png)) as image:
            client.log_image(self.run_id, image, key=name, step=round, timestamp=at)

    def _log_analysis(self, client: MlflowClient, finished: RunFinished) -> None:
        """Have MLflow show the tables that the method logged."""
        shown = {f"{name}.json": table for name, table in finished.tables.items() if name.startswith(ANALYSIS)}
        for file, table in shown.items():
            client.log_dict(self.run_id, entries.table_of(table), file)
        if shown:
            client.set_tag(self.run_id, TABLES, json.dumps([{"path": file, "type": "table"} for file in shown]))

    def _finish(self, client: MlflowClient, finished: RunFinished, at: int) -> None:
        from raypfl.tracking.models import log_models

        client.set_tag(self.run_id, "weights_hash", finished.weights_hash)
        if finished.best_round is not None:
            client.set_tag(self.run_id, "best_round", str(finished.best_round))
        if finished.error:
            client.set_tag(self.run_id, "error", finished.error[: entries.LONGEST_VALUE])
        with tempfile.TemporaryDirectory() as folder:
            for name, table in finished.tables.items():
                pq.write_table(table, f"{folder}/{name}.parquet")
            client.log_artifacts(self.run_id, folder)
        self._log_analysis(client, finished)
        if finished.status == "finished" and self._started.experiment.tracking.models_mb:
            log_models(client, self.run_id, self.run_dir, self._warn)
        client.set_terminated(self.run_id, STATUS[finished.status], end_time=at)


def _monitor(run_id: str, uri: str, resumed: bool) -> Any:
    """MLflow's own monitor of this machine, started; None if there is no psutil, which comes with Ray."""
    try:
        import ray  # noqa: F401  brings its psutil along
        from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

        monitor = SystemMetricsMonitor(run_id, resume_logging=resumed, tracking_uri=uri)
    except ImportError:
        return None
    monitor.start()
    return monitor


def _now() -> int:
    """In milliseconds, as MLflow has times."""
    return int(time.time() * 1000)


def _context() -> dict[str, str]:
    """MLflow's own tags: the user, the program, its git commit."""
    from mlflow.tracking.context.registry import resolve_tags

    return resolve_tags()


def _dataset(started: RunStarted) -> Any:
    from mlflow.entities import Dataset, DatasetInput

    data = started.experiment.data
    digest = str(started.metadata.get("data", ""))[:36]
    return DatasetInput(Dataset(data.name, digest, "local", str(data.root or "")))


def _slices(items: list[Any], size: int) -> Iterator[list[Any]]:
    """Pieces no longer than what MLflow takes in one call."""
    return (items[start : start + size] for start in range(0, len(items), size))
