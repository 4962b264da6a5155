"""Sums over groups along a fixed binary tree: their bits depend neither on the order of replies nor on actors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from raypfl.common.errors import MethodError


@dataclass(frozen=True)
class Total:
    """A sum over some groups.

    Attributes
    ----------
    array : the sum of what the groups sent.
    weight : the sum of the weights of a mean.
    is_writable : whether the array is used nowhere else, so that another can be added in place.
    """

    array: np.ndarray
    weight: float
    is_writable: bool = False


@dataclass(frozen=True)
class Subtree:
    """The sums over the groups of a complete subtree.

    Attributes
    ----------
    level : the subtree has ``2**level`` groups.
    place : their indices begin at ``place * 2**level``.
    """

    level: int
    place: int
    totals: Mapping[str, Total]


class TreeSum:
    """Adds up what groups send, in whichever order they come: each is a leaf of a binary tree over their indices.

    Two neighbouring subtrees are added as soon as both are complete. If groups come in order, no more sums are kept
    than the tree has levels; else about as many more as are in flight. A group that never comes counts as nothing.

    The price of a fixed order, on one core: a group of 6.5 MB takes 0.5 ms, against 0.35 in a running sum. Sums that
    any order leaves the same would take 2.3 (two bins) or 3.5 (fixed point in 64 bits).
    """

    def __init__(self) -> None:
        self._subtrees: dict[tuple[int, int], Subtree] = {}

    def __len__(self) -> int:
        """Return how many subtrees' sums are kept."""
        return len(self._subtrees)

    def add(self, subtree: Subtree) -> None:
        """Add a group or a subtree; none of its groups may have been added before."""
        while neighbour := self._subtrees.pop((subtree.level, subtree.place ^ 1), None):
            left, right = sorted((subtree, neighbour), key=lambda half: half.place)
            subtree = Subtree(left.level + 1, left.place >> 1, added(left.totals, right.totals))
        if (subtree.level, subtree.place) in self._subtrees:
            raise ValueError(f"Subtree {subtree.place} of level {subtree.level} was added before.")
        self._subtrees[subtree.level, subtree.place] = subtree

    def subtrees(self) -> list[Subtree]:
        """Return the largest complete subtrees, whose arrays the tree must not change any more."""
        subtrees = []
        for subtree in self._subtrees.values():
            totals = {name: replace(total, is_writable=False) for name, total in subtree.totals.items()}
            subtrees.append(replace(subtree, totals=totals))
        return subtrees

    def totals(self) -> Mapping[str, Total]:
        """Return the sums over all groups that have come; no more may come."""
        while len(self._subtrees) > 1:
            # Its neighbour is empty: none of those groups has come.
            smallest = self._subtrees.pop(min(self._subtrees))
            self.add(replace(smallest, level=smallest.level + 1, place=smallest.place >> 1))
        return next((subtree.totals for subtree in self._subtrees.values()), {})


def added(left: Mapping[str, Total], right: Mapping[str, Total]) -> dict[str, Total]:
    """Return sums over more groups; a name may be missing on one side."""
    totals = {**left, **right}
    for name in left.keys() & right.keys():
        totals[name] = _sum(name, left[name], right[name])
    return totals


def refuse_other_shape(name: str, shape: tuple[int, ...], other: tuple[int, ...]) -> None:
    """Raise a MethodError unless two groups have sent one shape under a name: NumPy would repeat a single number."""
    if shape != other:
        raise MethodError(
            f"{name!r} has the shape {list(shape)} for some groups of clients and {list(other)} for others; it must be "
            "the same for all clients of the cohort."
        )


def _sum(name: str, left: Total, right: Total) -> Total:
    refuse_other_shape(name, left.array.shape, right.array.shape)
    dtype = np.result_type(left.array, right.array)
    writable = [total.array for total in (left, right) if total.is_writable and total.array.dtype == dtype]
    array = np.asarray(np.add(left.array, right.array, out=writable[0] if writable else None))
    return Total(array, left.weight + right.weight, is_writable=True)
