"""A callback of Ray Tune that records the state of a sweep's trials. It imports Ray, so it is imported late."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ray import cloudpickle, tune
from ray.exceptions import RayActorError

from raypfl.integrations.tuning.sweep import Sweep
from raypfl.integrations.tuning.trial import Trial, final_status, has_diverged, last_sentence, trial_name


def has_died(tune_trial: Any) -> bool:
    """Whether a trial of Tune failed because its process died."""
    # From the file on this machine: Tune's `get_pickled_error` looks in the sweep's folder, where it may come later.
    file = tune_trial.pickled_error_file
    if tune_trial.status != "ERROR" or not file:
        return False
    return isinstance(cloudpickle.loads(Path(file).read_bytes()), RayActorError)


def last_error(tune_trial: Any) -> str:
    """Return why a trial of Tune failed, without the traceback."""
    file = tune_trial.error_file
    text = Path(file).read_text() if file and Path(file).exists() else ""
    return last_sentence(text) or "its process died"


class TrialLog(tune.Callback):
    """Call `show` with all trials whenever one has changed.

    Parameters
    ----------
    folder : the sweep's folder.
    metrics : the metrics' names in what a trial reports.
    """

    def __init__(self, sweep: Sweep, folder: Path, metrics: list[str], show: Callable[[list[Trial]], None]):
        self.trials: dict[str, Trial] = {}
        self._sweep = sweep
        self._folder = folder
        self._metrics = metrics
        self._show = show

    def _record_of(self, tune_trial: Any) -> Trial:
        name = trial_name(tune_trial.trial_id)
        return self.trials.setdefault(name, Trial(name, dict(tune_trial.config)))

    def _set_status(self, tune_trial: Any, status: str) -> None:
        record = self._record_of(tune_trial)
        record.status = status
        record.drawn = dict(tune_trial.config)  # PBT and PB2 change it
        self._show([self.trials[name] for name in sorted(self.trials)])

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._set_status(trial, "running")

    def on_trial_result(self, iteration: int, trials: list[Any], trial: Any, result: Any, **info: Any) -> None:
        record = self._record_of(trial)
        record.round = int(result["round"])
        record.values = {name: result[name] for name in self._metrics}
        self._set_status(trial, "running")

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._set_status(trial, final_status(self._sweep, self._record_of(trial)))

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        # A trial whose process died is started again, see RESTARTS.
        if has_died(trial):
            self._set_status(trial, "waiting")
            return
        record = self._record_of(trial)
        record.fail(last_error(trial), has_diverged(self._sweep, self._folder, record.name))
        self._set_status(trial, record.status)
