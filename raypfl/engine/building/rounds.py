"""The rounds of a run, synchronous or asynchronous, built from its settings and its clients' turns."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

from raypfl.common.errors import ConfigError
from raypfl.devices import ClientTurns
from raypfl.federation.asynchronous.rounds import AsynchronousRounds
from raypfl.federation.asynchronous.schedule import Schedule, ScheduledClients, make_schedule
from raypfl.federation.cohort_draw import cohort_size
from raypfl.federation.exchange.group_runner import GroupRunner
from raypfl.federation.rounds import Rounds, SynchronousRounds

if TYPE_CHECKING:
    from raypfl.experiment import Experiment


def schedule_for(
    experiment: Experiment, turns: ClientTurns, trained: np.ndarray, looks_ahead: bool = False
) -> Schedule | None:
    """Return the schedule of a run whose rounds are asynchronous; None if they are not.

    Parameters
    ----------
    trained : the numbers of the clients that are trained, ``int64[n]``; the schedule has their positions here.
    looks_ahead : whether the schedule goes on after the last round until all who are then at work have replied, so that
        the clients that train at once are the same if the run is extended.

    Raises
    ------
    ConfigError : if too few clients can ever be reached.
    """
    settings = experiment.asynchronous
    if settings.buffer is None:
        return None

    size = cohort_size(experiment.cohort, len(trained))
    scheduled = ScheduledClients(
        seconds=turns.turn_seconds(trained),
        size=size,
        dropout=turns.dropout,
        availability=turns.availability.of(trained),
    )
    if looks_ahead:
        # At most `size` clients are at work, and each round gets a reply from at least one of them.
        with suppress(ConfigError):  # too few clients may be left for rounds after the run's last one
            return make_schedule(scheduled, experiment.rounds + size, experiment.seed, settings.buffer, settings.window)
    return make_schedule(scheduled, experiment.rounds, experiment.seed, settings.buffer, settings.window)


def rounds_for(experiment: Experiment, turns: ClientTurns, runner: GroupRunner, together: bool) -> Rounds:
    """Return the rounds of a run.

    `together` : see :class:`AsynchronousRounds`.

    Raises
    ------
    ConfigError : if too few clients can ever be reached for asynchronous rounds.
    """

    def learning_rate(round: int) -> float:
        return experiment.training.learning_rate(round - 1, experiment.rounds)

    trained = runner.task.trained
    schedule = schedule_for(experiment, turns, trained, looks_ahead=True)
    if schedule is None:
        return SynchronousRounds(experiment.cohort, runner, learning_rate, turns)
    return AsynchronousRounds(
        experiment.asynchronous, schedule, trained, experiment.method, runner, learning_rate, together
    )
