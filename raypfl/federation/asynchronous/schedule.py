"""The order of events of asynchronous rounds, known before anything trains, with NumPy alone.

How long a turn takes follows from sizes, speeds and bandwidths, and who is drawn from the seed. So the schedule depends
on no clock and no model: simulated and real time are apart, and a resumed run makes the same schedule again.
"""

from __future__ import annotations

import heapq
import math
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from raypfl.common import rng
from raypfl.common.errors import ConfigError
from raypfl.devices import Always, Availability
from raypfl.federation.cohort_draw import draw_cohort
from raypfl.federation.settings import CohortSettings

DRAWS = 4096
"""Random numbers that are made at once: one at a time, NumPy would take longer than all the rest."""

LOOKS = 16
"""How many clients are drawn one by one in search of one that can be reached, before all are checked at once."""


@dataclass(frozen=True)
class ScheduledClients:
    """The clients of a schedule.

    Attributes
    ----------
    seconds : how long each client's turn takes, ``float64[num_clients]``, above 0.
    size : number of clients that train at a time, if enough can be reached.
    dropout : probability that a client does not reply. Another is drawn when its turn would have ended.
    availability : when clients can be reached.
    """

    seconds: np.ndarray
    size: int
    dropout: float = 0.0
    availability: Availability = field(default_factory=Always)


@dataclass(frozen=True)
class Schedule:
    """All turns until a number of rounds is finished, in the order in which they begin. Rounds count from 1.

    Attributes
    ----------
    clients : the client of each turn, ``int32[T]``.
    rounds : the round in which the client is sent its message: the first one that its reply could be part of.
    joins : the round that the reply is part of, ``int32[T]``; 0: none.
    drops : whether the client drops out and never replies, ``bool[T]``.
    begins, ends : seconds since the start, ``float64[T]``.
    replies : the turns whose replies are part of rounds, in the order of their arrival, ``int32[R]``.
    round_ends : when each round is finished, ``float64[num_rounds]``.
    """

    clients: np.ndarray
    rounds: np.ndarray
    joins: np.ndarray
    drops: np.ndarray
    begins: np.ndarray
    ends: np.ndarray
    replies: np.ndarray
    round_ends: np.ndarray

    @property
    def num_rounds(self) -> int:
        return len(self.round_ends)

    @cached_property
    def round_begins(self) -> np.ndarray:
        """When each round begins, ``float64[num_rounds]``: where the one before ends."""
        return np.concatenate([[0.0], self.round_ends[:-1]])

    def end_of(self, round: int) -> float:
        """Return when a round ends, in seconds since the start, which is the end of round 0."""
        return float(self.round_ends[round - 1]) if round else 0.0

    @property
    def staleness(self) -> np.ndarray:
        """How many models were made while each reply was under way, ``int32[R]``, in the order of arrival."""
        return self._joined - self.rounds[self.replies]

    @cached_property
    def _joined(self) -> np.ndarray:
        return self.joins[self.replies]

    def per_round(self, rounds: np.ndarray) -> np.ndarray:
        """Count how often each round is among ``int32[n]`` rounds: ``int64[num_rounds]``."""
        return np.bincount(rounds, minlength=self.num_rounds + 1)[1:]

    def joules(self, watts: np.ndarray) -> np.ndarray:
        """Return the energy of each round's turns, ``float64[num_rounds]``.

        A turn counts in the round that its reply is part of or, if the client drops out, in which it began.

        `watts` : electrical power of each client's device, ``float64[num_clients]``.
        """
        counted_in = np.where(self.drops, self.rounds, self.joins)
        joules = (self.ends - self.begins) * watts[self.clients]
        return np.bincount(counted_in, weights=joules, minlength=self.num_rounds + 1)[1:]

    def sent_in(self, round: int) -> np.ndarray:
        """Return the turns that begin in a round, ``int64[n]``."""
        first, end = np.searchsorted(self.rounds, [round, round + 1])
        return np.arange(first, end)

    def joining(self, first: int, last: int) -> np.ndarray:
        """Return the turns whose replies are part of these rounds, ``int32[n]``, in the order of arrival."""
        start, end = np.searchsorted(self._joined, [first, last + 1])
        return self.replies[start:end]

    def wave_from(self, round: int) -> int:
        """Return the last round of the wave that begins here: rounds that need no client which is sent messages later.

        All clients of a wave can train at once. No cut into fewer waves is possible: each of them but the last ends for
        a client that is sent its message after the wave has begun, and is needed when the next one begins. No two of
        these clients can train at once.
        """
        last = round
        while last < self.num_rounds and self.rounds[self.joining(last + 1, last + 1)].max() <= round:
            last += 1
        return last


def make_schedule(
    scheduled: ScheduledClients, num_rounds: int, seed: int, buffer: int, window: float | None = None
) -> Schedule:
    """Return the schedule of asynchronous rounds.

    A client whose reply has come is drawn again only once the reply is part of a round. Replies that come at the same
    moment are all taken in before anyone is drawn.

    Parameters
    ----------
    buffer : the number of replies that end a round.
    window : the seconds after which a round ends with fewer replies, but one at least; None: none does.

    Raises
    ------
    ConfigError : if too few clients can ever be reached.
    """
    return _Simulation(scheduled, seed, buffer, window).run(num_rounds)


class _Simulation:
    """The state of the simulation at a moment."""

    def __init__(self, scheduled: ScheduledClients, seed: int, buffer: int, window: float | None):
        self._scheduled = scheduled
        self._buffer = buffer
        self._window = window
        self._seed = seed
        self._seconds = array("d", scheduled.seconds)
        self._random = _random_numbers(seed)
        self._is_always_available = isinstance(scheduled.availability, Always)

        self._time = 0.0
        self._round = 1
        self._round_began = 0.0
        # Clients that are at work or whose reply waits cannot be drawn; the others are in no particular order.
        self._free = array("i", range(len(scheduled.seconds)))
        self._place_of = array("i", range(len(scheduled.seconds)))
        # (when the turn ends, the turn)
        self._at_work: list[tuple[float, int]] = []
        self._waiting: list[int] = []

        self._clients = array("i")
        self._rounds = array("i")
        self._begins = array("d")
        self._drops = bytearray()
        self._replies = array("i")
        self._joined = array("i")
        self._round_ends = array("d")

    def run(self, num_rounds: int) -> Schedule:
        while self._round <= num_rounds:
            retry = self._fill()
            self._take_lone_replies(num_rounds)
            if self._round > num_rounds:
                break
            next_reply = self._at_work[0][0] if self._at_work else math.inf
            self._time = min(retry, next_reply, self._window_end())
            if math.isinf(self._time):
                self._refuse_stuck()
            self._take_replies(num_rounds)
        return self._schedule()

    def _take_lone_replies(self, num_rounds: int) -> None:
        """Take in replies, and draw a client after each, until two come at the same moment.

        If all can be reached and nobody drops out, this does what `run` does in a third of the time: everything is in
        local variables, and a new turn takes the place of the old one in the heap.
        """
        at_work = self._at_work
        free = self._free
        is_plain = self._is_always_available and not self._scheduled.dropout and self._window is None
        if not is_plain or len(at_work) < max(self._scheduled.size, 3) or not free or _is_tied(at_work):
            return

        buffer = self._buffer
        seconds = self._seconds
        place_of = self._place_of
        waiting = self._waiting
        clients = self._clients
        begins = self._begins
        num_free = len(free)
        new_turn = len(clients)
        for number in self._random:
            time, turn = at_work[0]
            waiting.append(turn)
            if len(waiting) == buffer:
                self._rounds.extend([self._round] * (new_turn - len(self._rounds)))
                self._time = time
                self._end_round()
                num_free = len(free)
                if self._round > num_rounds:
                    break

            # The same as `_draw`, `_take` and `_begin`.
            place = number % num_free
            client = free[place]
            last = free.pop()
            num_free -= 1
            if last != client:
                free[place] = last
                place_of[last] = place
            clients.append(client)
            begins.append(time)
            heapq.heapreplace(at_work, (time + seconds[client], new_turn))
            new_turn += 1

            next_time = at_work[0][0]
            if not num_free or at_work[1][0] == next_time or at_work[2][0] == next_time:
                break

        self._rounds.extend([self._round] * (new_turn - len(self._rounds)))
        self._drops.extend(bytes(new_turn - len(self._drops)))

    def _take_replies(self, num_rounds: int) -> None:
        """Take in all replies that come now."""
        while self._at_work and self._at_work[0][0] == self._time:
            _, turn = heapq.heappop(self._at_work)
            if self._drops[turn]:
                self._set_free(self._clients[turn])
                continue

            self._waiting.append(turn)
            if len(self._waiting) == self._buffer:
                self._end_round()
                if self._round > num_rounds:
                    return

        if self._time == self._window_end():
            self._end_round()

    def _window_end(self) -> float:
        """Return when the round ends although the buffer is not full; infinite: not before another event."""
        if self._window is None or not self._waiting:
            return math.inf
        return max(self._round_began + self._window, self._time)

    def _end_round(self) -> None:
        self._replies.extend(self._waiting)
        self._joined.extend([self._round] * len(self._waiting))
        replied = [self._clients[turn] for turn in self._waiting]
        for place, client in enumerate(replied, len(self._free)):
            self._place_of[client] = place
        self._free.extend(replied)
        self._waiting.clear()
        self._round_ends.append(self._time)
        self._round_began = self._time
        self._round += 1

    def _fill(self) -> float:
        """Draw clients until enough are at work; return when to try again if too few can be reached."""
        missing = self._scheduled.size - len(self._at_work)
        # As in a synchronous round, a cohort that begins together is drawn together.
        if not self._at_work and not self._waiting and self._is_always_available and missing <= len(self._free):
            cohort = CohortSettings(size=missing)
            for client in draw_cohort(cohort, len(self._seconds), self._seed, self._round).clients:
                self._begin(client)
            return math.inf

        for _ in range(min(missing, len(self._free))):
            free_client = self._draw()
            if free_client is None:
                return self._next_reachable()
            self._begin(free_client)
        return math.inf

    def _draw(self) -> int | None:
        """Return a free client that can be reached now, each with the same probability; None if there is none."""
        if self._is_always_available:
            return self._free[next(self._random) % len(self._free)]

        availability = self._scheduled.availability
        for _ in range(LOOKS):
            client = self._free[next(self._random) % len(self._free)]
            if availability.is_one_available(client, self._time):
                return client

        free = np.sort(np.array(self._free))
        reachable = free[availability.is_available(free, self._time)]
        return int(reachable[next(self._random) % len(reachable)]) if len(reachable) else None

    def _next_reachable(self) -> float:
        """Return when the next free client can be reached."""
        return float(self._scheduled.availability.next_available(np.array(self._free), self._time).min())

    def _begin(self, client: int) -> None:
        turn = len(self._clients)
        self._take(client)
        self._clients.append(client)
        self._rounds.append(self._round)
        self._begins.append(self._time)
        drops = self._scheduled.dropout > 0 and next(self._random) < self._scheduled.dropout * 2.0**64
        self._drops.append(drops)
        heapq.heappush(self._at_work, (self._time + self._seconds[client], turn))

    def _take(self, client: int) -> None:
        """Remove a client from the free ones; the last of them moves to its place."""
        place = self._place_of[client]
        last = self._free.pop()
        if last != client:
            self._free[place] = last
            self._place_of[last] = place

    def _set_free(self, client: int) -> None:
        self._place_of[client] = len(self._free)
        self._free.append(client)

    def _refuse_stuck(self) -> None:
        raise ConfigError(
            f"asynchronous.buffer is {self._buffer}, but after {len(self._waiting)} replies of round {self._round} no "
            "client is left that can be reached: a client is drawn again only once its reply is part of a round. Lower "
            "asynchronous.buffer, or change devices.availability."
        )

    def _schedule(self) -> Schedule:
        clients = np.array(self._clients, dtype=np.int32)
        begins = np.array(self._begins)
        replies = np.array(self._replies, dtype=np.int32)
        joins = np.zeros(len(clients), dtype=np.int32)
        joins[replies] = np.array(self._joined, dtype=np.int32)
        return Schedule(
            clients=clients,
            rounds=np.array(self._rounds, dtype=np.int32),
            joins=joins,
            drops=np.frombuffer(self._drops, dtype=bool),
            begins=begins,
            ends=begins + self._scheduled.seconds[clients],
            replies=replies,
            round_ends=np.array(self._round_ends),
        )


def _is_tied(heap: list[tuple[float, int]]) -> bool:
    """Return whether the first two of at least three turns end at the same moment."""
    return heap[0][0] in (heap[1][0], heap[2][0])


def _random_numbers(seed: int) -> Iterator[int]:
    """Yield random whole numbers below 2^64."""
    block = 0
    while True:
        keys = rng.keys(seed, "turns", block, np.arange(DRAWS))
        yield from keys.tolist()
        block += 1
