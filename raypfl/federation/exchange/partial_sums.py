"""Which sums are added up on nodes before the server gets them: the policy alone, without actors.

No result depends on it, since :class:`TreeSum` fixes the order of addition, wherever that happens.
`benchmarks/fleet.py` replays exchanges through the same code.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from raypfl.clients.worker import Group

FAN_IN = 8
"""Groups of a block, and blocks of the next larger one. With fewer, the server sends more messages; with more, an actor
waits longer for the sums that it adds up, which travel one after the other."""

MIN_BYTES = 1_000_000
"""Bytes of a reply's sums from which they may be an object of their own, which costs about a millisecond."""

SERVER_RATE = 1.5e9
"""Bytes of sums a second that the server takes from other nodes and adds up: 0.32 ns a byte for a network of 25 Gbit/s
and 0.3 ns for the rest, as measured by `benchmarks/fleet.py`."""

MAX_LOAD = 0.25
"""Share of an exchange in which the server may be busy with sums before nodes add them up. Below it, a reply rarely
waits for another, and a detour would only make the last ones late."""


def should_stay_on_nodes(replies: int, num_bytes: int, seconds: float) -> bool:
    """Return whether nodes should add up the sums of an exchange.

    Parameters
    ----------
    replies : the number of replies, if nodes do not.
    num_bytes : the bytes of a reply's sums; 0 if unknown.
    seconds : the expected duration of the exchange; 0 if unknown.
    """
    if replies <= FAN_IN or num_bytes < MIN_BYTES or not seconds:
        return False
    return replies * num_bytes / SERVER_RATE > MAX_LOAD * seconds


@dataclass(frozen=True, eq=False)
class PartialSum:
    """Sums over some groups of an exchange, which a node keeps.

    `subtrees` : a reference to the sums, a list of :class:`raypfl.federation.exchange.tree_sum.Subtree`.
    """

    groups: tuple[Group, ...]
    subtrees: Any


class PartialSums:
    """Collects the partial sums of an exchange, until those of a block have come, which one actor adds up.

    A block of level `k` has the ``FAN_IN ** k`` groups of a complete subtree, or fewer at the tree's end. Blocks
    are added up level by level, as long as the server would get more than ``FAN_IN`` of them. If a group fails, the
    blocks that contain it stay as they are.
    """

    def __init__(self, groups: Sequence[Group]):
        self._levels = 0
        while len(groups) > FAN_IN ** (self._levels + 1):
            self._levels += 1

        self._num_groups: Counter[tuple[int, int]] = Counter()
        for level in range(1, self._levels + 1):
            self._num_groups.update((level, group.index // FAN_IN**level) for group in groups)
        self._by_block: dict[tuple[int, int], list[PartialSum]] = {}
        self._largest: list[PartialSum] = []

    def add(self, partial: PartialSum) -> list[PartialSum]:
        """Add a partial sum; if it completes a block, return the block's partial sums, for an actor to add up."""
        for level in range(1, self._levels + 1):
            block = (level, partial.groups[0].index // FAN_IN**level)
            if len(partial.groups) >= self._num_groups[block]:
                continue

            in_block = self._by_block.setdefault(block, [])
            in_block.append(partial)
            if sum(len(part.groups) for part in in_block) < self._num_groups[block]:
                return []
            return self._by_block.pop(block)

        self._largest.append(partial)
        return []

    def leave(self, partials: Sequence[PartialSum]) -> None:
        """Leave partial sums to the server."""
        self._largest += partials

    def pop_all(self) -> list[PartialSum]:
        """Remove and return all partial sums: of incomplete blocks, and of the largest ones."""
        partials = [*self._largest]
        for in_block in self._by_block.values():
            partials += in_block
        self._largest = []
        self._by_block = {}
        return partials
