"""Whether a sweep's scheduler can decide anything, and its trials can continue from each other's checkpoints."""

from __future__ import annotations

import math

from raypfl.common.counting import counted
from raypfl.common.errors import ConfigError
from raypfl.experiment import Experiment
from raypfl.experiment.identity import is_in
from raypfl.integrations.tuning.sweep import SCHEDULERS, Sweep
from raypfl.runs.resuming import keys_of_checkpoint


def refuse_scheduler_without_decisions(sweep: Sweep, first: Experiment) -> None:
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


def refuse_other_checkpoints(sweep: Sweep, first: Experiment) -> None:
    """Raise a ConfigError if a trial could not continue from another one's checkpoint."""
    for experiment in sweep.examples():
        # An option of a network, such as its dropout, need not change what a checkpoint has.
        keys = [key for key in keys_of_checkpoint(experiment, first) if not is_in(key, "model")]
        if keys:
            raise ConfigError(
                f"The sweep {sweep.name!r} has scheduler: {sweep.scheduler.name}, whose trials continue from each "
                f"other's checkpoints, and these depend on {keys[0]}. Search others, or choose another scheduler."
            )
