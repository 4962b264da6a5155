"""How the cohort of a round is drawn from the clients, and how long its round takes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from raypfl.common import rng
from raypfl.common.errors import ConfigError
from raypfl.devices import Always, ClientTurns
from raypfl.federation.settings import CohortSettings

Choose = Callable[[np.ndarray, int, int], np.ndarray]
"""Chooses a round's clients from those that can be reached, ascending, how many to choose, and the round's number."""


@dataclass(frozen=True)
class CohortDraw:
    """Who takes part in a round, and in which simulated time.

    Attributes
    ----------
    clients : the clients of the cohort, ascending.
    dropped : the clients that receive the round's first message and then vanish.
    late : the clients that receive the round's first message, and finish when the round is over.
    work : the share of its local steps that each of `clients` does, ``float64[n]``; None: all of them.
    begins : simulated seconds from the start of the run to that of the round.
    seconds : simulated seconds of the round.
    joules : energy that all these clients use.
    staleness : in an asynchronous run, the number of models that were made while each of `clients` was at work.
    """

    clients: tuple[int, ...]
    dropped: tuple[int, ...] = ()
    late: tuple[int, ...] = ()
    work: np.ndarray | None = None
    begins: float = 0.0
    seconds: float = 0.0
    joules: float = 0.0
    staleness: tuple[int, ...] = ()

    @property
    def lost(self) -> tuple[int, ...]:
        """The clients of which the round has no reply: all that they receive in it is its first message."""
        return (*self.dropped, *self.late)

    @property
    def ends(self) -> float:
        """Simulated seconds from the start of the run to the end of the round."""
        return self.begins + self.seconds


def cohort_size(settings: CohortSettings, num_clients: int) -> int:
    """Return the number of clients drawn in a round; `num_clients` : the number of those that are trained."""
    if settings.size is not None:
        return min(settings.size, num_clients)
    # In floating point, 0.1 * 30 is a little more than 3: rounded up, it would draw a fourth client.
    return max(1, math.ceil(settings.fraction * num_clients - 1e-9))


def draw_cohort(
    settings: CohortSettings,
    num_clients: int,
    seed: int,
    round: int,
    turns: ClientTurns | None = None,
    trained: np.ndarray | None = None,
    time: float = 0.0,
    choose: Choose | None = None,
) -> CohortDraw:
    """Draw the cohort of a round, without replacement among the clients that can be reached.

    Without `choose`, the draw is uniform and, as long as enough clients can be reached, takes time in proportion to the
    cohort, not to the population.

    Parameters
    ----------
    num_clients : the number of clients that are trained.
    turns : the clients' turns; None: all can be reached, none fails, and there is no clock.
    trained : the numbers of the trained clients, ``int64[num_clients]``; None: 0 to ``num_clients - 1``.
    time : simulated seconds at which the round may begin; if no client can be reached then, it begins later.
    choose : the function that chooses among the clients that can be reached; None: uniformly at random.

    Raises
    ------
    ConfigError : if no client can be reached at any time from `time` on.
    """
    turns = turns or ClientTurns(seed)
    size = cohort_size(settings, num_clients)
    num_drawn = min(math.ceil(settings.over_selection * size - 1e-9), num_clients)
    begins = time if turns.has_clock else float(round)

    def clients_at(begins: float) -> np.ndarray:
        if choose is None:
            return _draw_reachable(num_drawn, num_clients, seed, round, trained, begins, turns)
        everybody = np.arange(num_clients) if trained is None else trained
        return choose(everybody[turns.availability.is_available(everybody, begins)], num_drawn, round)

    clients = clients_at(begins)
    if turns.has_clock and not len(clients):
        begins = _next_begin(turns, np.arange(num_clients) if trained is None else trained, begins)
        clients = clients_at(begins)

    if not turns.has_clock and not turns.dropout and not turns.partial_work:
        return CohortDraw(tuple(clients.tolist()))

    is_dropped = turns.is_dropped(round, clients)
    active = clients[~is_dropped]
    dropped = clients[is_dropped]
    shares = turns.work_shares(round, active)
    if turns.has_clock:
        return _timed(settings, size, turns, active, shares, dropped, begins)
    return CohortDraw(tuple(active.tolist()), tuple(dropped.tolist()), work=_unless_whole(shares))


def _draw_reachable(
    size: int,
    num_clients: int,
    seed: int,
    round: int,
    trained: np.ndarray | None,
    time: float,
    turns: ClientTurns,
) -> np.ndarray:
    """Draw clients that can be reached at a time, at most `size` of them, ascending."""
    is_always_available = isinstance(turns.availability, Always)
    num_candidates = size if is_always_available else 2 * size
    tries = 0
    while True:
        num_candidates = min(num_candidates, num_clients)
        generator = rng.generator(seed, "cohort", round, *range(tries))
        candidates = generator.choice(num_clients, num_candidates, replace=False)
        if trained is not None:
            candidates = trained[candidates]
        reachable = candidates
        if not is_always_available:
            reachable = candidates[turns.availability.is_available(candidates, time)]
        if len(reachable) >= size or num_candidates == num_clients:
            return np.sort(reachable[:size])

        # A new draw, not more of this one, so that every reachable client is as likely as any other.
        num_candidates = 4 * num_candidates
        tries += 1


def _next_begin(turns: ClientTurns, clients: np.ndarray, time: float) -> float:
    """Return the first time at which any client can be reached."""
    following = float(turns.availability.next_available(clients, time).min())
    if math.isinf(following):
        raise ConfigError(
            f"From {time:.0f} simulated seconds on, no client can ever be reached again, so there are no more rounds; "
            "change devices.availability, or train fewer rounds."
        )
    return following


def _timed(
    settings: CohortSettings,
    size: int,
    turns: ClientTurns,
    active: np.ndarray,
    shares: np.ndarray,
    dropped: np.ndarray,
    begins: float,
) -> CohortDraw:
    """Divide the clients of a round into those that finish in time and those that are late."""
    assert turns.devices is not None
    deadline = math.inf if settings.deadline is None else settings.deadline
    if settings.late == "partial":
        fitting = turns.shares_within(active, deadline)
        shares = np.where(fitting > 0, np.minimum(shares, fitting), shares)

    seconds = turns.turn_seconds(active, shares)
    by_finish = np.lexsort((active, seconds))
    # The time of a share that fits the deadline may round up to just after it.
    num_in_time = int((seconds <= deadline * (1 + 1e-12)).sum())
    num_needed = math.ceil(settings.quorum * size - 1e-9)
    num_counted = min(max(num_in_time, num_needed), size, len(active))
    counted = np.sort(by_finish[:num_counted])
    late = np.sort(by_finish[num_counted:])

    # After each exchange, all wait for the slowest.
    round_seconds = float(turns.exchange_seconds(active[counted], shares[counted]).max(axis=1, initial=0.0).sum())
    # The server notices that a client has disappeared when its first message has been sent.
    noticed = turns.download_seconds(dropped)
    if num_counted < size:
        missing = math.inf if len(late) else float(noticed.max(initial=0.0))
        round_seconds = max(round_seconds, min(missing, deadline))

    # Clients that are late are told to stop when the round ends.
    busy = np.minimum(seconds, round_seconds)
    receiving = np.minimum(noticed, round_seconds)
    joules = turns.devices.watts[active] @ busy + turns.devices.watts[dropped] @ receiving
    return CohortDraw(
        clients=tuple(active[counted].tolist()),
        dropped=tuple(dropped.tolist()),
        late=tuple(active[late].tolist()),
        work=_unless_whole(shares[counted]),
        begins=begins,
        seconds=round_seconds,
        joules=float(joules),
    )


def _unless_whole(shares: np.ndarray) -> np.ndarray | None:
    return None if (shares == 1).all() else shares
