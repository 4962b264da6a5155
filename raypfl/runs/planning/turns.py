"""The turns of a plan's first rounds, for its picture."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from raypfl.devices import ClientTurns
from raypfl.federation.asynchronous.schedule import Schedule
from raypfl.federation.cohort_draw import CohortDraw

DRAWN_ROUNDS = 40
"""Rounds of which a plan keeps turns."""

DRAWN_PLACES = 60
"""Places of a cohort of which a plan keeps turns; of a larger one, as many that are evenly spread."""

TurnKind = Literal["counted", "late", "dropped", "unfinished"]


@dataclass(frozen=True)
class PlannedTurn:
    """A client's turn in a round.

    Attributes
    ----------
    round : the round in which the client is sent its message.
    place : the client's number among those that are at work at the same time, from 0.
    ends : simulated seconds from the start of the run to the end of the turn or, for a late client, of its round.
    kind : ``counted``, ``late`` or ``dropped``; ``unfinished`` if the run ends before.
    pace : the third of all devices that its own is in; see :func:`paces_of`.
    """

    round: int
    client: int
    place: int
    begins: float
    ends: float
    kind: TurnKind
    pace: int


def paces_of(turns: ClientTurns) -> np.ndarray:
    """Return the third that each client's device is in, ``int64[num_clients]``: 0 for the fastest, 2 for the slowest.

    Devices are ranked by the time that each takes for the samples of an average client.
    """
    assert turns.devices is not None and turns.turn is not None and turns.num_samples is not None
    everyone = np.arange(len(turns.devices))
    samples = float(turns.turn.samples(turns.num_samples).mean())
    seconds = turns.devices.turn_seconds(everyone, samples, turns.turn.down_bytes, turns.turn.up_bytes)
    return np.searchsorted(np.quantile(seconds, [1 / 3, 2 / 3]), seconds)


def turns_of_round(number: int, cohort: CohortDraw, turns: ClientTurns, paces: np.ndarray) -> list[PlannedTurn]:
    """Return the turns of a synchronous round, from the shortest to the longest; `paces` as :func:`paces_of`."""
    counted = np.array(cohort.clients, dtype=np.int64)
    dropped = np.array(cohort.dropped, dtype=np.int64)
    shares = np.ones(len(counted)) if cohort.work is None else cohort.work
    seconds = np.concatenate(
        [
            turns.turn_seconds(counted, shares),
            np.full(len(cohort.late), cohort.seconds),
            turns.download_seconds(dropped),
        ]
    )
    clients = np.array([*cohort.clients, *cohort.late, *cohort.dropped], dtype=np.int64)
    kinds: list[TurnKind] = []
    kinds += ["counted"] * len(counted)
    kinds += ["late"] * len(cohort.late)
    kinds += ["dropped"] * len(dropped)

    by_length = np.argsort(seconds, kind="stable")
    shown = _drawn_places(len(clients))
    return [
        PlannedTurn(
            round=number,
            client=int(clients[index]),
            place=place,
            begins=cohort.begins,
            ends=cohort.begins + float(seconds[index]),
            kind=kinds[index],
            pace=int(paces[clients[index]]),
        )
        for place, index in enumerate(by_length.tolist())
        if place in shown
    ]


def turns_of_schedule(schedule: Schedule, trained: np.ndarray, paces: np.ndarray) -> list[PlannedTurn]:
    """Return the turns of the first asynchronous rounds, in the order in which they begin.

    Parameters
    ----------
    trained : the number of each client of the schedule, ``int64[n]``.
    paces : as :func:`paces_of` returns them.
    """
    last_round = min(DRAWN_ROUNDS, schedule.num_rounds)
    num_turns = int(np.searchsorted(schedule.rounds, last_round, side="right"))
    places = _places(schedule.begins[:num_turns], schedule.ends[:num_turns])
    shown = _drawn_places(1 + int(places.max()))
    clients = trained[schedule.clients[:num_turns]]

    planned_turns = []
    for turn in range(num_turns):
        if int(places[turn]) not in shown:
            continue
        kind: TurnKind = "counted" if schedule.joins[turn] else "unfinished"
        if schedule.drops[turn]:
            kind = "dropped"
        planned_turns.append(
            PlannedTurn(
                round=int(schedule.rounds[turn]),
                client=int(clients[turn]),
                place=int(places[turn]),
                begins=float(schedule.begins[turn]),
                ends=float(schedule.ends[turn]),
                kind=kind,
                pace=int(paces[clients[turn]]),
            )
        )
    return planned_turns


def _places(begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Give each turn the first place that is free when it begins, ``int64[n]``; turns come as they begin."""
    places = np.zeros(len(begins), dtype=np.int64)
    free: list[int] = []
    taken: list[tuple[float, int]] = []
    for turn, begin in enumerate(begins.tolist()):
        while taken and taken[0][0] <= begin:
            _, place = heapq.heappop(taken)
            heapq.heappush(free, place)
        place = heapq.heappop(free) if free else len(taken)
        places[turn] = place
        heapq.heappush(taken, (float(ends[turn]), place))
    return places


def _drawn_places(num_places: int) -> set[int]:
    spread: Iterable[float] = np.linspace(0, num_places - 1, min(num_places, DRAWN_PLACES))
    return {round(place) for place in spread}
