"""How a cohort is drawn and cut into groups, and after which rounds something is due.

The cut depends on the cohort, the model and the clients' sizes, never on the actors, so neither do results.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

import numpy as np

from raypfl.common import rng
from raypfl.federation.settings import CohortSettings

VECTORISED_GROUP = 50
"""Clients of a vectorised group. In groups of 25 a client takes 1.4 times as long, because of the fixed cost of every
operation; in groups of 100, 0.9 times."""

EVALUATION_GROUP = 100
"""Clients of a vectorised group in an evaluation, if there are enough: a forward pass is short."""

EVALUATION_GROUPS = 8
"""Groups that an evaluation keeps at least (or as many as training has), so that actors can share the work."""

SEQUENTIAL_GROUP = 5
"""Clients of the largest sequential group of a cohort. With fewer, more models travel to the server; with more, actors
wait longer for the last group."""

SEQUENTIAL_SHARE = 8
"""The largest sequential group has at most one of this many parts of a cohort, so that eight actors have work."""


@dataclass(frozen=True)
class Draw:
    """Who takes part in a round: `clients`; `dropped` clients receive its first message and then vanish."""

    clients: tuple[int, ...]
    dropped: tuple[int, ...] = ()


def cohort_size(settings: CohortSettings, num_clients: int) -> int:
    """Clients drawn a round."""
    if settings.size is not None:
        return settings.size
    # 0.1 * 30 is a little more than 3, and no fourth client is meant.
    return max(1, math.ceil(settings.fraction * num_clients - 1e-9))


def draw(settings: CohortSettings, num_clients: int, seed: int, round: int) -> Draw:
    """The cohort of a round: uniform without replacement among the reachable clients, in ascending order.

    As long as enough clients are reachable, this takes time in proportion to the cohort, not to the population.
    """
    size = min(cohort_size(settings, num_clients), num_clients)
    candidates, tries = 2 * size if settings.availability else size, 0
    while True:
        candidates = min(candidates, num_clients)
        drawn = rng.generator(seed, "cohort", round, *range(tries)).choice(num_clients, candidates, replace=False)
        reachable = drawn[_is_reachable(settings, seed, round, drawn)]
        if len(reachable) >= size or candidates == num_clients:
            break
        # A new draw, not more of this one, so that every reachable client is as likely as any other.
        candidates, tries = 4 * candidates, tries + 1
    cohort = np.sort(reachable[:size])
    gone = rng.uniform(rng.keys(seed, "dropout", round, cohort)) < settings.dropout
    return Draw(tuple(cohort[~gone].tolist()), tuple(cohort[gone].tolist()))


def _is_reachable(settings: CohortSettings, seed: int, round: int, clients: np.ndarray) -> np.ndarray:
    if settings.availability is None:
        return np.ones(len(clients), dtype=bool)
    low, high = settings.availability["low"], settings.availability["high"]
    chance = low + (high - low) * rng.uniform(rng.keys(seed, "availability", 0, clients))
    return rng.uniform(rng.keys(seed, "reachable", round, clients)) < chance


def is_due(round: int, every: int, rounds: int) -> bool:
    """Whether what happens every `every` rounds, and after the last one, happens after this round."""
    return round == rounds or (every > 0 and round % every == 0)


def even(cohort: int, groups: int) -> list[int]:
    """Sizes of `groups` groups, as equal as possible; fewer groups if there are fewer clients."""
    return [len(part) for part in np.array_split(np.arange(cohort), max(1, min(groups, cohort)))]


def group_sizes(cohort: int, executor: str) -> list[int]:
    """Sizes of the groups that a cohort is cut into.

    Vectorised ones are equal. Sequential ones shrink to single clients: large ones keep messages few, and with small
    ones at the end any number of actors finish together (trapezoid self-scheduling, Tzen and Ni 1993).
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
    """Sizes of the groups that clients are cut into for an evaluation."""
    sizes = group_sizes(clients, executor)
    if executor != "vectorised":
        return sizes
    return even(clients, max(-(-clients // EVALUATION_GROUP), min(len(sizes), EVALUATION_GROUPS)))


def cut(costs: np.ndarray, sizes: list[int], executor: str) -> list[np.ndarray]:
    """Positions ``0..C-1`` of a cohort in groups of these sizes, the costliest first.

    Vectorised groups get clients of similar cost, since a group takes as long as its longest member. The cost of a
    sequential group is as nearly in proportion to its clients as possible.
    """
    ranked = np.argsort(-costs, kind="stable")
    groups = np.split(ranked, np.cumsum(sizes)[:-1]) if executor == "vectorised" else _balanced(costs, ranked, sizes)
    return sorted((np.sort(g) for g in groups), key=lambda g: (-costs[g].sum(), g[0]))


def _balanced(costs: np.ndarray, ranked: np.ndarray, sizes: list[int]) -> list[np.ndarray]:
    """Assign clients, the costliest first, to the group that is farthest from its share of the cohort's cost."""
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
