"""What PBT decides between two generations, by Ray Tune's scheduler. It imports Ray, so it is imported late."""

from __future__ import annotations

import contextlib
import copy
import inspect
import random
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
from ray.train._internal.session import _TrainingResult
from ray.tune import experiment, schedulers

from raypfl.common.rng import key
from raypfl.experiment import Experiment
from raypfl.integrations.tuning.ray_tune import construct, scheduler_arguments
from raypfl.integrations.tuning.sweep import Sweep
from raypfl.integrations.tuning.together.pbt import Copy


class PbtDecisions:
    """Decides which trials continue from others' checkpoints, and with which configurations.

    Parameters
    ----------
    first : the experiment of a first configuration.
    metric, mode : the name and the direction of the sweep's metric.

    Raises
    ------
    ConfigError : if the scheduler has an option that Ray Tune refuses.
    """

    def __init__(self, sweep: Sweep, first: Experiment, metric: str, mode: str):
        # All trials are compared in the same round.
        options = sweep.scheduler.options | {"synch": True, "log_config": False}
        settings = sweep.scheduler.model_copy(update={"options": options})
        scheduler = schedulers.PopulationBasedTraining
        fixed = scheduler_arguments(sweep, first, inspect.signature(scheduler).parameters)
        self._unused = construct(settings, scheduler, fixed | {"metric": metric, "mode": mode})
        self._metric = metric
        self._seed = sweep.searcher.seed

    def __call__(
        self, round: int, configurations: Mapping[str, Mapping[str, Any]], values: Mapping[str, float]
    ) -> dict[str, Copy]:
        """Return the copies after a round; they follow from the arguments and the searcher's seed.

        Parameters
        ----------
        configurations, values : those of the trials that have further rounds, by name.
        """
        scheduler = copy.deepcopy(self._unused)
        trials = [experiment.Trial("", stub=True, trial_id=name, config=dict(configurations[name])) for name in values]
        # Of Tune's controller, the scheduler needs the trials only, if all of them are paused.
        controller: Any = SimpleNamespace(search_alg=None, get_trials=lambda: trials, get_live_trials=lambda: trials)
        for trial in trials:
            trial.status = trial.PAUSED
            # The scheduler gives a trial the checkpoint that it is to continue from: here, the name of its trial.
            checkpoints: Any = trial.run_metadata.checkpoint_manager
            name: Any = trial.trial_id
            checkpoints._latest_checkpoint_result = _TrainingResult(name, {})
            scheduler.on_trial_add(controller, trial)

        with _seeded(key(self._seed, "pbt", round)):
            for trial in trials:
                scheduler.on_trial_result(controller, trial, {"round": round, self._metric: values[trial.trial_id]})
        sources = {trial.trial_id: str(trial.checkpoint) for trial in trials}
        return {
            trial.trial_id: Copy(sources[trial.trial_id], dict(trial.config))
            for trial in trials
            if sources[trial.trial_id] != trial.trial_id
        }


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """While active, the random streams of the process, from which Ray Tune draws, begin with a seed."""
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
