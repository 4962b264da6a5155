"""One run on its way into MLflow, in a thread of its own."""

from __future__ import annotations

import io
import json
import queue
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq

from raypfl.analysis.base import folder_of
from raypfl.common.files import write
from raypfl.engine.events import Checkpointed, Evaluated, Event, RoundFinished, RunFinished, RunStarted
from raypfl.engine.job import checkpoints_of
from raypfl.federation.logged import ANALYSIS
from raypfl.integrations.tracking import entries
from raypfl.integrations.tracking.connection import (
    RUN_ID_FILE,
    experiment_id,
    first_line,
    known_run,
    opening,
    quiet_mlflow,
    tracking_uri,
    without_password,
)
from raypfl.integrations.tracking.models import log_models

if TYPE_CHECKING:
    from mlflow import MlflowClient

PARENT, NOTE, TABLES = "mlflow.parentRunId", "mlflow.note.content", "mlflow.loggedArtifacts"
"""MLflow opens experiments of other kinds on a page for language models."""
_OPENING = threading.Lock()
"""Runs that begin at the same time open MLflow one by one: the first makes their common experiment and parent."""
STATUS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}


class Comparison:
    """The parent of the runs of a comparison; it is made with the first of them.

    Attributes
    ----------
    name : of the comparison. run_id : of the parent; empty until there is one.

    Parameters
    ----------
    kept_in : a folder that keeps the parent's id, so that a comparison that was cut off continues below it.
        In a folder that is new, the first run that was recorded before brings its parent.
    """

    def __init__(self, name: str, tags: Mapping[str, str], kept_in: Path | None = None):
        self.name = name
        self.run_id = ""
        self._tags = tags
        self._file = kept_in and kept_in / RUN_ID_FILE

    def parent_tags(self, client: MlflowClient, experiment_id: str, began: int, data: Any) -> dict[str, str]:
        """Tags that put a run below the parent, which is in the MLflow experiment of the first run.

        `data` : of the run, as MLflow records a data set.
        """
        self.run_id = self.run_id or self._known(client, experiment_id)
        if not self.run_id:
            self.run_id = self._new(client, experiment_id, began)
            client.log_inputs(self.run_id, datasets=[data])
        return {PARENT: self.run_id, "comparison": self.name}

    def adopt(self, tags: Mapping[str, str]) -> None:
        """Continue below the parent of a run with these tags, if that is of this name and the folder keeps no other."""
        if tags.get("comparison") == self.name and PARENT in tags and self._file and not self._file.exists():
            self._keep(self._file, tags[PARENT])

    def _known(self, client: MlflowClient, experiment_id: str) -> str:
        run = known_run(client, self._file) if self._file else None
        if run is None or run.info.experiment_id != experiment_id:
            return ""
        client.update_run(run.info.run_id, status="RUNNING")
        return str(run.info.run_id)

    def _new(self, client: MlflowClient, experiment_id: str, began: int) -> str:
        tags = {**_mlflow_tags(), **self._tags, "kind": "comparison", "comparison": self.name}
        run_id: str = client.create_run(experiment_id, began, tags, self.name).info.run_id
        if self._file:
            self._keep(self._file, run_id)
        return run_id

    @staticmethod
    def _keep(file: Path, run_id: str) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        write(file, run_id)


class RunRecord:
    """Records a run.

    Parameters
    ----------
    comparison : that the run is part of. tags : of the person's own.
    warn : is called once, with a sentence, if MLflow does not record the run.
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
        self.run_id = self.experiment_id = ""
        self._started = started
        self._began = _now()
        self._comparison = comparison
        self._tags = tags
        self._uri = tracking_uri(started.experiment)
        self._warn = warn
        self._warned = False
        self._last_round = self._last_evaluation = -1  # that were recorded before, if the run is resumed
        self._monitor: Any = None
        # An event and its time in milliseconds: if it is recorded later or again, it is the same entry.
        self._events: queue.SimpleQueue[tuple[Event, int]] = queue.SimpleQueue()
        # A daemon, so that a run that dies without a last event does not keep the process alive.
        self._thread = threading.Thread(target=self._work, name="raypfl-mlflow", daemon=True)
        self._thread.start()

    def put(self, event: Event) -> None:
        """Record an event, in the background; after the last one, wait until all are recorded."""
        self._events.put((event, _now()))
        if isinstance(event, RunFinished):
            self.status = event.status
            self._thread.join()

    def attempt(self, action: Callable[..., object], *arguments: object) -> bool:
        """Call `action` with the client; False, and a warning the first time, if MLflow raises an error."""
        try:
            with _OPENING, nullcontext() if self.client else opening(self._uri):
                self.client = self.client or self._open()
            action(self.client, *arguments)
        except Exception as error:  # tracking servers, databases and networks raise errors of all kinds
            if not self._warned:
                self._warn(
                    f"MLflow at {without_password(self._uri)} does not record the run: {first_line(error)} The run "
                    f"itself does not need MLflow. All results are in {self.run_dir}; "
                    f"`raypfl track {self.run_dir}` records them later."
                )
            self._warned = True
            return False
        return True

    def _work(self) -> None:
        self.attempt(lambda client: None)  # importing MLflow takes seconds: do it before there is anything to record
        pending: list[tuple[Event, int]] = []
        recorded, last = False, None
        while not isinstance(last, RunFinished):
            pending.append(self._events.get())
            while not self._events.empty():
                pending.append(self._events.get())
            last, at = pending[-1]
            if recorded := self.attempt(self._record, pending):
                pending = []
        if recorded:  # a server that does not answer is not asked again at the end: each time may take a minute
            self.attempt(self._finish, last, at)
        if self._monitor:
            self._monitor.finish()

    def _open(self) -> MlflowClient:
        """Start the MLflow run or, if the run is resumed, continue the one that it has."""
        mlflow = quiet_mlflow()
        client = mlflow.MlflowClient(self._uri)
        known = known_run(client, Path(self.run_dir, RUN_ID_FILE)) or self._begun_elsewhere(client)
        run = known or self._new_run(client)
        self.run_id, self.experiment_id = run.info.run_id, run.info.experiment_id
        client.update_run(self.run_id, status="RUNNING")
        params = entries.params_of(self._started.experiment)
        before = known.data.params if known else {}
        new = [mlflow.entities.Param(key, value) for key, value in params.items() if key not in before]
        for some in mlflow.utils.chunk_list(new, 100):  # no longer than what MLflow takes in one call
            client.log_batch(self.run_id, params=some)
        for key in params.keys() & before.keys():
            if params[key] != before[key]:  # parameters cannot be changed in MLflow
                client.set_tag(self.run_id, f"resumed.{key}", params[key])
        if known:
            self._continue(client, known)
        if self._started.experiment.tracking.system_metrics and self._monitor is None:
            self._monitor = _monitor(self.run_id, self._uri, bool(known))
        return client

    def _begun_elsewhere(self, client: MlflowClient) -> Any:
        """The run whose checkpoints this one continues from in a folder that is new; None: there is none."""
        experiment = self._started.experiment
        if not self._started.first_round or experiment.checkpoint.location is None:
            return None
        home = experiment_id(client, experiment, self._uri)
        place = f"{checkpoints_of(experiment, self.run_dir)}/"
        pattern = place.replace("'", "_")  # which stands for any character
        for run in client.search_runs([home], f"tags.checkpoint LIKE '{pattern}%'"):
            if run.data.tags["checkpoint"].startswith(place):
                write(Path(self.run_dir, RUN_ID_FILE), run.info.run_id)
                return run
        return None

    def _new_run(self, client: MlflowClient) -> Any:
        experiment = self._started.experiment
        home = experiment_id(client, self._started.experiment, self._uri)
        tags = {**_mlflow_tags(), **entries.tags_of(self._started), **self._tags, **self._parent_tags(client, home)}
        run = client.create_run(home, self._began, tags, self._name())
        run_id: str = run.info.run_id
        write(Path(self.run_dir, RUN_ID_FILE), run_id)
        client.set_tag(run_id, NOTE, entries.description_of(self._started, run_id, self._uri))
        client.log_text(run_id, without_password(experiment.to_yaml()), "experiment.yaml")
        client.log_inputs(run_id, datasets=[self._dataset()])
        return run

    def _name(self, score: str = "") -> str:
        """Name of the experiment, unless its parent has it; :func:`entries.name_of`; settings that differ."""
        experiment = self._started.experiment
        above = "" if self._comparison else f"{experiment.name}:"
        name = " ".join(filter(None, [above, entries.name_of(experiment, score), self._tags.get("settings")]))
        return entries.short_name(name)

    def _dataset(self) -> Any:
        from mlflow.entities import Dataset, DatasetInput

        data = self._started.experiment.data
        digest = str(self._started.metadata.get("data", ""))[:36]
        return DatasetInput(Dataset(data.name, digest, "local", str(data.root or "")))

    def _parent_tags(self, client: MlflowClient, home: str) -> dict[str, str]:
        if self._comparison is None:
            return {}
        return self._comparison.parent_tags(client, home, self._began, self._dataset())

    def _continue(self, client: MlflowClient, known: Any) -> None:
        """Find what is recorded already; a run below a parent stays there."""

        def last(metric: str) -> int:
            return max((point.step for point in client.get_metric_history(self.run_id, metric)), default=-1)

        primary = self._started.experiment.measures.primary.name
        evaluated = next((key for key in known.data.metrics if key.startswith(f"{primary}/")), None)
        self._last_round, self._last_evaluation = last("clients"), last(evaluated) if evaluated else -1
        if self._comparison:
            self._comparison.adopt(known.data.tags)
        tags = self._parent_tags(client, known.info.experiment_id)
        for key, value in tags.items() if PARENT not in known.data.tags else ():
            client.set_tag(self.run_id, key, value)

    def _record(self, client: MlflowClient, pending: Sequence[tuple[Event, int]]) -> None:
        # After a kill, rounds since the last checkpoint come again, equal: those that are recorded are skipped.
        fresh = [
            (event, at)
            for event, at in pending
            if (isinstance(event, RoundFinished) and event.round > self._last_round)
            or (isinstance(event, Evaluated) and event.round > self._last_evaluation)
        ]
        mlflow = quiet_mlflow()
        points = [
            mlflow.entities.Metric(key, value, at, step)
            for event, at in fresh
            for key, value, step in (
                entries.evaluation_points(event) if isinstance(event, Evaluated) else entries.round_points(event)
            )
        ]
        for some in mlflow.utils.chunk_list(points, 1000):
            client.log_batch(self.run_id, metrics=some)
        for event, at in fresh:
            if isinstance(event, RoundFinished):
                self._log_images(client, event, at)
        evaluated = [event for event, _ in pending if isinstance(event, Evaluated) and event.summary]
        if evaluated:  # MLflow's page shows no metric by itself, but every name
            score = entries.score_of(self._started.experiment, evaluated[-1].summary)
            client.update_run(self.run_id, name=self._name(score))
        saved = [event.location for event, _ in pending if isinstance(event, Checkpointed)]
        if saved:
            client.set_tag(self.run_id, "checkpoint", saved[-1])

    def _log_images(self, client: MlflowClient, event: RoundFinished, at: int) -> None:
        from PIL import Image

        for name, png in event.logged.images.items():
            with Image.open(io.BytesIO(png)) as image:
                client.log_image(self.run_id, image, key=name, step=event.round, timestamp=at)

    def _finish(self, client: MlflowClient, finished: RunFinished, at: int) -> None:
        tags = {"weights_hash": finished.weights_hash}
        if finished.best_round is not None:
            tags["best_round"] = str(finished.best_round)
        if finished.error:
            tags["error"] = finished.error[: entries.LONGEST_VALUE]
        with tempfile.TemporaryDirectory() as folder:
            for name, table in finished.tables.items():
                pq.write_table(table, f"{folder}/{name}.parquet")
            client.log_artifacts(self.run_id, folder)
        # MLflow shows the tables that the method logged.
        shown = {f"{name}.json": table for name, table in finished.tables.items() if name.startswith(ANALYSIS)}
        for file, table in shown.items():
            client.log_dict(self.run_id, entries.table_of(table), file)
        if shown:
            tags[TABLES] = json.dumps([{"path": file, "type": "table"} for file in shown])
        for key, value in tags.items():
            client.set_tag(self.run_id, key, value)
        if "logged" in finished.tables:
            self._log_start(client, finished.tables["logged"].to_pylist())
        self._log_analyses(client)
        if finished.status == "finished" and self._started.experiment.tracking.models_mb:
            log_models(client, self.run_id, self.run_dir, self._warn)
        client.set_terminated(self.run_id, STATUS[finished.status], end_time=at)

    def _log_start(self, client: MlflowClient, logged: list[dict[str, Any]]) -> None:
        """Numbers from before the first round, which no event has; at the same time again if the run was resumed."""
        from mlflow.entities import Metric

        at = client.get_run(self.run_id).info.start_time
        points = [Metric(f"method/{row['name']}", row["value"], at, 0) for row in logged if row["round"] == 0]
        client.log_batch(self.run_id, metrics=points)

    def _log_analyses(self, client: MlflowClient) -> None:
        """The files of analyses, except what they kept of each client."""
        for analysis in self._started.experiment.analyses:
            for file in sorted(folder_of(self.run_dir, analysis).rglob("*")):
                if file.is_file() and not file.name.startswith("client-"):
                    client.log_artifact(self.run_id, str(file), str(file.parent.relative_to(self.run_dir)))


def _monitor(run_id: str, uri: str, resumed: bool) -> Any:
    """MLflow's monitor of this machine, started; None if there is no psutil, which comes with Ray."""
    try:
        import ray  # noqa: F401  makes its psutil importable
        from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

        monitor = SystemMetricsMonitor(run_id, resume_logging=resumed, tracking_uri=uri)
    except ImportError:
        return None
    monitor.start()
    return monitor


def _now() -> int:
    """Milliseconds, as MLflow counts time."""
    return int(time.time() * 1000)


def _mlflow_tags() -> dict[str, str]:
    """MLflow's own tags: user, program, git commit."""
    from mlflow.tracking.context.registry import resolve_tags

    return resolve_tags()
