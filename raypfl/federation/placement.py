"""Which group goes to which actor, and when: the policy alone, without actors or a clock.

What it decides changes how long a round takes and nothing else: the cut and the order in which partial sums are added
do not depend on it. `benchmarks/scheduling.py` replays measured times through the same code.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from raypfl.clients.worker import Group

IN_FLIGHT = 2
"""Groups pushed to an actor at most: while it computes one, the next is already there."""

AHEAD = 0.025
"""Seconds before an actor is expected to run dry at which it gets its next group: time for a group to get there. One
that is handed out earlier may wait behind a slow one while another actor idles."""

AS_LONG = 0.9
"""Waiting groups that take this share of the longest one's time are as good a choice, if their states are near."""


class Timings:
    """What groups took so far, as an expectation of what they will take.

    A client that took twice as long as its cost suggests is expected to do so again.

    Parameters
    ----------
    costs : ``float[num_clients]`` what each client's turn is expected to take, in any unit.
    """

    def __init__(self, costs: np.ndarray):
        self._costs = costs
        self._slowness = np.ones(len(costs), dtype=np.float32)
        self._rates: dict[Hashable, float] = {}

    def length(self, clients: Sequence[int] | np.ndarray) -> float:
        """What a group of these clients is expected to take, in any unit."""
        members = np.asarray(clients)
        return max(float((self._slowness[members] * self._costs[members]).sum()), 1e-9)

    def seconds(self, function: Hashable, clients: Sequence[int] | np.ndarray) -> float:
        """The same in seconds; 0 if this function was never timed."""
        return self._rates.get(function, 0.0) * self.length(clients)

    def note(self, function: Hashable, clients: Sequence[int], seconds: float) -> None:
        """A group of these clients took so long."""
        length = self.length(clients)
        rate = self._rates.setdefault(function, seconds / length)
        # Half of the way each time, for one slow group may have met a busy machine.
        self._slowness[list(clients)] *= np.clip((seconds / (rate * length)) ** 0.5, 0.25, 4.0)
        self._rates[function] = 0.9 * rate + 0.1 * seconds / length


@dataclass
class _Lane:
    """What an actor has been handed: `groups` in order, the first one running since `since`."""

    node: str
    groups: list[Group] = field(default_factory=list)
    since: float = 0.0

    def dry(self) -> float:
        """When it is expected to run out of work."""
        return self.since + sum(group.seconds for group in self.groups) if self.groups else 0.0


class Dispatch:
    """Hands groups out, the longest first, each where its clients' states are if that costs no time.

    Actors are known by any hashable name.
    """

    def __init__(self, groups: Iterable[Group]):
        self._waiting = sorted(groups, key=lambda group: (-group.length, group.index))
        self._lanes: dict[Any, _Lane] = {}

    def join(self, actor: Any, node: str) -> None:
        """An actor is ready for groups; `node` is where it runs."""
        self._lanes.setdefault(actor, _Lane(node))

    @property
    def done(self) -> bool:
        """Whether nothing waits and nothing is out."""
        return not self._waiting and not any(lane.groups for lane in self._lanes.values())

    def next(self, now: float) -> tuple[Any, Group] | None:
        """Who is to be handed what now; None for nothing. To be asked until there is nothing."""
        if not self._waiting:
            return None
        free = [(len(lane.groups), lane.dry(), actor) for actor, lane in self._lanes.items() if self._takes(lane, now)]
        if not free:
            return None
        actor = min(free, key=lambda entry: entry[:2])[2]
        lane = self._lanes[actor]
        group = self._waiting.pop(self._nearest(lane.node))
        if not lane.groups:
            lane.since = now
        lane.groups.append(group)
        return actor, group

    def pause(self, now: float) -> float:
        """Seconds until :meth:`next` may have an answer, if nothing happens meanwhile; infinite if it will not."""
        if not self._waiting:
            return float("inf")
        moments = [lane.dry() - AHEAD - now for lane in self._lanes.values() if self._shares(lane)]
        return max(0.0, min(moments, default=float("inf")))

    def finished(self, actor: Hashable, group: Group, now: float) -> None:
        """An actor is done with a group."""
        lane = self._lanes[actor]
        lane.groups.remove(group)
        lane.since = now

    def lost(self, actor: Hashable) -> list[Group]:
        """An actor is gone; returns its groups, which wait again."""
        lane = self._lanes.pop(actor, None)
        groups = lane.groups if lane else []
        self._waiting[:0] = groups
        return groups

    def drop(self, group: Group, instead: Group | None = None) -> None:
        """Hand a waiting group out no more, or another one in its place."""
        place = self._waiting.index(group)
        self._waiting[place : place + 1] = [] if instead is None else [instead]

    def _takes(self, lane: _Lane, now: float) -> bool:
        return not lane.groups or (self._shares(lane) and lane.dry() - AHEAD <= now)

    def _shares(self, lane: _Lane) -> bool:
        """Whether an actor may be handed the next group while it has others."""
        return len(lane.groups) < IN_FLIGHT and not any(group.alone for group in (self._waiting[0], *lane.groups))

    def _nearest(self, node: str) -> int:
        """Place in the queue of the group to give to an actor on this node."""
        if len({lane.node for lane in self._lanes.values()}) < 2:
            return 0
        enough = AS_LONG * self._waiting[0].length
        front = enumerate(self._waiting[: len(self._lanes)])
        candidates = [i for i, group in front if i == 0 or (group.length >= enough and not group.alone)]
        return max(candidates, key=lambda i: (_held(self._waiting[i], node), -i))


def _held(group: Group, node: str) -> float:
    """Share of a group's clients whose states are on a node."""
    there = [all(place.home == node for place in places) for places in group.states if places]
    return sum(there) / len(group.clients)
