"""How a cohort is cut into groups.

The cut depends on the cohort, the model and the clients' sizes, never on the actors, so neither do results.
"""

from __future__ import annotations

import heapq
from itertools import accumulate

import numpy as np

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


def even_sizes(num_clients: int, num_groups: int) -> list[int]:
    """Return the sizes of `num_groups` groups, as equal as possible; fewer groups if there are fewer clients."""
    num_groups = max(1, min(num_groups, num_clients))
    size, num_larger = divmod(num_clients, num_groups)
    return [size + 1] * num_larger + [size] * (num_groups - num_larger)


def group_sizes(num_clients: int, executor: str) -> list[int]:
    """Return the sizes of the groups that a cohort is cut into.

    Vectorised ones are equal. Sequential ones shrink to single clients: large ones keep messages few, and with small
    ones at the end any number of actors finish together (trapezoid self-scheduling, Tzen and Ni 1993).
    """
    if executor == "vectorised":
        return even_sizes(num_clients, max(1, round(num_clients / VECTORISED_GROUP)))
    return shrinking_sizes(num_clients, min(SEQUENTIAL_GROUP, -(-num_clients // MIN_SEQUENTIAL_GROUPS)))


def shrinking_sizes(num_clients: int, largest: int) -> list[int]:
    """Return sizes of groups that shrink evenly from the `largest` to single clients."""
    # Sizes from `largest` to 1 are (largest + 1) / 2 on average.
    ideal_sizes = np.linspace(largest, 1, max(1, 2 * num_clients // (largest + 1)))
    ends = np.round(np.cumsum(ideal_sizes) * num_clients / ideal_sizes.sum()).astype(int)
    return np.diff(ends, prepend=0).tolist()


def evaluation_group_sizes(num_clients: int, executor: str) -> list[int]:
    """Return the sizes of the groups that clients are cut into for an evaluation."""
    training_sizes = group_sizes(num_clients, executor)
    if executor != "vectorised":
        return training_sizes

    num_groups = max(-(-num_clients // EVALUATION_GROUP), min(len(training_sizes), MIN_EVALUATION_GROUPS))
    return even_sizes(num_clients, num_groups)


def cut_into_groups(costs: np.ndarray, sizes: list[int], executor: str) -> list[np.ndarray]:
    """Cut the positions ``0..C-1`` of a cohort into groups of these sizes; return the costliest group first.

    Vectorised groups get clients of similar cost, since a group takes as long as its longest member. The cost of a
    sequential group is as nearly in proportion to its clients as possible.
    """
    ranked = (-costs).argsort(kind="stable")
    if executor == "vectorised":
        groups = [ranked[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]
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
