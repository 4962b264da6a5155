"""What a sweep asks of Ray Tune: spaces, a searcher, a scheduler, stops. It imports Ray, so it is imported late."""

from __future__ import annotations

import inspect
import json
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
from raypfl.integrations.tuning.spaces import Space, placed
from raypfl.integrations.tuning.sweep import Scheduler, Searcher, Sweep

SEARCHERS = Registry("searcher")
SEARCHERS.register("optuna")(OptunaSearch)

SCHEDULERS = Registry("scheduler")
SCHEDULERS.register("none")(schedulers.FIFOScheduler)
SCHEDULERS.register("asha")(schedulers.AsyncHyperBandScheduler)
SCHEDULERS.register("median")(schedulers.MedianStoppingRule)
SCHEDULERS.register("pbt")(schedulers.PopulationBasedTraining)
SCHEDULERS.register("pb2")(PB2)


def domain(space: Space) -> Any:
    """Tune's domain: numbers of a range, or the positions of a list's values."""
    positions = list(range(len(space.values)))
    if space.kind == "grid":
        return tune.grid_search(positions)
    if space.kind == "choice":
        return tune.choice(positions)
    step = [] if space.step is None else [space.step]
    return getattr(tune, space.kind)(*space.values, *step)


def tuner(
    trainable: Any,
    sweep: Sweep,
    first: Experiment,
    names: Sequence[str],
    modes: Sequence[str],
    at_once: int,
    path: Path,
    log: tune.Callback,
) -> tune.Tuner:
    """Tune's search, which continues if `path` has one.

    Parameters
    ----------
    trainable : a trial, as Tune takes it.
    first : the experiment of a first configuration.
    names, modes : of the sweep's metrics. at_once : trials that the cluster has room for.

    Raises
    ------
    ConfigError : for a searcher or scheduler that cannot be made.
    """
    space = {space.name: domain(space) for space in sweep.spaces}
    several = len(names) > 1  # then Optuna takes them itself, and Tune wants none
    goal: dict[str, Any] = {} if several else {"metric": names[0], "mode": modes[0]}
    config = tune.TuneConfig(
        **goal,
        num_samples=sweep.trials,
        search_alg=_searcher(sweep, names, modes, at_once),
        scheduler=_scheduler(sweep, first),
        time_budget_s=sweep.stop.seconds,
        reuse_actors=True,
    )
    run = tune.RunConfig(
        name=path.name,
        storage_path=str(path.parent),
        failure_config=tune.FailureConfig(max_failures=1),
        stop=_stopper(sweep.stop.value, names[0], modes[0]),
        callbacks=[log, *([TBXLoggerCallback()] if sweep.tensorboard else [])],
        verbose=0,
    )
    if not _has_begun(path):
        return tune.Tuner(trainable, param_space=space, tune_config=config, run_config=run)

    again: Any = tune.Tuner.restore(
        str(path), trainable, resume_unfinished=True, resume_errored=True, param_space=space
    )
    inner = again._local_tuner  # Tune would take the settings with which the search began
    inner._tune_config = config
    inner._run_config = run
    return again


def _has_begun(path: Path) -> bool:
    """Whether Tune has saved its state there; a file that a kill cut off is deleted for the one before."""
    for file in sorted(path.glob("experiment_state-*.json"), reverse=True):
        try:
            json.loads(file.read_text())
        except ValueError:
            file.unlink()
        else:
            return True
    return False


def _stopper(value: float | None, name: str, mode: str) -> FunctionStopper | None:
    """What ends a trial whose metric reaches the value."""
    return None if value is None else FunctionStopper(partial(_is_reached, value, name, mode))


def _is_reached(value: float, name: str, mode: str, trial: str, result: Mapping[str, Any]) -> bool:
    return bool(result[name] >= value if mode == "max" else result[name] <= value)


# Searchers


class Draws(BasicVariantGenerator):
    """Tune's random draws and grids, which continue with more trials, or more at once, than when they were saved."""

    def __init__(self, trials: int, **options: Any):
        super().__init__(**options)
        self._trials = trials

    def restore_from_dir(self, dirpath: str) -> None:
        trials = self._trials
        at_once = self.max_concurrent
        super().restore_from_dir(dirpath)
        self._trials = trials
        self.max_concurrent = at_once

        (iterator,) = self._iterators
        more = trials - iterator.num_samples
        iterator.num_samples += more
        iterator.num_samples_left += more
        self._total_samples += more
        self._finished = False


class Proposals(SearchGenerator):
    """A searcher's configurations, which continue with more trials, or more at once, than when they were saved."""

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
    chosen = sweep.searcher
    points = [placed(sweep.spaces, point) for point in sweep.points]
    given: dict[str, Any]
    if chosen.name == "random":
        most = sweep.concurrent or 0
        given = {"random_state": chosen.seed, "max_concurrent": most, "points_to_evaluate": points}
        return Draws(sweep.trials, **given, **_options(chosen, BasicVariantGenerator, given))

    if chosen.name == "optuna":
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        given = {"seed": chosen.seed, "points_to_evaluate": points or None}
        if len(names) > 1:
            given |= {"metric": list(names), "mode": list(modes)}
        searcher = _made(chosen, SEARCHERS.get(chosen.name), given)
    else:
        searcher = _made(chosen, SEARCHERS.get(chosen.name), {"points_to_evaluate": points} if points else {})
    return Proposals(searcher, sweep.trials, sweep.concurrent or at_once)


# Schedulers


class SavesFirst:
    """A scheduler before it, for which Tune saves its state before a new trial begins.

    Of itself Tune does so every ten seconds. After a kill it would not know younger trials, propose others in their
    place and leave their folders behind.
    """

    _saved: frozenset[str] = frozenset()

    def choose_trial_to_run(self, tune_controller: Any) -> Any:
        trials = frozenset(trial.trial_id for trial in tune_controller.get_trials())
        if not trials <= self._saved:
            tune_controller.checkpoint(force=True, wait=True)
            self._saved = trials
        return super().choose_trial_to_run(tune_controller)  # type: ignore[misc]


def _scheduler(sweep: Sweep, first: Experiment) -> Any:
    chosen = sweep.scheduler
    entry: Any = SCHEDULERS.get(chosen.name)
    saving = type(entry.__name__, (SavesFirst, entry), {"__signature__": inspect.signature(entry)})
    return _made(chosen, saving, _given(sweep, first, inspect.signature(entry).parameters))


def _given(sweep: Sweep, first: Experiment, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a scheduler that follow from the sweep."""
    chosen = sweep.scheduler
    rounds = {"time_attr": "round"} if "time_attr" in parameters else {}
    if chosen.name == "asha":
        return {**rounds, "max_t": first.rounds, "grace_period": chosen.grace, "reduction_factor": chosen.factor}
    if chosen.name == "median":
        return {**rounds, "grace_period": chosen.grace}

    every = {"perturbation_interval": chosen.interval or first.evaluation.every}
    if chosen.name == "pbt":
        mutations = {
            space.name: domain(space) if space.is_range else list(range(len(space.values))) for space in sweep.spaces
        }
        return {
            **rounds,
            **every,
            "hyperparam_mutations": mutations,
            "custom_explore_fn": partial(_inside, sweep.spaces),
        }
    if chosen.name == "pb2":
        return {**rounds, **every, "hyperparam_bounds": {space.name: list(space.values) for space in sweep.spaces}}
    return {name: value for name, value in rounds.items() if name not in chosen.options}


def _inside(spaces: Sequence[Space], config: dict[str, Any]) -> dict[str, Any]:
    """A changed configuration within the bounds of its ranges."""
    ranges = {space.name: space for space in spaces if space.is_range}
    return {name: ranges[name].inside(value) if name in ranges else value for name, value in config.items()}


def _made(chosen: Searcher | Scheduler, entry: Any, given: Mapping[str, Any]) -> Any:
    options = _options(chosen, entry, given)
    try:
        return entry(**given, **options)
    except Exception as error:  # a class of anybody's
        what = type(chosen).__name__.lower()
        raise ConfigError(f"The {what} {chosen.name!r} cannot be made: {type(error).__name__}: {error}") from error


def _options(chosen: Searcher | Scheduler, entry: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of the class that a sweep gives; raises a ConfigError for one that it does not have."""
    what = f"{type(chosen).__name__.lower()}.options"
    parameters = inspect.signature(entry).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for name in chosen.options:
        if name in given:
            raise ConfigError(f"{what} has {name!r}, which the sweep's other settings determine; leave it out.")
        if name not in parameters and not takes_any:
            known = [known for known in parameters if known not in given]
            raise ConfigError(f"{what} has {name!r}, which is no option of {chosen.name}; {did_you_mean(name, known)}")
    return chosen.options
