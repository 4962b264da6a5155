"""What a run will take on its clients' devices, before anything trains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from raypfl.common.errors import ConfigError
from raypfl.devices import ClientTurns, Turn
from raypfl.engine.building.rounds import schedule_for
from raypfl.engine.events import Listener, Progress
from raypfl.engine.prepared import Prepared
from raypfl.experiment import Experiment
from raypfl.federation.asynchronous.schedule import Schedule
from raypfl.federation.cohort_draw import draw_cohort
from raypfl.runs.checks.hooks import refuse_mistaken_hooks
from raypfl.runs.choices.together import refuse_unusable_replies
from raypfl.runs.choices.turn import turn_of
from raypfl.runs.planning.turns import DRAWN_ROUNDS, PlannedTurn, paces_of, turns_of_round, turns_of_schedule
from raypfl.runs.preparing import refuse_unfit

DAY = 86400.0
PERCENTILES = (50, 95)
"""Percentiles of the lengths of rounds, and of staleness, that are shown."""


@dataclass(frozen=True)
class Plan:
    """All rounds of a run, in simulated time.

    Attributes
    ----------
    turn : what the method asks of a client in a round.
    num_clients : the number of clients that are trained.
    begins, seconds : when each round begins, and how long it takes, ``float64[rounds]``.
    joules : energy of each round, ``float64[rounds]``.
    bytes_down, bytes_up : traffic of each round, all clients together, ``int64[rounds]``.
    clients, dropped, late : how many clients each round counts, loses by dropout, and does not wait for,
        ``int64[rounds]``.
    taken_part : how often each client counts in a round, ``int64[num_clients]``.
    drawn : whether each client is ever sent a model, ``bool[num_clients]``.
    turns : the turns of the first rounds; of a large cohort, those at some of its places.
    staleness : how many models were made while each reply was under way, ``int64[replies]``; None: rounds are
        synchronous.
    """

    turn: Turn
    num_clients: int
    begins: np.ndarray
    seconds: np.ndarray
    joules: np.ndarray
    bytes_down: np.ndarray
    bytes_up: np.ndarray
    clients: np.ndarray
    dropped: np.ndarray
    late: np.ndarray
    taken_part: np.ndarray
    drawn: np.ndarray
    turns: tuple[PlannedTurn, ...]
    staleness: np.ndarray | None = None

    @property
    def rounds(self) -> int:
        return len(self.seconds)

    @property
    def total_seconds(self) -> float:
        """Simulated seconds from the start to the end of the last round."""
        return float(self.begins[-1] + self.seconds[-1])

    @property
    def rounds_a_day(self) -> float:
        return self.rounds * DAY / self.total_seconds

    @property
    def gini(self) -> float:
        """Gini coefficient of participation: 0 if all take part equally often, almost 1 if one does, NaN if none."""
        ranked = np.sort(self.taken_part).astype(np.float64)
        total = ranked.sum()
        if not total:
            return float("nan")
        ranks = np.arange(1, len(ranked) + 1)
        return float(2 * (ranks @ ranked) / (len(ranked) * total) - (len(ranked) + 1) / len(ranked))


def plan(experiment: Experiment, emit: Listener, num_clients: int | None = None) -> Plan:
    """Plan a run: the same rounds, clients, seconds and bytes as it will have.

    Parameters
    ----------
    num_clients : the number of clients, which hold in turn what those of the data hold; None: those of the data.

    Raises
    ------
    ConfigError : if no hardware is set, or a run would be refused, except for a GPU or weights that are not here.
    """
    if experiment.devices.hardware is None:
        raise ConfigError(
            "A plan needs the clients' devices: set devices.hardware, as in raypfl plan devices.hardware=lognormal."
        )
    if experiment.cohort.selection is not None:
        raise ConfigError(
            "cohort.selection may look at what clients report as they train, so no plan can know who takes part; leave "
            "it out to plan with clients drawn at random, or use raypfl run."
        )
    emit(Progress("preparing data"))
    data = experiment.load_data()
    prepared = Prepared(experiment, data)
    refuse_mistaken_hooks(experiment.method)
    refuse_unfit(prepared)
    emit(Progress("rehearsing a round"))
    turn = turn_of(prepared)
    assert turn is not None
    refuse_unusable_replies(prepared)

    trained = None
    if num_clients is None and len(data.unseen):
        trained = np.setdiff1d(np.arange(data.num_clients), data.unseen)
    turns = prepared.turns(turn, num_clients)
    emit(Progress("planning rounds"))
    return planned(experiment, turns, trained)


def planned(experiment: Experiment, turns: ClientTurns, trained: np.ndarray | None = None) -> Plan:
    """Plan the rounds of clients whose turns are known; `trained`: the numbers of those that are trained."""
    assert turns.turn is not None and turns.num_samples is not None
    if trained is None:
        trained = np.arange(len(turns.num_samples))
    schedule = schedule_for(experiment, turns, trained)
    if schedule is None:
        return _synchronous(experiment, turns, trained)
    return _asynchronous(schedule, turns, trained)


def _synchronous(experiment: Experiment, turns: ClientTurns, trained: np.ndarray) -> Plan:
    assert turns.turn is not None and turns.num_samples is not None
    turn = turns.turn
    num_all = len(turns.num_samples)
    numbers = None if len(trained) == num_all else trained
    taken_part = np.zeros(num_all, dtype=np.int64)
    drawn = np.zeros(num_all, dtype=bool)

    paces = paces_of(turns)
    draws = []
    bytes_down = []
    bytes_up = []
    planned_turns: list[PlannedTurn] = []
    time = 0.0
    for number in range(1, experiment.rounds + 1):
        cohort = draw_cohort(experiment.cohort, len(trained), experiment.seed, number, turns, numbers, time)
        time = cohort.ends
        taken_part[list(cohort.clients)] += 1
        drawn[[*cohort.clients, *cohort.lost]] = True
        if number <= DRAWN_ROUNDS:
            planned_turns += turns_of_round(number, cohort, turns, paces)
        counts = (len(cohort.clients), len(cohort.dropped), len(cohort.late))
        draws.append((*counts, cohort.begins, cohort.seconds, cohort.joules))
        messages = _messages(turn, cohort.clients)
        # Those that are late or drop out of a round have received its first message.
        lost_messages = _messages(turn, cohort.lost)
        bytes_down.append(messages * turn.down_bytes + lost_messages * turn.exchanges[0].down_bytes)
        bytes_up.append(messages * turn.up_bytes)

    clients, dropped, late, begins, seconds, joules = np.array(draws).T
    return Plan(
        turn=turn,
        num_clients=len(trained),
        begins=begins,
        seconds=seconds,
        joules=joules,
        bytes_down=np.rint(bytes_down).astype(np.int64),
        bytes_up=np.rint(bytes_up).astype(np.int64),
        clients=clients.astype(np.int64),
        dropped=dropped.astype(np.int64),
        late=late.astype(np.int64),
        taken_part=taken_part[trained],
        drawn=drawn[trained],
        turns=tuple(planned_turns),
    )


def _messages(turn: Turn, clients: Sequence[int]) -> float:
    """Return the size of these clients' messages together, in messages of mean size."""
    sizes = turn.message_sizes(np.array(clients, dtype=np.int64))
    return float(np.broadcast_to(sizes, len(clients)).sum())


def _asynchronous(schedule: Schedule, turns: ClientTurns, trained: np.ndarray) -> Plan:
    assert turns.turn is not None and turns.devices is not None
    num_rounds = schedule.num_rounds
    clients = schedule.per_round(schedule.joins[schedule.replies])
    dispatched = schedule.per_round(schedule.rounds)

    return Plan(
        turn=turns.turn,
        num_clients=len(trained),
        begins=schedule.round_begins,
        seconds=schedule.round_ends - schedule.round_begins,
        joules=schedule.joules(turns.devices.watts[trained]),
        bytes_down=np.rint(dispatched * turns.turn.down_bytes).astype(np.int64),
        bytes_up=np.rint(clients * turns.turn.up_bytes).astype(np.int64),
        clients=clients,
        dropped=schedule.per_round(schedule.rounds[schedule.drops]),
        late=np.zeros(num_rounds, dtype=np.int64),
        taken_part=np.bincount(schedule.clients[schedule.replies], minlength=len(trained)),
        drawn=np.bincount(schedule.clients, minlength=len(trained)) > 0,
        turns=tuple(turns_of_schedule(schedule, trained, paces_of(turns))),
        staleness=schedule.staleness,
    )
