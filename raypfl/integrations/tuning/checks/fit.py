"""Whether the parts of a sweep fit together, as far as that shows without data."""

from __future__ import annotations

import math

from raypfl.common.counting import counted
from raypfl.common.errors import ConfigError
from raypfl.evaluation.masking import unmasked_name
from raypfl.experiment import Experiment
from raypfl.experiment.identity import is_in
from raypfl.integrations.tuning.sweep import SCHEDULERS, Sweep
from raypfl.methods import METHODS
from raypfl.runs.resuming import keys_of_checkpoint


def refuse_unfit(sweep: Sweep) -> None:
    """Raise a ConfigError if parts of a sweep do not suit each other, or a setting refuses a value that is searched."""
    first = sweep.first()
    if "val" in (unmasked_name(target.protocol) for target in sweep.metric) and not first.data.val_fraction:
        raise ConfigError(
            f"The metric of the sweep {sweep.name!r} is on validation data, but data.val_fraction is 0. "
            "Set it under experiment, such as data.val_fraction: 0.2."
        )

    _refuse_scheduler_without_decisions(sweep, first)
    for experiment in sweep.examples():
        _refuse_missing_models(sweep, experiment)
        if sweep.scheduler.copies:
            _refuse_other_checkpoints(sweep, experiment, first)


def _refuse_missing_models(sweep: Sweep, experiment: Experiment) -> None:
    """Raise a ConfigError if a metric is of models that the method of an experiment does not make."""
    method = experiment.method
    makes = {
        "personal": method.has("personal_model") or method.has("unseen_model"),
        "global": method.has("global_model"),
    }
    for target in sweep.metric:
        if target.model is not None and not makes[target.model]:
            raise ConfigError(
                f"metric.model of the sweep {sweep.name!r} is {target.model!r}, but {METHODS.name_of(type(method))} "
                f"makes no {target.model} models; choose another, or leave it out."
            )


def _refuse_scheduler_without_decisions(sweep: Sweep, first: Experiment) -> None:
    """Raise a ConfigError if Ray Tune's scheduler would decide nothing before a trial's last round."""
    scheduler = sweep.scheduler
    every = first.evaluation.every
    setting = "interval" if scheduler.copies else "grace"
    if setting not in SCHEDULERS.get(scheduler.name, ()):
        return

    earliest = getattr(scheduler, setting) or every
    first_decision = math.ceil(earliest / every) * every
    if first_decision >= first.rounds:
        rounds = counted(first.rounds, "round")
        raise ConfigError(
            f"The sweep {sweep.name!r} has scheduler: {scheduler.name}, which decides after evaluations from round "
            f"{earliest} on (evaluation.every is {every}), but a trial has {rounds}, so it would decide nothing. "
            f"Choose a smaller scheduler.{setting}, another evaluation.every, more rounds, or scheduler: none."
        )


def _refuse_other_checkpoints(sweep: Sweep, experiment: Experiment, first: Experiment) -> None:
    """Raise a ConfigError if a trial could not continue from another one's checkpoint."""
    # An option of a network, such as its dropout, need not change what a checkpoint has.
    keys = [key for key in keys_of_checkpoint(experiment, first) if not is_in(key, "model")]
    if keys:
        raise ConfigError(
            f"The sweep {sweep.name!r} has scheduler: {sweep.scheduler.name}, whose trials continue from each "
            f"other's checkpoints, and these depend on {keys[0]}. Search others, or choose another scheduler."
        )
