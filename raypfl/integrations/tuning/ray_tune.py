"""A sweep in the terms of Ray Tune: spaces, searcher, scheduler, stops. It imports Ray, so it is imported late."""

from __future__ import annotations

import inspect
import json
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import optuna
from ray import tune
from ray.tune import schedulers
from ray.tune.logger import TBXLoggerCallback
from ray.tune.schedulers.pb2 import PB2
from ray.tune.search import ConcurrencyLimiter, SearchGenerator
from ray.tune.search.basic_variant import BasicVariantGenerator
from ray.tune.search.optuna import OptunaSearch
from ray.tune.stopper import FunctionStopper

from raypfl.common.errors import ConfigError, did_you_mean
from raypfl.common.registry import Registry
from raypfl.experiment import Experiment
from raypfl.experiment.spaces import Space, draws_of_point
from raypfl.integrations.tuning.sweep import Scheduler, Searcher, Sweep
from raypfl.integrations.tuning.trial import trial_name

SEARCHERS = Registry("searcher")
SEARCHERS.register("optuna")(OptunaSearch)

SCHEDULERS = Registry("scheduler")
SCHEDULERS.register("none")(schedulers.FIFOScheduler)
SCHEDULERS.register("asha")(schedulers.AsyncHyperBandScheduler)
SCHEDULERS.register("median")(schedulers.MedianStoppingRule)
SCHEDULERS.register("pbt")(schedulers.PopulationBasedTraining)
SCHEDULERS.register("pb2")(PB2)


def domain(space: Space) -> Any:
    """Return Tune's domain for a space: the numbers of a range, or the positions of a list's values."""
    positions = list(range(len(space.values)))
    if space.kind == "grid":
        return tune.grid_search(positions)
    if space.kind == "choice":
        return tune.choice(positions)
    draw = getattr(tune, space.kind)
    if space.step is None:
        return draw(*space.values)
    # Of a quantised space, Ray Tune wants bounds that are multiples of the step.
    return draw(*map(space.inside, space.values), space.step)


def run_arguments(
    sweep: Sweep,
    first: Experiment,
    names: Sequence[str],
    modes: Sequence[str],
    at_once: int,
    folder: Path,
    log: tune.Callback,
) -> dict[str, Any]:
    """Return the arguments of ``tune.run``, which continues a search if `folder` has one.

    ``tune.Tuner`` would continue it with the settings that it began with, and :data:`CHANGEABLE` ones may be others.

    Parameters
    ----------
    first : the experiment of a first configuration.
    names, modes : the names and directions of the sweep's metrics.
    at_once : the number of trials that the cluster has room for.
    folder : the folder in which Tune keeps the search.

    Raises
    ------
    ConfigError : if the searcher or the scheduler cannot be made.
    """
    arguments: dict[str, Any] = {
        "name": folder.name,
        "storage_path": str(folder.parent),
        "config": {space.name: domain(space) for space in sweep.spaces},
        "num_samples": sweep.trials,
        "search_alg": _searcher(sweep, names, modes, at_once),
        "scheduler": _scheduler(sweep, first),
        "stop": _stopper(sweep.stop.value, names[0], modes[0]),
        "time_budget_s": sweep.stop.seconds,
        "callbacks": [log, *([TBXLoggerCallback()] if sweep.tensorboard else [])],
        "max_failures": 1,
        "raise_on_failed_trial": False,
        "reuse_actors": True,
        "verbose": 0,
    }
    # With several metrics, Optuna is told what they are, and Tune must be told of none.
    if len(names) == 1:
        arguments |= {"metric": names[0], "mode": modes[0]}

    if _has_begun(folder):
        arguments["resume"] = "AUTO+ERRORED"
    return arguments


def _has_begun(folder: Path) -> bool:
    """Whether Tune has saved its state in a folder; a file that a kill cut off is deleted, and an older one counts."""
    for file in sorted(folder.glob("experiment_state-*.json"), reverse=True):
        try:
            json.loads(file.read_text())
        except ValueError:
            file.unlink()
        else:
            return True
    return False


def _stopper(value: float | None, name: str, mode: str) -> FunctionStopper | None:
    """Return what ends a trial whose metric reaches the value; None if no value does."""
    if value is None:
        return None
    return FunctionStopper(partial(_is_reached, value, name, mode))


def _is_reached(value: float, name: str, mode: str, trial: str, result: Mapping[str, Any]) -> bool:
    return bool(result[name] >= value if mode == "max" else result[name] <= value)


# Searchers


def configurations(sweep: Sweep) -> dict[str, dict[str, Any]]:
    """Return the configurations that ``searcher: random`` proposes, by their trials' names.

    They depend on nothing but the sweep, and more trials begin with the same ones.

    Raises
    ------
    ConfigError : if the searcher cannot be made.
    """
    searcher = _searcher(sweep, (), (), at_once=1)
    # Ray Tune wants a function and a folder also where nothing is run.
    with tempfile.TemporaryDirectory() as folder:
        domains = {space.name: domain(space) for space in sweep.spaces}
        searcher.add_configurations(
            tune.Experiment("draws", print, config=domains, num_samples=sweep.trials, storage_path=folder)
        )
        draws = {}
        while (trial := searcher.next_trial()) is not None:
            draws[trial_name(trial.trial_id)] = dict(trial.config)
    return draws


class ResumableRandomSearch(BasicVariantGenerator):
    """Random draws and grids, which continue with more trials, or more at once, than when they were saved."""

    def __init__(self, trials: int, **options: Any):
        super().__init__(**options)
        self._trials = trials

    def restore_from_dir(self, dirpath: str) -> None:
        # Ray restores every attribute, also those that may be others now.
        trials = self._trials
        at_once = self.max_concurrent
        super().restore_from_dir(dirpath)
        self._trials = trials
        self.max_concurrent = at_once

        # Ray counts the trials in three places, and none of them is an argument.
        (iterator,) = self._iterators
        more = trials - iterator.num_samples
        iterator.num_samples += more
        iterator.num_samples_left += more
        self._total_samples += more
        self._finished = False


class ResumableSearch(SearchGenerator):
    """A searcher's proposals, which continue with more trials, or more at once, than when they were saved."""

    def __init__(self, searcher: Any, trials: int, at_once: int):
        self._limiter = ConcurrencyLimiter(searcher, max_concurrent=at_once)
        super().__init__(self._limiter)
        self._trials = trials
        self._at_once = at_once

    def restore_from_dir(self, dirpath: str) -> None:
        super().restore_from_dir(dirpath)
        self._limiter.max_concurrent = self._at_once
        self._total_samples = self._trials
        self._finished = False


def _searcher(sweep: Sweep, names: Sequence[str], modes: Sequence[str], at_once: int) -> Any:
    settings = sweep.searcher
    points = [draws_of_point(sweep.spaces, point) for point in sweep.points]
    fixed: dict[str, Any] = {}

    if settings.name == "random":
        fixed = {
            "random_state": settings.seed,
            "max_concurrent": sweep.concurrent or 0,
            "points_to_evaluate": points,
        }
        return ResumableRandomSearch(sweep.trials, **fixed, **_options(settings, BasicVariantGenerator, fixed))

    if settings.name == "optuna":
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        fixed = {"seed": settings.seed, "points_to_evaluate": points or None}
        if len(names) > 1:
            fixed |= {"metric": list(names), "mode": list(modes)}
    elif points:
        fixed = {"points_to_evaluate": points}

    searcher = construct(settings, SEARCHERS.get(settings.name), fixed)
    return ResumableSearch(searcher, sweep.trials, sweep.concurrent or at_once)


# Schedulers


class SavesBeforeTrials:
    """Mixin for a scheduler that makes Tune save its state before a new trial begins.

    By itself Tune does so every ten seconds. After a kill it would not know younger trials, would propose others in
    their place, and would leave their folders behind.
    """

    _saved: frozenset[str] = frozenset()
    """Ids of the trials in the saved state."""

    def choose_trial_to_run(self, tune_controller: Any) -> Any:
        trials = frozenset(trial.trial_id for trial in tune_controller.get_trials())
        if not trials <= self._saved:
            tune_controller.checkpoint(force=True, wait=True)
            self._saved = trials
        return super().choose_trial_to_run(tune_controller)  # type: ignore[misc]


def _scheduler(sweep: Sweep, first: Experiment) -> Any:
    settings = sweep.scheduler
    scheduler: Any = SCHEDULERS.get(settings.name)
    signature = inspect.signature(scheduler)
    saving = type(scheduler.__name__, (SavesBeforeTrials, scheduler), {"__signature__": signature})
    return construct(settings, saving, scheduler_arguments(sweep, first, signature.parameters))


def asha(sweep: Sweep, first: Experiment, name: str, mode: str) -> schedulers.AsyncHyperBandScheduler:
    """Return the scheduler of a sweep with ``scheduler: asha``, for use without Tune's controller.

    Parameters
    ----------
    first : the experiment of a first configuration.
    name, mode : the name and the direction of the sweep's metric.
    """
    scheduler = schedulers.AsyncHyperBandScheduler
    arguments = scheduler_arguments(sweep, first, inspect.signature(scheduler).parameters)
    return scheduler(metric=name, mode=mode, **arguments)


def scheduler_arguments(sweep: Sweep, first: Experiment, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a scheduler that follow from the sweep.

    Parameters
    ----------
    parameters : the scheduler's parameters, by name.
    """
    settings = sweep.scheduler
    time = {"time_attr": "round"} if "time_attr" in parameters else {}
    if settings.name == "asha":
        return {**time, "max_t": first.rounds, "grace_period": settings.grace, "reduction_factor": settings.factor}
    if settings.name == "median":
        return {**time, "grace_period": settings.grace}

    interval = {"perturbation_interval": settings.interval or first.evaluation.every}
    if settings.name == "pbt":
        mutations: dict[str, Any] = {}
        for space in sweep.spaces:
            mutations[space.name] = domain(space) if space.is_range else list(range(len(space.values)))
        explore = partial(_inside, sweep.spaces)
        return {**time, **interval, "hyperparam_mutations": mutations, "custom_explore_fn": explore}
    if settings.name == "pb2":
        bounds = {space.name: list(space.values) for space in sweep.spaces}
        return {**time, **interval, "hyperparam_bounds": bounds}

    # The user's own scheduler may count in something other than rounds.
    return {name: value for name, value in time.items() if name not in settings.options}


def _inside(spaces: Sequence[Space], config: dict[str, Any]) -> dict[str, Any]:
    """Move a configuration that PBT has changed into its ranges, which a perturbation may leave."""
    ranges = {space.name: space for space in spaces if space.is_range}
    return {name: ranges[name].inside(value) if name in ranges else value for name, value in config.items()}


def construct(settings: Searcher | Scheduler, entry: Any, fixed: Mapping[str, Any]) -> Any:
    """Construct a searcher or a scheduler.

    Parameters
    ----------
    entry : the class.
    fixed : the arguments that the sweep determines; the others are the options in `settings`.
    """
    options = _options(settings, entry, fixed)
    try:
        return entry(**fixed, **options)
    except Exception as error:  # the class may be the user's own and raise anything
        kind = type(settings).__name__.lower()
        raise ConfigError(f"The {kind} {settings.name!r} cannot be made: {type(error).__name__}: {error}") from error


def _options(settings: Searcher | Scheduler, entry: Any, fixed: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a class in `settings`; raise a ConfigError for one that it does not have."""
    section = f"{type(settings).__name__.lower()}.options"
    parameters = inspect.signature(entry).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())

    for name in settings.options:
        if name in fixed:
            raise ConfigError(f"{section} has {name!r}, which the sweep's other settings determine; leave it out.")
        if name not in parameters and not takes_any:
            free = [parameter for parameter in parameters if parameter not in fixed]
            suggestion = did_you_mean(name, free)
            raise ConfigError(f"{section} has {name!r}, which is not an option of {settings.name}; {suggestion}")
    return settings.options
