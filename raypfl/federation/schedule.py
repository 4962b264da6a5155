"""How a cohort is drawn, and cut into groups.

The cut depends on the cohort, the model and the clients' sizes, never on the actors, so that results do not either.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from raypfl import rng
from raypfl.settings import CohortSettings

VECTORISED_GROUP = 25
"""Clients a vectorised group wants: below, per-operation costs show; above, little more is gained."""

SEQUENTIAL_GROUPS = 8
"""Groups that a cohort of sequential clients is cut into at least, if it can be: two, four or eight actors share them
evenly, and each costs a model's way to the server."""

SEQUENTIAL_GROUP = 8
"""Clients a sequential group has at most; larger cohorts have more groups."""


@dataclass(frozen=True)
class Draw:
    """Who takes part in a round: `clients` do, `dropped` vanish after its first message."""

    clients: tuple[int, ...]
    dropped: tuple[int, ...] = ()


def cohort_size(settings: CohortSettings, num_clients: int) -> int:
    """Clients drawn a round."""
    return settings.size if settings.size is not None else max(1, round(settings.fraction * num_clients))


def draw(settings: CohortSettings, num_clients: int, seed: int, round: int) -> Draw:
    """The cohort of a round: uniform without replacement among the clients that are reachable, in ascending order.

    Takes time by the size of the cohort, not of the population, as long as enough clients are reachable.
    """
    size = min(cohort_size(settings, num_clients), num_clients)
    looked_at, tries = 2 * size if settings.availability else size, 0
    while True:
        looked_at = min(looked_at, num_clients)
        drawn = rng.generator(seed, "cohort", round, *range(tries)).choice(num_clients, looked_at, replace=False)
        reachable = drawn[_is_reachable(settings, seed, round, drawn)]
        if len(reachable) >= size or looked_at == num_clients:
            break
        # A draw of its own, not more of this one: so every reachable client is as likely as any other.
        looked_at, tries = 4 * looked_at, tries + 1
    cohort = np.sort(reachable[:size])
    gone = rng.uniform(rng.keys(seed, "dropout", round, cohort)) < settings.dropout
    return Draw(tuple(cohort[~gone].tolist()), tuple(cohort[gone].tolist()))


def _is_reachable(settings: CohortSettings, seed: int, round: int, clients: np.ndarray) -> np.ndarray:
    if settings.availability is None:
        return np.ones(len(clients), dtype=bool)
    low, high = settings.availability["low"], settings.availability["high"]
    chance = low + (high - low) * rng.uniform(rng.keys(seed, "availability", 0, clients))
    return rng.uniform(rng.keys(seed, "reachable", round, clients)) < chance


def group_count(cohort: int, executor: str) -> int:
    """Groups that a cohort of this size is cut into."""
    if executor == "vectorised":
        return max(round(cohort / VECTORISED_GROUP), 2 if cohort >= 16 else 1)
    return max(min(cohort, SEQUENTIAL_GROUPS), -(-cohort // SEQUENTIAL_GROUP))


def cut(costs: np.ndarray, count: int, executor: str) -> list[np.ndarray]:
    """Positions ``0..C-1`` of a cohort in `count` groups, the costliest first; fewer if there are not as many clients.

    Vectorised groups get clients of similar cost, since a group takes as long as its longest member; sequential ones
    are dealt so that every group costs about the same.
    """
    ranked = np.argsort(-costs, kind="stable")
    if executor == "vectorised":
        groups = np.array_split(ranked, count)
    else:
        lane = np.arange(len(ranked)) % (2 * count)
        lane = np.minimum(lane, 2 * count - 1 - lane)
        groups = [ranked[lane == i] for i in range(count)]
    groups = [np.sort(g) for g in groups if len(g)]
    return sorted(groups, key=lambda g: (-costs[g].sum(), g[0]))
