"""The asynchronous rounds of a run, built from its settings and its clients' turns."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from raypfl.devices import Always, Availability, ClientTurns
from raypfl.federation.asynchronous.rounds import AsynchronousRounds
from raypfl.federation.asynchronous.schedule import Fleet, Schedule, make_schedule
from raypfl.federation.cohort_draw import cohort_size
from raypfl.federation.exchange.group_runner import GroupRunner

if TYPE_CHECKING:
    from raypfl.experiment import Experiment


class _OfTrained(Availability):
    """The availability of the clients that are trained, by their positions among them."""

    def __init__(self, availability: Availability, trained: np.ndarray):
        self._availability = availability
        self._trained = trained

    def is_available(self, clients: np.ndarray, time: float | np.ndarray) -> np.ndarray:
        return self._availability.is_available(self._trained[clients], time)

    def is_one_available(self, client: int, time: float) -> bool:
        return self._availability.is_one_available(self._trained[client], time)

    def next_available(self, clients: np.ndarray, time: float | np.ndarray) -> np.ndarray:
        return self._availability.next_available(self._trained[clients], time)


def schedule_for(experiment: Experiment, turns: ClientTurns, trained: np.ndarray) -> Schedule | None:
    """Return the schedule of a run whose rounds are asynchronous; None if they are not.

    Parameters
    ----------
    trained : the numbers of the clients that are trained, ``int64[n]``; the schedule has their positions here.

    Raises
    ------
    ConfigError : if too few clients can ever be reached.
    """
    settings = experiment.asynchronous
    if settings.buffer is None:
        return None

    is_always = isinstance(turns.availability, Always)
    fleet = Fleet(
        seconds=turns.turn_seconds(trained),
        size=min(cohort_size(experiment.cohort, len(trained)), len(trained)),
        dropout=turns.dropout,
        availability=turns.availability if is_always else _OfTrained(turns.availability, trained),
    )
    return make_schedule(fleet, experiment.rounds, experiment.seed, settings.buffer, settings.window)


def asynchronous_rounds(
    experiment: Experiment, turns: ClientTurns, trained: np.ndarray, runner: GroupRunner, together: bool
) -> AsynchronousRounds | None:
    """Return the rounds of a run; None if they are synchronous. Parameters as for the schedule and the rounds."""
    schedule = schedule_for(experiment, turns, trained)
    if schedule is None:
        return None
    return AsynchronousRounds(
        experiment.asynchronous,
        schedule,
        trained,
        experiment.method,
        runner,
        lambda round: experiment.training.learning_rate(round - 1, experiment.rounds),
        together,
    )
