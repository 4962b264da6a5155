"""A listener that records runs in MLflow in the background, and that never stops one."""

from __future__ import annotations

import contextlib
import copy
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

from raypfl.common.errors import NoRun, RaypflError, Stopped
from raypfl.engine.events import Event, RunStarted
from raypfl.experiment import Experiment
from raypfl.integrations.tracking import entries
from raypfl.integrations.tracking.comparison_run import ComparisonRun
from raypfl.integrations.tracking.connection import how_to_view
from raypfl.integrations.tracking.run import NOTE, STATUS, RunRecord
from raypfl.results.labels import differing_settings
from raypfl.results.run_groups import compared
from raypfl.runs import folders
from raypfl.runs.records import SWEEP
from raypfl.runs.replay import events_of, tracked
from raypfl.runs.result import RunResult

if TYPE_CHECKING:
    from mlflow import MlflowClient


class MLflowListener:
    """Records parameters, metrics per round, tags, tables and models of every run whose events it gets.

    It records in the background: a slow tracking server delays a run only at its end, which waits for the rest.
    What MLflow refuses is tried again with the next event, and a warning says so once per run. A resumed run continues
    in its MLflow run, whose id is in the run's folder.

    Parameters
    ----------
    comparison : the name of a parent run, below which all runs are put; None: each is on its own. With a name, the
        listener is a context manager: at its end the parent gets the results of all runs.
    tags : your own tags, for every run.
    warn : a function that is called with a sentence, from another thread, when recording fails; None: a log message.
    kept_in : a folder for the parent's id, so that an interrupted comparison continues below the same parent.
    about : what the runs are, in a few words, for the parent's name; by default that has the methods' scores.

    Examples
    --------
    ``raypfl.run(experiment, listeners=[MLflowListener()])`` or, for several runs, ::

        with MLflowListener("lambdas") as tracked:
            for lam in (0.1, 1.0):
                raypfl.run(experiment.override([f"method.lam={lam}"]), listeners=[tracked])
    """

    def __init__(
        self,
        comparison: str | None = None,
        *,
        tags: Mapping[str, str] | None = None,
        warn: Callable[[str], None] | None = None,
        kept_in: str | Path | None = None,
        about: str = "",
    ):
        self._tags = dict(tags or {})
        self._warn = warn or logging.getLogger("raypfl").warning
        folder = None if kept_in is None else Path(kept_in)
        self._comparison = ComparisonRun(comparison, self._tags, folder, about) if comparison else None
        self._description = ""
        self._metrics: dict[str, float] = {}
        self._scores = ""
        self._final_status = ""
        self._records: list[RunRecord] = []
        self._current: RunRecord | None = None

    def __call__(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self._current = None
            if event.experiment.tracking.mlflow:
                self._current = RunRecord(event, self._comparison, self._tags, self._warn)
                self._records.append(self._current)
        elif self._current:
            self._current.put(event)

    def for_each(self, experiments: Sequence[Experiment]) -> list[MLflowListener]:
        """Return a listener for each run of a comparison; a run's name has the settings in which the runs differ."""
        return [self.beside({"settings": text} if text else {}) for text in differing_settings(experiments)]

    def beside(self, tags: Mapping[str, str] | None = None) -> MLflowListener:
        """Return a listener for another run of the comparison at the same time; each follows one run at a time.

        Parameters
        ----------
        tags : tags for that run alone.
        """
        other = copy.copy(self)  # with the same list of records
        other._current = None
        other._tags = {**self._tags, **(tags or {})}
        return other

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        record = next((record for record in self._records if record.client), None)
        if self._comparison and self._comparison.run_id and record:
            record.attempt(self._finish_parent, self._comparison.run_id, kind)

    @property
    def experiment_id(self) -> str:
        """The MLflow experiment in which the runs are; empty: none has been recorded."""
        return next((record.experiment_id for record in self._records if record.client), "")

    def describe(self, description: str, metrics: Mapping[str, float] | None = None, scores: str = "") -> None:
        """Set the comparison's description, as Markdown, and its metrics; by default they are those of its runs.

        Parameters
        ----------
        scores : the scores of its methods, which are added to its name.
        """
        self._description = description
        self._metrics = dict(metrics or {})
        self._scores = scores

    def conclude(self, status: Literal["finished", "stopped", "failed"]) -> None:
        """Set how the comparison ended, such as a sweep that succeeded although its scheduler stopped some runs.

        By default this follows from its runs: stopped if one was stopped, else failed if one failed. An exception that
        ends the context still counts.
        """
        self._final_status = status

    def attach(self, file: str | Path) -> None:
        """Add a file, such as a picture, to the artifacts of the comparison or, without one, to those of every run."""
        for record in self._records:
            run_id = self._comparison.run_id if self._comparison else record.run_id
            if run_id and record.client:
                record.attempt(lambda client, run_id=run_id: client.log_artifact(run_id, str(file)))
            if self._comparison and run_id:
                return

    def _describe_runs(self) -> None:
        """Describe the comparison by the table of its runs."""
        results = []
        for record in self._latest():
            # If the process is being stopped, the run may not have written its results.
            with contextlib.suppress(NoRun):
                results.append(RunResult.load(record.run_dir))

        evaluated = compared(results)
        if evaluated:
            metrics = entries.comparison_metrics(evaluated)
            self.describe(entries.comparison_description(evaluated), metrics, entries.comparison_scores(evaluated))

    def _finish_parent(self, client: MlflowClient, parent: str, kind: type[BaseException] | None) -> None:
        from mlflow.entities import Metric

        if not self._description:
            self._describe_runs()

        if self._description:
            client.set_tag(parent, NOTE, entries.shortened(self._description))
        now = int(time.time() * 1000)
        metrics = [Metric(name, value, now, 0) for name, value in self._metrics.items()]
        # When a comparison goes on, another method may be best, which has no difference. MLflow deletes no metric.
        kinds = {name.partition("/")[0] for name in self._metrics}
        for name in client.get_run(parent).data.metrics:
            if name.partition("/")[0] in kinds and name not in self._metrics:
                metrics.append(Metric(name, nan, now, 0))
        # MLflow takes at most 1,000 metrics in a call.
        for start in range(0, len(metrics), 1000):
            client.log_batch(parent, metrics[start : start + 1000])
        if self._scores and self._comparison and not self._comparison.about:
            client.update_run(parent, name=entries.short_name(f"{self._comparison.name}: {self._scores}"))
        client.set_terminated(parent, STATUS[self._status(kind)])

    def _status(self, kind: type[BaseException] | None) -> str:
        if kind is not None:
            return "stopped" if issubclass(kind, KeyboardInterrupt | Stopped) else "failed"
        if self._final_status:
            return self._final_status
        statuses = [record.status for record in self._latest()]
        return next((status for status in ("stopped", "diverged", "failed") if status in statuses), "finished")

    def _latest(self) -> list[RunRecord]:
        """Return the record of each run: the last one, if it was paused and continued."""
        return list({record.run_dir: record for record in self._records}.values())


def track(run_dir: str | Path, uri: str | None = None) -> str:
    """Record a finished run or comparison from its folder, except what MLflow already has; return where to see it.

    Parameters
    ----------
    uri : the tracking URI; None: that in the run's settings.

    Raises
    ------
    RaypflError : if MLflow does not take all of it, or the folder holds no run that is over.
    """
    sweep = Path(run_dir, SWEEP)
    if sweep.exists():
        raise NoRun(
            f"{run_dir} is a sweep, not a run. `raypfl tune {sweep}` repeats no trial that has finished, and records "
            "those of its runs that MLflow lacks below their parent, unless the sweep has tracking.mlflow=false. To "
            f"record runs without a parent, name their folders, which are in {Path(run_dir, 'trials')}."
        )

    problems: list[str] = []
    comparison = folders.ComparisonFolder.load(run_dir)
    results = [RunResult.load(folder) for folder in (comparison.folders if comparison else [run_dir])]
    name = results[0].experiment.name if comparison else None

    with MLflowListener(name, warn=problems.append, kept_in=run_dir if comparison else None) as listener:
        listeners = listener.for_each([result.experiment for result in results])
        for result, listener_of_run in zip(results, listeners, strict=True):
            for event in events_of(result, uri):
                listener_of_run(event)
        for picture in sorted(Path(run_dir).glob("picture*.png")):
            listener.attach(picture)

    if problems:
        raise RaypflError("\n".join(problems))
    return how_to_view(tracked(results[0].experiment, uri), listener.experiment_id)
