"""How the cohort of a round is drawn from the clients."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from raypfl.common import rng
from raypfl.federation.settings import CohortSettings


@dataclass(frozen=True)
class CohortDraw:
    """Who takes part in a round.

    Attributes
    ----------
    clients : the clients of the cohort, ascending.
    dropped : the clients that receive the round's first message and then vanish.
    """

    clients: tuple[int, ...]
    dropped: tuple[int, ...] = ()


def cohort_size(settings: CohortSettings, num_clients: int) -> int:
    """Return the number of clients drawn in a round."""
    if settings.size is not None:
        return settings.size
    # In floating point, 0.1 * 30 is a little more than 3: rounded up, it would draw a fourth client.
    return max(1, math.ceil(settings.fraction * num_clients - 1e-9))


def draw_cohort(settings: CohortSettings, num_clients: int, seed: int, round: int) -> CohortDraw:
    """Draw the cohort of a round, uniformly and without replacement among the reachable clients.

    As long as enough clients are reachable, this takes time in proportion to the cohort, not to the population.
    """
    size = min(cohort_size(settings, num_clients), num_clients)
    num_candidates = 2 * size if settings.availability else size
    tries = 0
    while True:
        num_candidates = min(num_candidates, num_clients)
        generator = rng.generator(seed, "cohort", round, *range(tries))
        candidates = generator.choice(num_clients, num_candidates, replace=False)
        reachable = _reachable(settings, seed, round, candidates)
        if len(reachable) >= size or num_candidates == num_clients:
            break

        # A new draw, not more of this one, so that every reachable client is as likely as any other.
        num_candidates = 4 * num_candidates
        tries += 1

    cohort = np.sort(reachable[:size])
    if not settings.dropout:
        return CohortDraw(tuple(cohort.tolist()))
    is_dropped = rng.uniform(rng.keys(seed, "dropout", round, cohort)) < settings.dropout
    return CohortDraw(tuple(cohort[~is_dropped].tolist()), tuple(cohort[is_dropped].tolist()))


def _reachable(settings: CohortSettings, seed: int, round: int, clients: np.ndarray) -> np.ndarray:
    if settings.availability is None:
        return clients

    low = settings.availability["low"]
    high = settings.availability["high"]
    # Keyed by round 0: a client's chance stays the same in all rounds.
    chance = low + (high - low) * rng.uniform(rng.keys(seed, "availability", 0, clients))
    return clients[rng.uniform(rng.keys(seed, "reachable", round, clients)) < chance]
