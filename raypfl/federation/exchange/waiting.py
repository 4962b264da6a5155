"""The groups that wait for an actor: in their order, and by the nodes that have their clients' states."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from raypfl.clients.worker import Group

NEARLY_LONGEST = 0.9
"""A waiting group that takes this share of the first one's time may be chosen instead, if its states are nearer."""


class Waiting:
    """Groups in a fixed order, the longest first. Each may leave at any time, at the same cost for any number of them.

    Attributes
    ----------
    num_alone : how many of them must run alone.
    """

    def __init__(self, groups: Iterable[Group]):
        self._shares: dict[Group, Mapping[str, float]] = {}
        self._put(sorted(groups, key=lambda group: (-group.length, group.index)))

    def _put(self, line: list[Group]) -> None:
        # Groups keep their place in the line until they leave. The first place in use is `_head` or a later one.
        self._line = line
        self._place_of = {group: place for place, group in enumerate(line)}
        self._head = 0
        self.num_alone = sum(group.alone for group in line)

        # The groups before `_end` are candidates, of which those near a node can be chosen before the first:
        # node -> (-share of the group's clients whose states are there, place), ascending.
        self._near: dict[str, list[tuple[float, int]]] = {}
        self._end = 0
        self._num_candidates = 0

    def __len__(self) -> int:
        return len(self._place_of)

    def __iter__(self) -> Iterator[Group]:
        for place in range(self._head, len(self._line)):
            if self._waits_at(place):
                yield self._line[place]

    @property
    def first(self) -> Group:
        """The first group."""
        while not self._waits_at(self._head):
            self._head += 1
        return self._line[self._head]

    def put_back(self, groups: Sequence[Group]) -> None:
        """Add groups before all others."""
        if groups:
            self._put([*groups, *self])

    def append(self, group: Group) -> None:
        """Add a group after all others."""
        self._place_of[group] = len(self._line)
        self._line.append(group)
        self.num_alone += group.alone

    def remove(self, group: Group) -> None:
        """Take a group out."""
        place = self._place_of.pop(group)
        self.num_alone -= group.alone
        if place >= self._end:
            return

        self._num_candidates -= 1
        for node, share in self._shares_of(group).items():
            entries = self._near.get(node, [])
            position = bisect_left(entries, (-share, place))
            if position < len(entries) and entries[position][1] == place:
                del entries[position]

    def nearest(self, actors_on: Mapping[str, Sequence[int]], most: int) -> tuple[str | None, Group]:
        """Choose the node and the group of which most states are there.

        Of several, the group that comes first is chosen, and the node whose first actor does.

        Parameters
        ----------
        actors_on : node -> the numbers of its actors that are to be chosen from, ascending.
        most : candidates are the first group and, of this many, those that are nearly as long and need not be alone.

        Returns
        -------
        the node, None if no candidate has states on any of these, and the group.
        """
        first = self.first
        self._admit(most, NEARLY_LONGEST * first.length)

        choices = []
        for node, share in self._shares_of(first).items():
            if node in actors_on:
                choices.append((-share, self._head, actors_on[node][0], node))
        for node in min(self._near, actors_on, key=len):
            if node in actors_on and self._near.get(node):
                choices.append((*self._near[node][0], actors_on[node][0], node))

        if not choices:
            return None, first
        _, place, _, node = min(choices)
        return node, self._line[place]

    def _admit(self, most: int, min_length: float) -> None:
        """Make groups candidates, until there are `most` or the next is too short."""
        while self._end < len(self._line) and self._num_candidates < most:
            group = self._line[self._end]
            if self._waits_at(self._end):
                if group.length < min_length:
                    return
                self._num_candidates += 1
                if not group.alone:
                    for node, share in self._shares_of(group).items():
                        insort(self._near.setdefault(node, []), (-share, self._end))
            self._end += 1

    def _waits_at(self, place: int) -> bool:
        return self._place_of.get(self._line[place]) == place

    def _shares_of(self, group: Group) -> Mapping[str, float]:
        """Return node -> share of a group's clients whose states are there."""
        if group not in self._shares:
            clients_on_node: Counter[str] = Counter()
            for refs in group.states:
                nodes = {ref.node for ref in refs or ()}
                if len(nodes) == 1:
                    clients_on_node.update(nodes)
            self._shares[group] = {node: count / len(group.clients) for node, count in clients_on_node.items()}
        return self._shares[group]
