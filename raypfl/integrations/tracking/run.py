"""Recording a run in MLflow, in a thread of its own."""

from __future__ import annotations

import io
import json
import queue
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq

from raypfl.analysis.base import analysis_folder
from raypfl.engine.events import Checkpointed, Evaluated, Event, RoundFinished, RunFinished, RunStarted
from raypfl.engine.job import checkpoints_of
from raypfl.federation.logged import ANALYSIS
from raypfl.integrations.tracking import entries
from raypfl.integrations.tracking.comparison_run import PARENT, ComparisonRun, context_tags
from raypfl.integrations.tracking.connection import (
    experiment_id,
    first_line,
    opening_database,
    quiet_mlflow,
    tracking_uri,
    without_password,
)
from raypfl.integrations.tracking.models import log_models
from raypfl.integrations.tracking.run_ids import existing_run, keep_run_id
from raypfl.runs.result import counted_rounds, mean_summary
from raypfl.storage.filesystems import absolute, join

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

NOTE = "mlflow.note.content"
"""The tag with a run's description."""

TABLES = "mlflow.loggedArtifacts"
"""The tag with the tables that MLflow shows."""

GATHERING = 5.0
"""Seconds in which events are gathered: each record is a few transactions, which cost more than what they write."""

_OPENING = threading.Lock()
"""Runs that begin at the same time open MLflow one by one: the first creates their common experiment and parent."""

STATUS = {"finished": "FINISHED", "stopped": "KILLED", "diverged": "FAILED", "failed": "FAILED"}


class RunRecord:
    """Records a run, with a queue of its events and a thread.

    MLflow's own asynchronous logging (``log_batch(synchronous=False)``) cannot replace these. It drops a batch that
    fails, and sends batches from ten threads, so a later round may be recorded without an earlier one, and a resumed
    run, which continues after the last recorded round, would never catch up. Here what fails stays pending, and is sent
    in order. Neither does MLflow create runs, or log images, artifacts and models, in the background.

    Parameters
    ----------
    comparison : the parent of the run; None: it has none.
    tags : the user's own tags.
    warn : a function that is called once, with a sentence, if MLflow does not record the run.
    """

    def __init__(
        self,
        started: RunStarted,
        comparison: ComparisonRun | None,
        tags: Mapping[str, str],
        warn: Callable[[str], None],
    ):
        self.run_dir = started.run_dir
        self.status = ""
        self.client: MlflowClient | None = None
        self.run_id = ""
        self.experiment_id = ""
        self._started = started
        self._start_time = _now()
        self._comparison = comparison
        self._tags = tags
        self._uri = tracking_uri(started.experiment)
        self._warn = warn
        self._warned = False
        self._monitor: SystemMetricsMonitor | None = None

        # What is recorded already, if the run is resumed.
        self._last_round = -1
        self._last_evaluation = -1

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
        """Call `action` with the client; return False, and warn the first time, if MLflow raises an error."""
        try:
            with _OPENING, nullcontext() if self.client else opening_database(self._uri):
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
        last_event: Event | None = None
        is_recorded = False
        while not isinstance(last_event, RunFinished):
            pending += self._next_events()
            last_event, time_of_last = pending[-1]
            is_recorded = self.attempt(self._record, pending)
            if is_recorded:
                pending = []

        if is_recorded:  # a server that does not answer is not asked again at the end: each time may take a minute
            self.attempt(self._finish, last_event, time_of_last)
        if self._monitor:
            self._monitor.finish()

    def _next_events(self) -> list[tuple[Event, int]]:
        """Wait for an event and, unless it is the last, for those of the next seconds."""
        events = [self._events.get()]
        deadline = time.monotonic() + GATHERING
        while not isinstance(events[-1][0], RunFinished):
            try:
                events.append(self._events.get(timeout=max(0.0, deadline - time.monotonic())))
            except queue.Empty:
                break
        return events

    def _open(self) -> MlflowClient:
        """Start the MLflow run or, if the run is resumed, continue the one that it has."""
        mlflow = quiet_mlflow()
        client = mlflow.MlflowClient(self._uri)
        existing = existing_run(client, Path(self.run_dir)) or self._run_of_another_folder(client)
        run = existing or self._create_run(client)
        self.run_id = run.info.run_id
        self.experiment_id = run.info.experiment_id
        client.update_run(self.run_id, status="RUNNING")

        self._log_params(client, existing.data.params if existing else {})
        if existing:
            self._continue(client, existing)
            if "error" in existing.data.tags:  # that of its last end
                client.delete_tag(self.run_id, "error")
        if self._started.experiment.tracking.system_metrics and self._monitor is None:
            self._monitor = _start_monitor(self.run_id, self._uri, resumed=bool(existing))
        return client

    def _log_params(self, client: MlflowClient, recorded: Mapping[str, str]) -> None:
        """Log the settings; one that differs from what is recorded becomes a tag, since MLflow changes no parameter."""
        mlflow = quiet_mlflow()
        params = entries.run_params(self._started.experiment)
        new = [mlflow.entities.Param(key, value) for key, value in params.items() if key not in recorded]
        for chunk in mlflow.utils.chunk_list(new, 100):  # MLflow takes no more in one call
            client.log_batch(self.run_id, params=chunk)

        for key in params.keys() & recorded.keys():
            if params[key] != recorded[key]:
                client.set_tag(self.run_id, f"resumed.{key}", params[key])

    def _run_of_another_folder(self, client: MlflowClient) -> Any:
        """Return the run whose checkpoints this one continues from in a new folder; None if there is none."""
        experiment = self._started.experiment
        if not self._started.first_round or experiment.checkpoint.location is None:
            return None

        home = experiment_id(client, experiment, self._uri)
        # The URI may end in a query, after the checkpoint's name.
        prefix = join(without_password(absolute(checkpoints_of(experiment, self.run_dir))), "").partition("?")[0]
        pattern = prefix.replace("'", "_")  # which stands for any character
        for run in client.search_runs([home], f"tags.checkpoint LIKE '{pattern}%'"):
            if run.data.tags["checkpoint"].startswith(prefix):
                keep_run_id(client, Path(self.run_dir), run.info.run_id)
                return run
        return None

    def _create_run(self, client: MlflowClient) -> Any:
        experiment = self._started.experiment
        home = experiment_id(client, experiment, self._uri)
        tags = {**context_tags(), **entries.run_tags(self._started), **self._tags, **self._parent_tags(client, home)}
        run = client.create_run(home, self._start_time, tags, self._name())
        run_id: str = run.info.run_id
        keep_run_id(client, Path(self.run_dir), run_id)

        client.set_tag(run_id, NOTE, entries.run_description(self._started, run_id, self._uri))
        client.log_text(run_id, without_password(experiment.to_yaml()), "experiment.yaml")
        client.log_inputs(run_id, datasets=[self._dataset()])
        return run

    def _name(self, score: str = "") -> str:
        """Join the experiment's name, unless the parent has it, :func:`entries.run_name`, and settings that differ.

        A study's cell is named by its place in the table instead.
        """
        experiment = self._started.experiment
        settings = self._tags.get("settings", "")
        if "cell" in self._tags:
            parts = [self._tags["cell"], score, settings]
        else:
            parts = ["" if self._comparison else f"{experiment.name}:", entries.run_name(experiment, score, settings)]
        return entries.short_name(" ".join(filter(None, parts)))

    def _dataset(self) -> Any:
        from mlflow.entities import Dataset, DatasetInput

        data = self._started.experiment.data
        digest = str(self._started.metadata.get("data", ""))[:36]
        return DatasetInput(Dataset(data.name, digest, "local", str(data.root or "")))

    def _parent_tags(self, client: MlflowClient, home: str) -> dict[str, str]:
        if self._comparison is None:
            return {}
        return self._comparison.parent_tags(client, home, self._start_time, self._dataset())

    def _continue(self, client: MlflowClient, existing: Any) -> None:
        """Find out what is already recorded, and put the run below its parent unless it has one."""

        def last_step(metric: str) -> int:
            return max((point.step for point in client.get_metric_history(self.run_id, metric)), default=-1)

        self._last_round = last_step("clients")
        primary = self._started.experiment.measures.primary.name
        evaluated_metric = next((key for key in existing.data.metrics if key.startswith(f"{primary}/")), None)
        self._last_evaluation = last_step(evaluated_metric) if evaluated_metric else -1

        if self._comparison:
            self._comparison.adopt_parent(client, existing.data.tags)
        tags = self._parent_tags(client, existing.info.experiment_id)
        if PARENT not in existing.data.tags:
            for key, value in tags.items():
                client.set_tag(self.run_id, key, value)

    def _record(self, client: MlflowClient, pending: Sequence[tuple[Event, int]]) -> None:
        mlflow = quiet_mlflow()
        unrecorded = [(event, timestamp) for event, timestamp in pending if self._is_unrecorded(event)]
        metrics = []
        for event, timestamp in unrecorded:
            for key, value, step in _points(event):
                metrics.append(mlflow.entities.Metric(key, value, timestamp, step))
        for chunk in mlflow.utils.chunk_list(metrics, 1000):  # MLflow takes no more in one call
            client.log_batch(self.run_id, metrics=chunk)

        for event, timestamp in unrecorded:
            if isinstance(event, RoundFinished):
                self._log_images(client, event, timestamp)

        evaluations = [event for event, _ in pending if isinstance(event, Evaluated)]
        if evaluations:
            self._show_score(client, evaluations[-1].summary)

        checkpoints = [event.location for event, _ in pending if isinstance(event, Checkpointed)]
        if checkpoints:
            client.set_tag(self.run_id, "checkpoint", without_password(checkpoints[-1]))

    def _show_score(self, client: MlflowClient, summary: Sequence[Mapping[str, Any]]) -> None:
        """Put the score into the run's name: MLflow's page shows no metric by itself, but every name."""
        # A sweep compares its trials on validation data; by test scores in their names, readers would choose, too.
        validated = [row for row in summary if row["protocol"] == "val"]
        if "sweep" in self._tags and validated:
            summary = validated
        if summary:
            client.update_run(self.run_id, name=self._name(entries.run_score(self._started.experiment, summary)))

    def _is_unrecorded(self, event: Event) -> bool:
        # After a kill, rounds since the last checkpoint come again, equal: those that are recorded are skipped.
        if isinstance(event, RoundFinished):
            return event.round > self._last_round
        return isinstance(event, Evaluated) and event.round > self._last_evaluation

    def _log_images(self, client: MlflowClient, event: RoundFinished, timestamp: int) -> None:
        from PIL import Image

        for name, png in event.logged.images.items():
            with Image.open(io.BytesIO(png)) as image:
                client.log_image(self.run_id, image, key=name, step=event.round, timestamp=timestamp)

    def _finish(self, client: MlflowClient, finished: RunFinished, end_time: int) -> None:
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

        if "evaluations" in finished.tables:
            experiment = self._started.experiment
            evaluations = finished.tables["evaluations"]
            self._show_score(client, mean_summary(experiment, evaluations, counted_rounds(experiment, evaluations)))
        if "logged" in finished.tables:
            self._log_before_first_round(client, finished.tables["logged"].to_pylist())
        self._log_analyses(client)
        if finished.status == "finished" and self._started.experiment.tracking.models_mb:
            log_models(client, self.run_id, self.run_dir, self._warn)
        client.set_terminated(self.run_id, STATUS[finished.status], end_time=end_time)

    def _log_before_first_round(self, client: MlflowClient, logged: list[dict[str, Any]]) -> None:
        """Log numbers from before the first round, which no event has."""
        from mlflow.entities import Metric

        # With the same timestamp, a resumed run adds no second entry.
        start_time = client.get_run(self.run_id).info.start_time
        rows = [row for row in logged if row["round"] == 0]
        metrics = [Metric(f"method/{row['name']}", row["value"], start_time, 0) for row in rows]
        client.log_batch(self.run_id, metrics=metrics)

    def _log_analyses(self, client: MlflowClient) -> None:
        """Log the files of analyses, except those of single clients."""
        for analysis in self._started.experiment.analyses:
            for file in sorted(analysis_folder(self.run_dir, analysis).rglob("*")):
                if file.is_file() and not file.name.startswith("client-"):
                    client.log_artifact(self.run_id, str(file), str(file.parent.relative_to(self.run_dir)))


def _points(event: Event) -> Iterator[entries.Point]:
    """Yield the metrics of an evaluation or a round."""
    if isinstance(event, Evaluated):
        yield from entries.evaluation_points(event)
    elif isinstance(event, RoundFinished):
        yield from entries.round_points(event)


def _start_monitor(run_id: str, uri: str, resumed: bool) -> SystemMetricsMonitor:
    """Start MLflow's monitor of this machine, and return it."""
    # Here, since its import is slow.
    from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

    monitor = SystemMetricsMonitor(run_id, resume_logging=resumed, tracking_uri=uri)
    monitor.start()
    return monitor


def _now() -> int:
    """Return the time in milliseconds, as MLflow counts it."""
    return int(time.time() * 1000)
