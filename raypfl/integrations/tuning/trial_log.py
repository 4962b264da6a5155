"""A callback of Ray Tune that keeps what is known of a sweep's trials. It imports Ray, so it is imported late."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ray import cloudpickle, tune
from ray.exceptions import RayActorError

from raypfl.integrations.tuning.sweep import Sweep
from raypfl.integrations.tuning.trial import Trial, end_of, name_of


def has_died(trial: Any) -> bool:
    """Whether a trial of Tune failed because its process died."""
    file = trial.pickled_error_file
    return (
        trial.status == "ERROR" and bool(file) and isinstance(cloudpickle.loads(Path(file).read_bytes()), RayActorError)
    )


class TrialLog(tune.Callback):
    """Shows all trials whenever one has changed."""

    def __init__(self, sweep: Sweep, metrics: list[str], show: Callable[[list[Trial]], None]):
        self.trials: dict[str, Trial] = {}
        self._sweep = sweep
        self._metrics = metrics
        self._show = show

    def __getstate__(self) -> dict[str, Any]:
        # Tune pickles its callbacks; a terminal cannot be pickled.
        return {"trials": self.trials, "_sweep": self._sweep, "_metrics": self._metrics}

    def _known(self, trial: Any) -> Trial:
        name = name_of(trial.trial_id)
        return self.trials.setdefault(name, Trial(name, dict(trial.config)))

    def _changed(self, trial: Any, status: str) -> None:
        known = self._known(trial)
        known.status, known.drawn = status, dict(trial.config)
        self._show([self.trials[name] for name in sorted(self.trials)])

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._changed(trial, "running")

    def on_trial_result(self, iteration: int, trials: list[Any], trial: Any, result: Any, **info: Any) -> None:
        known = self._known(trial)
        known.round = int(result["round"])
        known.values = {name: result[name] for name in self._metrics}
        self._changed(trial, "running")

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._changed(trial, end_of(self._sweep, self._known(trial)))

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._changed(trial, "waiting" if has_died(trial) else "failed")
