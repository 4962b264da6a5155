"""A callback of Ray Tune that keeps what is known of a sweep's trials. It imports Ray, so it is imported late."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ray import tune

from raypfl.tuning.sweep import Sweep
from raypfl.tuning.trial import Trial, end_of, name_of


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
        self._changed(trial, "failed")
