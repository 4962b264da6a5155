"""Sweeps whose trials need nothing of each other, without Ray Tune: trials that differ in numbers advance together."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from raypfl.common.errors import ConfigError
from raypfl.engine.backends.cluster import bundle, client_resources, in_one_process
from raypfl.engine.backends.shared_folder import refuse_unless_shared
from raypfl.engine.events import Evaluated, Event, Progress, RunFinished, RunStarted
from raypfl.experiment import Experiment
from raypfl.integrations.tuning.sweep import Stop, Sweep
from raypfl.integrations.tuning.trial import Trial, TrialListener, last_sentence, metric_values, run_folder
from raypfl.runs.result import RunResult, is_finished
from raypfl.runs.several.processes import run_in_this_process, run_on_cluster
from raypfl.runs.several.worker import FAILED, FINISHED, STOPPED, PlannedRun, RunOutcome

TrialsListener = Callable[[list[Trial]], None]
"""A function of all trials so far."""


def suits(sweep: Sweep, first: Experiment) -> bool:
    """Whether no trial depends on another, and the sweep asks for nothing that only Ray Tune does.

    Parameters
    ----------
    first : the experiment of a first configuration.
    """
    is_drawn = sweep.searcher.name == "random" and sweep.scheduler.name == "none"
    needs_tune = sweep.stop != Stop() or sweep.concurrent is not None or sweep.tensorboard
    return is_drawn and not needs_tune and first.ray.actors is None


def run_trials(
    sweep: Sweep, draws: Mapping[str, dict[str, Any]], folder: Path, hear: TrialListener, show: TrialsListener
) -> list[Trial]:
    """Carry out what is left of all trials, as Ray tasks or, with ``engine.backend=inline``, in this process.

    Finished runs are not repeated, and the others continue from their checkpoints.

    Parameters
    ----------
    draws : the configuration of each trial, by name.
    folder : the sweep's folder.
    hear, show : as in :func:`raypfl.integrations.tuning.search.search`.
    """
    trials = _Trials(sweep, [Trial(name, drawn) for name, drawn in draws.items()], folder, hear, show)
    outcomes: dict[int, RunOutcome] = {}
    planned: dict[int, PlannedRun] = {}
    for number, run in enumerate(trials.runs()):
        if is_finished(run.folder):
            outcomes[number] = RunOutcome(FINISHED)
        else:
            planned[number] = run

    def prepare(ray: Any) -> None:
        reserved = bundle(client_resources(in_one_process(sweep.base.ray)))
        refuse_unless_shared(ray, folder, [reserved], "This sweep")
        sweep.write(folder)

    if sweep.base.engine.backend == "inline":
        sweep.write(folder)
        outcomes |= run_in_this_process(planned, trials.listen)
    elif planned:
        outcomes |= run_on_cluster(planned, trials.listen, prepare)
    return trials.concluded(outcomes)


class _Trials:
    """The trials of a sweep, and what their runs have told so far.

    The runs are numbered: those of the first trial, one for each seed, then those of the second one, and so on.
    """

    def __init__(self, sweep: Sweep, trials: list[Trial], folder: Path, hear: TrialListener, show: TrialsListener):
        self._trials = trials
        self._sweep = sweep
        self._folder = folder
        self._hear = hear
        self._show = show

        # By the numbers of runs: experiments of those that have begun, metrics of those that were evaluated.
        self._experiments: dict[int, Experiment] = {}
        self._values: dict[int, dict[str, float]] = {}

    def runs(self) -> list[PlannedRun]:
        """Return the runs of all trials, in the order of their numbers."""
        runs = []
        for trial in self._trials:
            for seed in range(self._sweep.seeds):
                experiment = self._sweep.configured(trial.drawn, seed)
                # All of a run is in one process. No scheduler needs a checkpoint of each evaluation.
                experiment = experiment.override(["engine.backend=inline"])
                experiment = experiment.replace(checkpoint=self._sweep.described.checkpoint)
                runs.append(PlannedRun(run_folder(self._sweep, self._folder, trial.name, seed), experiment))
        return runs

    def listen(self, number: int, event: Event) -> None:
        """Pass an event of a run on, and update its trial."""
        if isinstance(event, Progress):
            return
        position, seed = divmod(number, self._sweep.seeds)
        trial = self._trials[position]
        self._hear(trial.name, seed, event)

        if isinstance(event, RunStarted):
            self._experiments[number] = event.experiment
            trial.status = "running"
        elif isinstance(event, Evaluated):
            # A metric that the run does not have is an error of the trial at its end.
            with contextlib.suppress(ConfigError):
                self._values[number] = metric_values(self._sweep, self._experiments[number], event.summary)
            self._update_values(position, event.round)
        elif isinstance(event, RunFinished) and self._sweep.seeds == 1 and event.status != "stopped":
            trial.status = event.status
            trial.error = event.error or ""
        else:
            return
        self._show(self._trials)

    def _numbers(self, position: int) -> range:
        return range(position * self._sweep.seeds, (position + 1) * self._sweep.seeds)

    def _update_values(self, position: int, round: int) -> None:
        """Set a trial's values to the means over its seeds, once all have been evaluated."""
        by_seed = [self._values[number] for number in self._numbers(position) if number in self._values]
        if len(by_seed) == self._sweep.seeds:
            self._trials[position].round = round
            self._trials[position].values = _means(by_seed)

    def concluded(self, outcomes: Mapping[int, RunOutcome]) -> list[Trial]:
        """Return the trials as their runs have ended; a run without an outcome has not begun."""
        for position, trial in enumerate(self._trials):
            self._conclude(trial, [outcomes.get(number, RunOutcome(STOPPED)) for number in self._numbers(position)])
        self._show(self._trials)
        return self._trials

    def _conclude(self, trial: Trial, outcomes: Sequence[RunOutcome]) -> None:
        errors = [str(outcome.error) for outcome in outcomes if outcome.status == FAILED]
        if errors:
            trial.status = "failed"
            trial.error = last_sentence(errors[0])
        elif any(outcome.status == STOPPED for outcome in outcomes):
            trial.status = "waiting"
        else:
            self._finish(trial)

    def _finish(self, trial: Trial) -> None:
        """Take a trial's values from its folder, where also those of earlier sessions are."""
        seeds = range(self._sweep.seeds)
        results = [RunResult.load(run_folder(self._sweep, self._folder, trial.name, seed)) for seed in seeds]
        try:
            by_seed = [metric_values(self._sweep, result.experiment, result.summary()) for result in results]
            trial.values = _means(by_seed)
            trial.round = results[0].round
            trial.status = "finished"
        except ConfigError as error:
            trial.status = "failed"
            trial.error = str(error)


def _means(values: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: sum(of_run[name] for of_run in values) / len(values) for name in values[0]}
