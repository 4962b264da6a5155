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
    """The cohort of a round: uniform without replacement among the clients that are reachable, in ascending order."""
    reachable = np.arange(num_clients)
    if settings.availability is not None:
        low, high = settings.availability["low"], settings.availability["high"]
        chance = rng.generator(seed, "availability").uniform(low, high, num_clients)
        reachable = reachable[rng.generator(seed, "reachable", round).random(num_clients) < chance]
    size = min(cohort_size(settings, num_clients), len(reachable))
    drawn = np.sort(rng.generator(seed, "cohort", round).choice(reachable, size, replace=False))
    gone = np.zeros(size, dtype=bool)
    if settings.dropout:
        gone = np.array([rng.generator(seed, "dropout", round, int(c)).random() < settings.dropout for c in drawn])
    return Draw(tuple(drawn[~gone].tolist()), tuple(drawn[gone].tolist()))


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
