"""ASHA for trials that advance together: Ray Tune's scheduler, which gets their reports from a file."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from raypfl.common.errors import Stopped
from raypfl.common.files import append_line, locked
from raypfl.engine.events import Evaluated, Event, RunStarted
from raypfl.experiment import Experiment
from raypfl.integrations.tuning.sweep import Sweep
from raypfl.integrations.tuning.trial import metric_values

REPORTS = "reports.jsonl"
"""The file in a sweep's folder with the reports of its trials, one a line, in the order of the decisions."""


class Asha:
    """Decides which trials go on.

    Every process has its own copy, and tells its scheduler of all reports in the order of the file. So all processes
    decide alike, and so does a sweep that continues.

    Parameters
    ----------
    file : the file of reports; it need not exist.
    scheduler : Ray Tune's ``AsyncHyperBandScheduler``, which knows of no trial yet.
    metric : the name of the metric that the scheduler compares.
    trials : the names of all trials.
    """

    def __init__(self, file: Path, scheduler: Any, metric: str, trials: Iterable[str]):
        self._file = file
        self._scheduler = scheduler
        self._metric = metric
        self._bytes_read = 0
        self._decisions: dict[tuple[str, int], bool] = {}
        self._stopped: dict[str, int] = {}
        for trial in trials:
            # Of a trial, the scheduler reads its id only, and nothing of Tune's controller.
            scheduler.on_trial_add(None, SimpleNamespace(trial_id=trial))

    def goes_on(self, trial: str, round: int, value: float, is_last: bool) -> bool:
        """Report an evaluation; return whether the trial goes on. The first report of a round counts.

        is_last : whether the trial has no further round, so that there is nothing to decide.
        """
        report = {"trial": trial, "round": round, "value": value, "is_last": is_last}
        with locked(self._file):
            self._read()
            if (trial, round) not in self._decisions:
                append_line(self._file, json.dumps(report))
                self._read()
        return self._decisions[trial, round]

    def stopped_after(self, trial: str) -> int | None:
        """Return the round after which a trial was stopped; None if it was not."""
        self._read()
        return self._stopped.get(trial)

    def _read(self) -> None:
        """Tell the scheduler of the reports that the file has got since the last time."""
        if not self._file.exists():
            return
        with self._file.open("rb") as file:
            file.seek(self._bytes_read)
            whole_lines, line_break, _ = file.read().rpartition(b"\n")
        self._bytes_read += len(whole_lines + line_break)

        for line in whole_lines.splitlines():
            try:
                report = json.loads(line)
            except ValueError:  # a line that was cut off
                continue
            self._decide(**report)

    def _decide(self, trial: str, round: int, value: float, is_last: bool) -> None:
        """Do what Tune's controller does with a report."""
        tune_trial = SimpleNamespace(trial_id=trial)
        result = {"round": round, self._metric: value}
        goes_on = is_last or self._scheduler.on_trial_result(None, tune_trial, result) == self._scheduler.CONTINUE
        if is_last or not goes_on:
            self._scheduler.on_trial_complete(None, tune_trial, result)
        if not goes_on:
            self._stopped[trial] = round
        self._decisions[trial, round] = goes_on


class AshaListener:
    """Reports the evaluations of a run, in its process, and ends the run if its trial is stopped.

    Attributes
    ----------
    has_ended_run : whether it has ended the run.
    """

    def __init__(self, asha: Asha, sweep: Sweep, trial: str):
        self._asha = asha
        self._sweep = sweep
        self._trial = trial
        self._experiment: Experiment | None = None
        self.has_ended_run = False

    def __call__(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self._experiment = event.experiment
            # A kill may have come between the decision and the end of the run.
            stopped = self._asha.stopped_after(self._trial)
            if stopped is not None and event.first_round >= stopped:
                self._end_run()
        # Before the first round, there is nothing to compare.
        elif isinstance(event, Evaluated) and event.round > 0:
            self._report(event)

    def _report(self, event: Evaluated) -> None:
        assert self._experiment is not None, "a run begins before it is evaluated"
        (value,) = metric_values(self._sweep, self._experiment, event.summary).values()
        is_last = event.round >= self._experiment.rounds
        if not self._asha.goes_on(self._trial, event.round, value, is_last):
            self._end_run()

    def _end_run(self) -> None:
        self.has_ended_run = True
        raise Stopped("ASHA stopped the trial.")
