"""Sweeps without Ray Tune's own processes: which suit, and how their trials are carried out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from raypfl.common.errors import ConfigError, Diverged
from raypfl.engine.backends.cluster import bundle, client_resources, in_one_process
from raypfl.engine.backends.shared_folder import refuse_unless_shared
from raypfl.engine.events import Evaluated, Event, Progress, RunFinished, RunStarted
from raypfl.experiment import Experiment
from raypfl.integrations.tuning.sweep import Stop, Sweep
from raypfl.integrations.tuning.together.asha import Asha, AshaListener
from raypfl.integrations.tuning.trial import Trial, TrialListener, last_sentence, metric_values, run_folder
from raypfl.runs.records import SUMMARY, divergence, is_finished, recorded_end
from raypfl.runs.result import RunResult
from raypfl.runs.several.processes import run_in_this_process, run_on_cluster
from raypfl.runs.several.worker import FAILED, FINISHED, STOPPED, EarlyEnd, PlannedRun, RunOutcome
from raypfl.runs.together import paying_parts

TrialsListener = Callable[[list[Trial]], None]
"""A function of all trials so far."""


def suits(sweep: Sweep, first: Experiment) -> bool:
    """Whether a sweep asks for nothing that only Ray Tune does.

    Parameters
    ----------
    first : the experiment of a first configuration.
    """
    # With several brackets, ASHA draws one for each trial; and of a run that ends by itself it is told in another way.
    scheduler = sweep.scheduler
    has_fitting_scheduler = {
        "none": True,
        "asha": not scheduler.options and first.evaluation.patience is None,
        # Trials that do not wait for each other are compared as they come.
        "pbt": scheduler.options.get("synch", True) and first.evaluation.patience is None,
    }.get(scheduler.name, False)
    needs_tune = sweep.stop != Stop() or sweep.concurrent is not None or sweep.tensorboard
    is_drawn = sweep.searcher.name == "random"
    return bool(has_fitting_scheduler) and is_drawn and not needs_tune and first.ray.actors is None


def advance_together(sweep: Sweep, draws: Mapping[str, dict[str, Any]]) -> bool:
    """Whether there are trials that are expected to gain from advancing together."""
    experiments = {number: sweep.configured(configuration) for number, configuration in enumerate(draws.values())}
    return any(len(part) > 1 for part in paying_parts(experiments))


def run_trials(
    sweep: Sweep,
    draws: Mapping[str, dict[str, Any]],
    folder: Path,
    hear: TrialListener,
    show: TrialsListener,
    asha: Asha | None = None,
) -> list[Trial]:
    """Carry out what is left of all trials, as Ray tasks or, with ``engine.backend=inline``, in this process.

    Finished runs are not repeated, and the others continue from their checkpoints.

    Parameters
    ----------
    draws : the configuration of each trial, by name.
    folder : the sweep's folder.
    hear, show : as in :func:`raypfl.integrations.tuning.search.search`.
    asha : what stops trials; None: all of them are carried out to their ends.
    """
    named = [Trial(name, configuration) for name, configuration in draws.items()]
    trials = Trials(sweep, named, folder, hear, show, asha)

    def early_end(trial: Trial) -> EarlyEnd | None:
        return None if asha is None else AshaListener(asha, sweep, trial.name)

    return trials.concluded(trials.carry_out(early_end, trials.is_stopped))


class Trials:
    """The trials of a sweep, and what their runs have told so far.

    The runs are numbered: those of the first trial, one for each seed, then those of the second one, and so on.
    """

    def __init__(
        self,
        sweep: Sweep,
        trials: list[Trial],
        folder: Path,
        hear: TrialListener,
        show: TrialsListener,
        asha: Asha | None = None,
    ):
        self._trials = trials
        self._sweep = sweep
        self._folder = folder
        self._hear = hear
        self._show = show
        self._asha = asha

        # By the numbers of runs: experiments of those that have begun, metrics of those that were evaluated.
        self._experiments: dict[int, Experiment] = {}
        self._values: dict[int, dict[str, float]] = {}

    def carry_out(
        self, early_end: Callable[[Trial], EarlyEnd | None], is_over: Callable[[Trial], bool]
    ) -> dict[int, RunOutcome]:
        """Carry out the runs that are not finished, each to its end or its early one.

        Parameters
        ----------
        is_over : whether nothing of a trial that is not finished is to be carried out.

        Returns
        -------
        number -> outcome of a run; without those that are over or have not begun. One that has diverged would again,
        so it is not repeated.
        """
        outcomes: dict[int, RunOutcome] = {}
        planned: dict[int, PlannedRun] = {}
        for number, run in enumerate(self._runs(early_end)):
            if is_finished(run.folder):
                outcomes[number] = RunOutcome(FINISHED)
            elif error := divergence(run.folder):
                outcomes[number] = RunOutcome(FAILED, error)
            elif not is_over(self._trials[number // self._sweep.seeds]):
                planned[number] = run

        def prepare(ray: Any) -> None:
            reserved = bundle(client_resources(in_one_process(self._sweep.base.ray)))
            refuse_unless_shared(ray, self._folder, [reserved], "This sweep")
            self._sweep.write(self._folder)

        if self._sweep.base.engine.backend == "inline":
            self._sweep.write(self._folder)
            outcomes |= run_in_this_process(planned, self._listen)
        elif planned:
            outcomes |= run_on_cluster(planned, self._listen, prepare)
        return outcomes

    def _runs(self, early_end: Callable[[Trial], EarlyEnd | None]) -> list[PlannedRun]:
        """Return the runs of all trials, in the order of their numbers."""
        runs = []
        for trial in self._trials:
            for seed in range(self._sweep.seeds):
                folder = run_folder(self._sweep, self._folder, trial.name, seed)
                experiment = experiment_in_process(self._sweep, trial, seed)
                # A process of a sweep that was killed may still be at work on it.
                runs.append(
                    PlannedRun(folder, experiment, is_shared=True, early_end=early_end(trial), ray=self._sweep.base.ray)
                )
        return runs

    def is_stopped(self, trial: Trial) -> bool:
        """Whether ASHA stopped a trial, and its folder has its results of then."""
        if self._asha is None:
            return False
        folder = run_folder(self._sweep, self._folder, trial.name, 0)
        return (folder / SUMMARY).exists() and self._is_stopped_at(trial, RunResult.load(folder).round)

    def _is_stopped_at(self, trial: Trial, round: int) -> bool:
        stopped = None if self._asha is None else self._asha.stopped_after(trial.name)
        return stopped is not None and round >= stopped

    def _listen(self, number: int, event: Event) -> None:
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
        elif isinstance(event, RunFinished) and self._sweep.seeds == 1:
            # Unless ASHA has stopped it, it was interrupted, or goes on later.
            if event.status == "stopped" and not self._is_stopped_at(trial, event.round):
                return
            # A run that has reached its last round before is not evaluated again.
            trial.round = event.round
            trial.status = event.status
            if event.error is not None:
                trial.fail(event.error, event.status == "diverged")
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
            if self.is_stopped(trial):
                self._finish(trial, "stopped")
                continue
            self._conclude(trial, [outcomes.get(number, RunOutcome(STOPPED)) for number in self._numbers(position)])
        self._show(self._trials)
        return self._trials

    def _conclude(self, trial: Trial, outcomes: Sequence[RunOutcome]) -> None:
        errors = {seed: outcome.error for seed, outcome in enumerate(outcomes) if outcome.status == FAILED}
        if errors:
            run = run_folder(self._sweep, self._folder, trial.name, min(errors))
            if (run / SUMMARY).exists():
                trial.round = recorded_end(run)["round"]
            has_diverged = any(isinstance(error, Diverged) for error in errors.values())
            trial.fail(last_sentence(str(errors[min(errors)])), has_diverged)
        elif any(outcome.status != FINISHED for outcome in outcomes):
            trial.status = "waiting"
        else:
            self._finish(trial, "finished")

    def _finish(self, trial: Trial, status: str) -> None:
        """Take a trial's values from its folder, where also those of earlier sessions are."""
        seeds = range(self._sweep.seeds)
        results = [RunResult.load(run_folder(self._sweep, self._folder, trial.name, seed)) for seed in seeds]
        try:
            by_seed = [metric_values(self._sweep, result.experiment, result.summary()) for result in results]
            trial.values = _means(by_seed)
            trial.round = results[0].round
            trial.status = status
        except ConfigError as error:
            trial.fail(str(error))


def experiment_in_process(sweep: Sweep, trial: Trial, seed: int = 0) -> Experiment:
    """Return the experiment of a trial all of which is in one process."""
    experiment = sweep.configured(trial.drawn, seed).override(["engine.backend=inline"])
    # No scheduler needs a checkpoint of each evaluation.
    return experiment.replace(checkpoint=sweep.described.checkpoint)


def _means(values: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: sum(of_run[name] for of_run in values) / len(values) for name in values[0]}
