"""Bundles of groups that an actor runs one after the other, and for which it replies once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from raypfl.clients.worker import Group

BUNDLES_PER_ACTOR = 2
"""A bundle takes at most an actor's share of the work that is left, divided by this number (guided self-scheduling,
Polychronopoulos and Kuck 1987), so that all actors finish together."""


@dataclass(frozen=True, eq=False)
class Bundle:
    """What is sent to an actor at once: neighbouring groups, which are a complete subtree of :class:`TreeSum`.

    Attributes
    ----------
    length : the expected duration, in any unit.
    seconds : the expected duration in seconds; 0 if unknown.
    alone : whether its actor runs nothing else, so that the cause of the actor's death is known.
    """

    groups: tuple[Group, ...]
    length: float
    seconds: float
    alone: bool

    @classmethod
    def of(cls, *groups: Group) -> Bundle:
        """Return these groups as a bundle."""
        length = sum(group.length for group in groups)
        seconds = sum(group.seconds for group in groups)
        return cls(groups, length, seconds, any(group.alone for group in groups))

    @property
    def index(self) -> int:
        """The index of the first group."""
        return self.groups[0].index


def bundled(groups: Sequence[Group], actors: int, most_clients: float = float("inf")) -> list[Bundle]:
    """Bundle groups, which come in the order of their indices, for a number of actors.

    The first bundles are the largest, and the last are single groups. No result depends on it, since groups are added
    up along the same tree, by their actor or by the server.

    `most_clients` : the most clients of a bundle of several groups.
    """
    work_until = [0.0, *accumulate(group.length for group in groups)]
    clients_until = [0, *accumulate(len(group.clients) for group in groups)]

    bundles = []
    start = 0
    while start < len(groups):
        most_work = (work_until[-1] - work_until[start]) / (BUNDLES_PER_ACTOR * max(1, actors))
        end = start + 1
        while True:
            wider = start + 2 * (end - start)
            if wider > len(groups) or not _is_subtree(groups[start:wider]):
                break
            if work_until[wider] - work_until[start] > most_work:
                break
            if clients_until[wider] - clients_until[start] > most_clients:
                break
            end = wider
        bundles.append(Bundle.of(*groups[start:end]))
        start = end
    return bundles


def _is_subtree(groups: Sequence[Group]) -> bool:
    """Return whether groups, in a number that is a power of two, are all below one node of the tree."""
    first = groups[0].index
    in_a_row = groups[-1].index - first == len(groups) - 1
    return in_a_row and first % len(groups) == 0 and not any(group.alone for group in groups)
