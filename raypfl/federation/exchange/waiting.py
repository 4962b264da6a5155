"""The bundles of groups that wait for an actor: in their order, and by the nodes that have their clients' states."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from raypfl.federation.exchange.bundles import Bundle

NEARLY_LONGEST = 0.9
"""A waiting bundle that takes this share of the first one's time may be chosen instead, if its states are nearer."""


class Waiting:
    """Waiting bundles in a fixed order, the longest first. Removing one costs the same for any number of them.

    `num_alone` : how many of them must run alone.
    """

    def __init__(self, bundles: Iterable[Bundle]):
        self._shares: dict[Bundle, Mapping[str, float]] = {}
        self._put(sorted(bundles, key=lambda bundle: (-bundle.length, bundle.index)))

    def _put(self, line: list[Bundle]) -> None:
        # Bundles keep their places in the line until they leave. The first place in use is `_head` or a later one.
        self._line = line
        self._place_of = {bundle: place for place, bundle in enumerate(line)}
        self._head = 0
        self.num_alone = sum(bundle.alone for bundle in line)

        # The bundles before `_end` are candidates, of which those near a node can be chosen before the first:
        # node -> (-share of the bundle's clients whose states are there, place), ascending.
        self._near: dict[str, list[tuple[float, int]]] = {}
        # A heap of the first entry of each node with idle actors; entries that are no longer first stay in it.
        self._nearest: list[tuple[float, int, str]] = []
        self._end = 0
        self._num_candidates = 0

    def __len__(self) -> int:
        return len(self._place_of)

    def __iter__(self) -> Iterator[Bundle]:
        for place in range(self._head, len(self._line)):
            if self._waits_at(place):
                yield self._line[place]

    @property
    def first(self) -> Bundle:
        """The first bundle."""
        while not self._waits_at(self._head):
            self._head += 1
        return self._line[self._head]

    def put_back(self, bundles: Sequence[Bundle]) -> None:
        """Add bundles before all others."""
        if bundles:
            self._put([*bundles, *self])

    def append(self, bundle: Bundle) -> None:
        """Add a bundle after all others."""
        self._place_of[bundle] = len(self._line)
        self._line.append(bundle)
        self.num_alone += bundle.alone

    def remove(self, bundle: Bundle) -> None:
        """Take a bundle out."""
        place = self._place_of.pop(bundle)
        self.num_alone -= bundle.alone
        if place >= self._end:
            return

        self._num_candidates -= 1
        for node, share in self._shares_of(bundle).items():
            entries = self._near.get(node, [])
            position = bisect_left(entries, (-share, place))
            if position < len(entries) and entries[position][1] == place:
                del entries[position]
                self.note_idle(node)

    def nearest(self, actors_on: Mapping[str, Sequence[int]], most: int) -> tuple[str | None, Bundle]:
        """Choose the node and the bundle of which most states are there; the node is None if no candidate has any.

        Of several, the bundle that comes first is chosen, and the node whose first actor does.

        Parameters
        ----------
        actors_on : node -> the numbers of its actors that are to be chosen from, ascending.
        most : candidates are the first bundle and, of this many, those that are nearly as long and need not be alone.
        """
        first = self.first
        self._admit(most, NEARLY_LONGEST * first.length)

        choices = []
        for node, share in self._shares_of(first).items():
            if node in actors_on:
                choices.append((-share, self._head, actors_on[node][0], node))
        for node in self._nodes_of_nearest(actors_on):
            choices.append((*self._near[node][0], actors_on[node][0], node))

        if not choices:
            return None, first
        _, place, _, node = min(choices)
        return node, self._line[place]

    def note_idle(self, node: str) -> None:
        """Note that there are idle actors on a node."""
        if self._near.get(node):
            heapq.heappush(self._nearest, (*self._near[node][0], node))

    def _nodes_of_nearest(self, actors_on: Mapping[str, Sequence[int]]) -> list[str]:
        """Return the nodes, of these, with most states of a candidate; several if they are equally near."""
        if len(actors_on) == 1:
            return [node for node in actors_on if self._near.get(node)]

        nodes: list[str] = []
        while self._nearest:
            share, place, node = self._nearest[0]
            is_first = self._near[node][:1] == [(share, place)] and node in actors_on and node not in nodes
            if is_first and nodes and self._near[nodes[0]][0] != (share, place):
                break
            heapq.heappop(self._nearest)
            if is_first:
                nodes.append(node)

        for node in nodes:
            self.note_idle(node)
        return nodes

    def _admit(self, most: int, min_length: float) -> None:
        """Make bundles candidates, until there are `most` or the next is too short."""
        while self._end < len(self._line) and self._num_candidates < most:
            bundle = self._line[self._end]
            if self._waits_at(self._end):
                if bundle.length < min_length:
                    return
                self._num_candidates += 1
                if not bundle.alone:
                    for node, share in self._shares_of(bundle).items():
                        insort(self._near.setdefault(node, []), (-share, self._end))
                        self.note_idle(node)
            self._end += 1

    def _waits_at(self, place: int) -> bool:
        return self._place_of.get(self._line[place]) == place

    def _shares_of(self, bundle: Bundle) -> Mapping[str, float]:
        """Return node -> share of a bundle's clients whose states are there."""
        if bundle not in self._shares:
            num_clients = 0
            clients_on_node: Counter[str] = Counter()
            for group in bundle.groups:
                num_clients += len(group.clients)
                for refs in group.states:
                    nodes = {ref.node for ref in refs or ()}
                    if len(nodes) == 1:
                        clients_on_node.update(nodes)
            self._shares[bundle] = {node: count / num_clients for node, count in clients_on_node.items()}
        return self._shares[bundle]
