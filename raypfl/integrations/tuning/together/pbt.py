"""PBT for trials that advance together: in generations, after each of which Ray Tune's scheduler decides.

All trials pause after the same round. So the decisions do not depend on the number of processes, and a sweep that was
interrupted makes those that it would have made.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from raypfl.common.errors import ConfigError, Stopped
from raypfl.common.files import append_line
from raypfl.common.stopping import StopRequest
from raypfl.engine.events import Evaluated, Event, RunFinished, RunStarted
from raypfl.integrations.tuning.sweep import Sweep
from raypfl.integrations.tuning.together.trials import Trials, TrialsListener, experiment_in_process
from raypfl.integrations.tuning.trial import (
    Trial,
    TrialListener,
    extend_schedule,
    metric_values,
    run_folder,
    schedule_of,
)
from raypfl.runs import driver
from raypfl.runs.records import SUMMARY, is_finished, newest, recorded_end
from raypfl.runs.result import RunResult
from raypfl.runs.resuming import branch
from raypfl.runs.several.worker import FAILED, RunOutcome

GENERATIONS = "generations.jsonl"
"""The file in a sweep's folder with the decisions: a :class:`Generation` that is over on each line."""


@dataclass(frozen=True)
class Copy:
    """What a trial continues with: the checkpoint of another one, its `source`, and a configuration, `drawn`."""

    source: str
    drawn: dict[str, Any]


@dataclass(frozen=True)
class Generation:
    """The end of a generation.

    Attributes
    ----------
    round : the round after which its trials were compared.
    values : the values of the metric, by the names of the trials.
    copies : what trials continue with, by their names; the others continue as they are.
    """

    round: int
    values: Mapping[str, float]
    copies: Mapping[str, Copy]

    @classmethod
    def from_record(cls, round: int, values: dict[str, float], copies: dict[str, dict[str, Any]]) -> Generation:
        """Return the generation of a line of `GENERATIONS`."""
        return cls(round, values, {trial: Copy(**record) for trial, record in copies.items()})


Decide = Callable[[int, Mapping[str, Mapping[str, Any]], Mapping[str, float]], Mapping[str, Copy]]
"""A function of a round, and of the configurations and the values of trials after it; it returns the copies."""


def run_population(
    sweep: Sweep,
    draws: Mapping[str, dict[str, Any]],
    folder: Path,
    hear: TrialListener,
    show: TrialsListener,
    decide: Decide,
) -> list[Trial]:
    """Carry out what is left of all trials; the other parameters are those of :func:`.trials.run_trials`."""
    population = _Population(sweep, draws, folder)
    end = population.restore()
    without_pauses = WithoutPauses(hear)
    trials = Trials(sweep, population.trials, folder, without_pauses, show)
    outcomes: dict[int, RunOutcome] = {}

    def has_failed(trial: Trial) -> bool:
        number = population.trials.index(trial)
        return number in outcomes and outcomes[number].status == FAILED

    def is_over(trial: Trial, round: int) -> bool:
        return has_failed(trial) or population.is_paused(trial, round)

    with driver.session(sweep.base) if population.unfinished() else contextlib.nullcontext():
        while True:
            end += sweep.base.evaluation.every
            outcomes |= trials.carry_out(early_end=_pauses_after(end), is_over=partial(is_over, round=end))

            going = [trial for trial in population.unfinished() if not has_failed(trial)]
            paused = [trial for trial in going if population.is_paused(trial, end)]
            # The others were interrupted.
            if not paused or len(paused) < len(going):
                break
            with StopRequest().listening() as stop:
                population.end_generation(end, paused, decide)
            if stop.received:
                break
    without_pauses.pass_on_ends()
    return trials.concluded(outcomes)


class _Population:
    """The trials of a sweep with PBT, as their folders show them.

    Attributes
    ----------
    trials : all trials, in order; the configurations are those with which they continue.
    """

    def __init__(self, sweep: Sweep, draws: Mapping[str, dict[str, Any]], folder: Path):
        self.trials = [Trial(name, configuration) for name, configuration in draws.items()]
        self._by_name = {trial.name: trial for trial in self.trials}
        self._sweep = sweep
        self._folder = folder
        self._file = folder / GENERATIONS

    def _run(self, trial: Trial) -> Path:
        return run_folder(self._sweep, self._folder, trial.name, 0)

    def unfinished(self) -> list[Trial]:
        """Return the trials that have further rounds."""
        return [trial for trial in self.trials if not is_finished(self._run(trial))]

    def is_paused(self, trial: Trial, round: int) -> bool:
        """Whether a trial's folder has its results as of a pause after a round."""
        run = self._run(trial)
        if not (run / SUMMARY).exists() or recorded_end(run)["round"] != round:
            return False
        # A run may have been stopped before its evaluation.
        return RunResult.load(run).last_rounds[-1:] == [round]

    def restore(self) -> int:
        """Go on from the recorded generations; return the round after which the last one ended."""
        text = self._file.read_text() if self._file.exists() else ""
        end = 0
        for line in text.splitlines():
            try:
                generation = Generation.from_record(**json.loads(line))
            except ValueError:  # a line that was cut off
                continue
            self._make_copies(generation)
            end = generation.round
        return end

    def end_generation(self, round: int, paused: list[Trial], decide: Decide) -> None:
        """Compare trials that have paused after a round, record the decision, and carry it out."""
        values: dict[str, float] = {}
        for trial in paused:
            result = RunResult.load(self._run(trial))
            # A metric that the run does not have is an error of the trial at its end.
            with contextlib.suppress(ConfigError):
                (values[trial.name],) = metric_values(self._sweep, result.experiment, result.summary(round)).values()

        configurations = {trial.name: trial.drawn for trial in paused}
        generation = Generation(round, values, decide(round, configurations, values))
        append_line(self._file, json.dumps(asdict(generation)))
        self._make_copies(generation)

    def _make_copies(self, generation: Generation) -> None:
        """Carry out what is left of a decision. No source is a copy, so the order is of no importance."""
        for name, copy in generation.copies.items():
            trial = self._by_name[name]
            trial.drawn = copy.drawn
            run = self._run(trial)
            schedule = schedule_of(run)
            # A copy ends with its schedule.
            if schedule and schedule[-1]["after"] >= generation.round:
                continue

            source = self._by_name[copy.source]
            branch(self._run(source), generation.round, run, experiment_in_process(self._sweep, trial))
            before = schedule_of(self._run(source)) or [{"after": 0, "drawn": source.drawn}]
            extend_schedule(run, generation.round, trial.drawn, before)


class Pause:
    """Ends a run, in its process, after the evaluation of a round, unless that is the run's last one.

    Attributes
    ----------
    has_ended_run : whether it has ended the run.
    """

    def __init__(self, round: int):
        self._round = round
        self._rounds = 0
        self.has_ended_run = False

    def __call__(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self._rounds = event.experiment.rounds
            # A kill may have come between the last checkpoint and the end of the run.
            if event.first_round == self._round < self._rounds and _evaluated(event.run_dir) == self._round:
                self._end_run()
        elif isinstance(event, Evaluated) and event.round == self._round < self._rounds:
            self._end_run()

    def _end_run(self) -> None:
        self.has_ended_run = True
        raise Stopped("The trial waits for the others.")


def _pauses_after(round: int) -> Callable[[Trial], Pause]:
    return lambda trial: Pause(round)


def _evaluated(run_dir: str) -> int:
    """Return the last round that had been evaluated at a run's newest checkpoint."""
    _, snapshot = newest(run_dir, whole=False)
    return int(snapshot.meta["evaluated"])


class WithoutPauses:
    """Passes events on, but no pause: of the end of a run and its next start, both or neither.

    They are passed on if the run then continues from another one's checkpoint.
    """

    def __init__(self, hear: TrialListener):
        self._hear = hear
        self._ends: dict[tuple[str, int], RunFinished] = {}

    def __call__(self, trial: str, seed: int, event: Event) -> None:
        if isinstance(event, RunFinished) and event.status == "stopped":
            self._ends[trial, seed] = event
            return
        if isinstance(event, RunStarted):
            end = self._ends.pop((trial, seed), None)
            is_copy = event.metadata.get("parent", {}).get("round") == event.first_round
            if end is not None and not is_copy:
                return
            if end is not None:
                self._hear(trial, seed, end)
        self._hear(trial, seed, event)

    def pass_on_ends(self) -> None:
        """Pass on the ends of runs that were interrupted."""
        for (trial, seed), end in self._ends.items():
            self._hear(trial, seed, end)
