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
"""Clients of a vectorised group. Compared with 50, a client takes 1.4 times as long in groups of 25, because of the
fixed cost of every operation, and 0.9 times as long in groups of 100."""

EVALUATION_GROUP = 100
"""Clients of a vectorised group in an evaluation, if there are enough: a forward pass is short."""

MIN_EVALUATION_GROUPS = 8
"""Smallest number of groups in an evaluation (or as many as training has, if fewer), so that actors share the work."""

SEQUENTIAL_GROUP = 5
"""Clients of the largest sequential group of a cohort. With fewer, more models travel to the server; with more, actors
wait longer for the last group."""

MIN_SEQUENTIAL_GROUPS = 8
"""A cohort is at least this many times its largest sequential group, so that eight actors have work."""


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
        reachable = candidates[_is_reachable(settings, seed, round, candidates)]
        if len(reachable) >= size or num_candidates == num_clients:
            break

        # A new draw, not more of this one, so that every reachable client is as likely as any other.
        num_candidates = 4 * num_candidates
        tries += 1

    cohort = np.sort(reachable[:size])
    is_dropped = rng.uniform(rng.keys(seed, "dropout", round, cohort)) < settings.dropout
    return CohortDraw(tuple(cohort[~is_dropped].tolist()), tuple(cohort[is_dropped].tolist()))


def _is_reachable(settings: CohortSettings, seed: int, round: int, clients: np.ndarray) -> np.ndarray:
    if settings.availability is None:
        return np.ones(len(clients), dtype=bool)

    low = settings.availability["low"]
    high = settings.availability["high"]
    # Keyed by round 0: a client's chance stays the same in all rounds.
    chance = low + (high - low) * rng.uniform(rng.keys(seed, "availability", 0, clients))
    return rng.uniform(rng.keys(seed, "reachable", round, clients)) < chance


def is_due(round: int, every: int, rounds: int) -> bool:
    """Return whether an event is due after this round: every `every` rounds, and after the last one."""
    return round == rounds or (every > 0 and round % every == 0)


def even_sizes(cohort: int, groups: int) -> list[int]:
    """Return the sizes of `groups` groups, as equal as possible; fewer groups if there are fewer clients."""
    parts = np.array_split(np.arange(cohort), max(1, min(groups, cohort)))
    return [len(part) for part in parts]


def group_sizes(cohort: int, executor: str) -> list[int]:
    """Return the sizes of the groups that a cohort is cut into.

    Vectorised ones are equal. Sequential ones shrink to single clients: large ones keep messages few, and with small
    ones at the end any number of actors finish together (trapezoid self-scheduling, Tzen and Ni 1993).
    """
    if executor == "vectorised":
        return even_sizes(cohort, max(1, round(cohort / VECTORISED_GROUP)))
    return shrinking_sizes(cohort, min(SEQUENTIAL_GROUP, -(-cohort // MIN_SEQUENTIAL_GROUPS)))


def shrinking_sizes(cohort: int, largest: int) -> list[int]:
    """Return sizes of groups that shrink evenly from the `largest` to single clients."""
    # Sizes from `largest` to 1 are (largest + 1) / 2 on average.
    ideal_sizes = np.linspace(largest, 1, max(1, 2 * cohort // (largest + 1)))
    ends = np.round(np.cumsum(ideal_sizes) * cohort / ideal_sizes.sum()).astype(int)
    return np.diff(ends, prepend=0).tolist()


def evaluation_group_sizes(clients: int, executor: str) -> list[int]:
    """Return the sizes of the groups that clients are cut into for an evaluation."""
    training_sizes = group_sizes(clients, executor)
    if executor != "vectorised":
        return training_sizes

    groups = max(-(-clients // EVALUATION_GROUP), min(len(training_sizes), MIN_EVALUATION_GROUPS))
    return even_sizes(clients, groups)


def cut_into_groups(costs: np.ndarray, sizes: list[int], executor: str) -> list[np.ndarray]:
    """Cut the positions ``0..C-1`` of a cohort into groups of these sizes; return the costliest group first.

    Vectorised groups get clients of similar cost, since a group takes as long as its longest member. The cost of a
    sequential group is as nearly in proportion to its clients as possible.
    """
    ranked = np.argsort(-costs, kind="stable")
    if executor == "vectorised":
        groups = np.split(ranked, np.cumsum(sizes)[:-1])
    else:
        groups = _balanced_groups(costs, ranked, sizes)

    ascending = [np.sort(group) for group in groups]
    return sorted(ascending, key=lambda group: (-costs[group].sum(), group[0]))


def _balanced_groups(costs: np.ndarray, ranked: np.ndarray, sizes: list[int]) -> list[np.ndarray]:
    """Assign clients, the costliest first, to the group that is farthest from its share of the cohort's cost."""
    share = float(costs.sum()) / len(costs)
    groups: list[list[int]] = [[] for _ in sizes]

    # A heap of (cost so far minus the group's share, group); a full group is not pushed again.
    open_groups = [(-share * size, i) for i, size in enumerate(sizes)]
    heapq.heapify(open_groups)
    for position in ranked:
        balance, i = heapq.heappop(open_groups)
        groups[i].append(int(position))
        if len(groups[i]) < sizes[i]:
            heapq.heappush(open_groups, (balance + float(costs[position]), i))
    return [np.array(group) for group in groups]
