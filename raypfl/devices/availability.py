"""When clients can be reached: recurring spans of time, or chances that are drawn anew every so often."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable

import numpy as np

from raypfl.common import rng
from raypfl.common.errors import ConfigError

SHORTEST_SPAN = 1e-3
"""Seconds of the shortest span: far more than the rounding of a time of 1e9 seconds, 1e-7."""

MOST_DRAWS = 10_000
"""Draws without success after which a client counts as never available: more than a year of hours."""


class Availability(ABC):
    """Which clients can be reached at which time. Times are in seconds, and may jump."""

    @abstractmethod
    def is_available(self, clients: np.ndarray, time: float | np.ndarray) -> np.ndarray:
        """Return whether each client can be reached, ``bool[n]``.

        Parameters
        ----------
        clients : the clients' numbers, ``int64[n]``.
        time : one time for all, or ``float64[n]``.
        """

    @abstractmethod
    def next_available(self, clients: np.ndarray, time: float | np.ndarray) -> np.ndarray:
        """Return the first time from `time` on at which each client can be reached, ``float64[n]``; inf for never.

        ``is_available`` is true at that time.
        """

    def is_one_available(self, client: int, time: float) -> bool:
        """Return :meth:`is_available` of one client, fast: a schedule asks a million times."""
        return bool(self.is_available(np.array([client]), time)[0])

    def of(self, owners: np.ndarray) -> Availability:
        """Return the availability of other clients: client i is available when client ``owners[i]`` is here."""
        return _Renumbered(self, owners)


class Always(Availability):
    """Every client can always be reached."""

    def is_available(self, clients: np.ndarray, time: float | np.ndarray) -> np.ndarray:
        return np.ones(len(clients), dtype=bool)

    def next_available(self, clients: np.ndarray, time: float | np.ndarray) -> np.ndarray:
        return np.broadcast_to(np.asarray(time, dtype=np.float64), len(clients)).copy()

    def of(self, owners: np.ndarray) -> Availability:
        return self


class Spans(Availability):
    """Each client can be reached in its own spans, which recur after a period.

    Parameters
    ----------
    clients : the client of each span, ``int64[S]``, in any order.
    starts, ends : ``float64[S]``: spans ``[start, end)`` with ``0 <= start < period`` and ``end <= start + period``.
    periods : the period of each client, ``float64[num_clients]``; one number: that of all.
    num_clients : the number of clients; one without a span is never available.

    Raises
    ------
    ConfigError : if spans of a client overlap, are shorter than a millisecond, or lie outside of the period.
    """

    def __init__(
        self,
        clients: np.ndarray,
        starts: np.ndarray,
        ends: np.ndarray,
        periods: float | np.ndarray,
        num_clients: int,
    ):
        self._periods = np.broadcast_to(np.asarray(periods, dtype=np.float64), num_clients)
        period_of_span = self._periods[clients]
        wrong = (starts < 0) | (starts >= period_of_span) | (ends > starts + period_of_span)
        _refuse(clients, starts, ends, wrong, "which is not within the period")
        _refuse(clients, starts, ends, ends - starts < SHORTEST_SPAN, "which is shorter than a millisecond")

        # A span over the period's end becomes two.
        wraps = ends > period_of_span
        clients = np.concatenate([clients, clients[wraps]])
        first_ends = np.minimum(ends, period_of_span)
        rest_ends = (ends - period_of_span)[wraps]
        starts = np.concatenate([starts, np.zeros(len(rest_ends))])
        ends = np.concatenate([first_ends, rest_ends])

        order = np.lexsort((starts, clients))
        clients = clients[order]
        self._starts = starts[order]
        self._ends = ends[order]
        self._first = np.searchsorted(clients, np.arange(num_clients + 1))
        overlaps = np.zeros(len(clients), dtype=bool)
        overlaps[1:] = (clients[1:] == clients[:-1]) & (self._starts[1:] < self._ends[:-1])
        _refuse(clients, self._starts, self._ends, overlaps, "which overlaps the one before")

    def is_available(self, clients: np.ndarray, time: float | np.ndarray) -> np.ndarray:
        clients = np.asarray(clients)
        first = self._first[clients]
        in_period = np.broadcast_to(np.mod(time, self._periods[clients]), len(clients))
        span = self._last_begun(clients, in_period)
        has_begun = span >= first
        available = np.zeros(len(clients), dtype=bool)
        available[has_begun] = in_period[has_begun] < self._ends[span[has_begun]]
        return available

    def is_one_available(self, client: int, time: float) -> bool:
        # A few microseconds; `is_available` takes a hundred for an array of one.
        in_period = time % self._periods[client]
        first = self._first[client]
        span = bisect_right(self._starts, in_period, first, self._first[client + 1]) - 1
        return bool(span >= first and in_period < self._ends[span])

    def next_available(self, clients: np.ndarray, time: float | np.ndarray) -> np.ndarray:
        clients = np.asarray(clients)
        times = np.broadcast_to(np.asarray(time, dtype=np.float64), len(clients)).copy()
        waiting = np.flatnonzero(~self.is_available(clients, times))
        if not len(waiting):
            return times

        clients = clients[waiting]
        periods = self._periods[clients]
        in_period = np.mod(times[waiting], periods)
        following = self._last_begun(clients, in_period) + 1
        begins_again = following >= self._first[clients + 1]
        following = np.where(begins_again, self._first[clients], following)
        has_spans = self._first[clients] < self._first[clients + 1]

        arrivals = np.full(len(clients), np.inf)
        starts = self._starts[following[has_spans]] + periods[has_spans] * begins_again[has_spans]
        arrivals[has_spans] = (times[waiting] - in_period)[has_spans] + starts

        # The sum may round to a moment before the start. Spans are longer than any such rounding, so this ends.
        early = np.flatnonzero(has_spans)
        while len(early):
            early = early[~self.is_available(clients[early], arrivals[early])]
            arrivals[early] = np.nextafter(arrivals[early], np.inf)
        times[waiting] = arrivals
        return times

    def _last_begun(self, clients: np.ndarray, in_period: np.ndarray) -> np.ndarray:
        """Return the number of each client's last span that has begun, by bisection; one before its first if none."""
        low = self._first[clients]
        high = self._first[clients + 1]
        while (low < high).any():
            middle = (low + high) // 2
            is_open = low < high
            # Where the search has ended, `middle` may be out of range.
            has_begun = is_open & (self._starts[np.minimum(middle, len(self._starts) - 1)] <= in_period)
            low = np.where(has_begun, middle + 1, low)
            high = np.where(is_open & ~has_begun, middle, high)
        return low - 1


class _Renumbered(Availability):
    """Clients that are available when others are, ``int64[num_clients]``."""

    def __init__(self, availability: Availability, owners: np.ndarray):
        self._availability = availability
        self._owners = owners

    def is_available(self, clients: np.ndarray, time: float | np.ndarray) -> np.ndarray:
        return self._availability.is_available(self._owners[clients], time)

    def is_one_available(self, client: int, time: float) -> bool:
        return self._availability.is_one_available(self._owners[client], time)

    def next_available(self, clients: np.ndarray, time: float | np.ndarray) -> np.ndarray:
        return self._availability.next_available(self._owners[clients], time)


class Chances(Availability):
    """Each client can be reached with a chance that may change over time; each draw holds for some seconds.

    Parameters
    ----------
    chances : ``chances(clients, draws) -> float64[n]``, the chance of each client in the draw of that number from 0.
    every : the seconds for which a draw holds.
    seed : the run's seed.
    """

    def __init__(self, chances: Callable[[np.ndarray, np.ndarray], np.ndarray], every: float, seed: int):
        self._chances = chances
        self._every = every
        self._seed = seed

    def is_available(self, clients: np.ndarray, time: float | np.ndarray) -> np.ndarray:
        clients = np.asarray(clients)
        draws = np.broadcast_to(self._number(time), len(clients))
        available = np.zeros(len(clients), dtype=bool)
        # rng.keys takes one draw and many clients; usually there is only one draw.
        for draw in np.unique(draws):
            chosen = draws == draw
            keys = rng.keys(self._seed, "reachable", int(draw), clients[chosen])
            available[chosen] = rng.uniform(keys) < self._chances(clients[chosen], draws[chosen])
        return available

    def next_available(self, clients: np.ndarray, time: float | np.ndarray) -> np.ndarray:
        clients = np.asarray(clients)
        times = np.broadcast_to(np.asarray(time, dtype=np.float64), len(clients)).copy()
        waiting = np.flatnonzero(~self.is_available(clients, times))
        draws = self._number(times)
        for _ in range(MOST_DRAWS):
            if not len(waiting):
                return times
            draws[waiting] += 1
            # The product may round down to a time before the draw; then take the next float.
            starts = draws[waiting] * self._every
            starts = np.where(self._number(starts) < draws[waiting], np.nextafter(starts, np.inf), starts)
            available = self.is_available(clients[waiting], starts)
            times[waiting[available]] = starts[available]
            waiting = waiting[~available]
        times[waiting] = np.inf
        return times

    def _number(self, time: float | np.ndarray) -> np.ndarray:
        """Return the number of the draw that holds at a time."""
        return np.floor_divide(np.asarray(time, dtype=np.float64), self._every).astype(np.int64)


def _refuse(clients: np.ndarray, starts: np.ndarray, ends: np.ndarray, wrong: np.ndarray, why: str) -> None:
    if wrong.any():
        first = int(np.argmax(wrong))
        raise ConfigError(
            f"Client {clients[first]} is available from {starts[first]} s to {ends[first]} s, {why}; correct the spans "
            "of devices.availability."
        )
