"""How a cohort is drawn, and cut into groups.

The cut depends on the cohort, the model and the clients' sizes, never on the actors, so that results do not either.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

import numpy as np

from raypfl.common import rng
from raypfl.federation.settings import CohortSettings

VECTORISED_GROUP = 50
"""Clients a vectorised group wants: in groups of 25 each takes 1.4 times as long, for what every operation costs; in
groups of 100, 0.9 times."""

EVALUATION_GROUP = 100
"""Clients a vectorised group has when models are judged, where there are enough: a forward pass is soon done."""

EVALUATION_GROUPS = 8
"""Groups that are not made larger than in training for that, so that actors have something to share."""

SEQUENTIAL_GROUP = 5
"""Clients that the largest sequential group of a cohort has, unless the cohort is small. Fewer would cost a model's way
to the server more often; more would let actors wait for the last group longer."""

SEQUENTIAL_SHARE = 8
"""The largest sequential group has at most this part of a cohort: eight actors still have something to do."""


@dataclass(frozen=True)
class Draw:
    """Who takes part in a round: `clients` do, `dropped` vanish after its first message."""

    clients: tuple[int, ...]
    dropped: tuple[int, ...] = ()


def cohort_size(settings: CohortSettings, num_clients: int) -> int:
    """Clients drawn a round."""
    if settings.size is not None:
        return settings.size
    # 0.1 * 30 is a little more than 3, and no fourth client is meant.
    return max(1, math.ceil(settings.fraction * num_clients - 1e-9))


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


def even(cohort: int, groups: int) -> list[int]:
    """Sizes of so many groups, as equal as can be; fewer if there are not as many clients."""
    return [len(part) for part in np.array_split(np.arange(cohort), max(1, min(groups, cohort)))]


def group_sizes(cohort: int, executor: str) -> list[int]:
    """Sizes of the groups that a cohort is cut into.

    Vectorised ones are equal. Sequential ones shrink to single clients: the large ones cost little to hand out, and
    with the small ones the actors, however many there are, finish together (trapezoid self-scheduling, Tzen and Ni
    1993).
    """
    if executor == "vectorised":
        return even(cohort, max(1, round(cohort / VECTORISED_GROUP)))
    return shrinking(cohort, min(SEQUENTIAL_GROUP, -(-cohort // SEQUENTIAL_SHARE)))


def shrinking(cohort: int, largest: int) -> list[int]:
    """Sizes of groups that shrink evenly from the `largest` to single clients."""
    wanted = np.linspace(largest, 1, max(1, 2 * cohort // (largest + 1)))
    ends = np.round(np.cumsum(wanted) * cohort / wanted.sum()).astype(int)
    return np.diff(ends, prepend=0).tolist()


def evaluation_group_sizes(clients: int, executor: str) -> list[int]:
    """Sizes of the groups that clients are cut into to be judged."""
    sizes = group_sizes(clients, executor)
    if executor != "vectorised":
        return sizes
    return even(clients, max(-(-clients // EVALUATION_GROUP), min(len(sizes), EVALUATION_GROUPS)))


def cut(costs: np.ndarray, sizes: list[int], executor: str) -> list[np.ndarray]:
    """Positions ``0..C-1`` of a cohort in groups of these sizes, the costliest first.

    Vectorised groups get clients of similar cost, since a group takes as long as its longest member; sequential ones
    cost as much as they have clients, as nearly as can be.
    """
    ranked = np.argsort(-costs, kind="stable")
    groups = np.split(ranked, np.cumsum(sizes)[:-1]) if executor == "vectorised" else _dealt(costs, ranked, sizes)
    return sorted((np.sort(g) for g in groups), key=lambda g: (-costs[g].sum(), g[0]))


def _dealt(costs: np.ndarray, ranked: np.ndarray, sizes: list[int]) -> list[np.ndarray]:
    """The costliest client goes to the group that is farthest from its share of the cohort's cost, then the next."""
    share = float(costs.sum()) / len(costs)
    open_groups = [(-share * size, i) for i, size in enumerate(sizes)]
    heapq.heapify(open_groups)
    groups: list[list[int]] = [[] for _ in sizes]
    for position in ranked:
        missing, i = heapq.heappop(open_groups)
        groups[i].append(int(position))
        if len(groups[i]) < sizes[i]:
            heapq.heappush(open_groups, (missing + float(costs[position]), i))
    return [np.array(group) for group in groups]
