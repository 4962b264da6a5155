"""Which group goes to which actor, and when: the policy alone, without actors or a clock.

What it decides changes how long a round takes and nothing else: the cut and the order in which partial sums are added
do not depend on it. `benchmarks/scheduling.py` replays measured times through the same code.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from raypfl.clients.worker import Group

IN_FLIGHT = 2
"""Groups that an actor has at most: while it computes one, the next is already there."""

AHEAD = 0.025
"""Seconds before an actor is expected to be idle at which it gets its next group, so that the group arrives in time.
Earlier, it could get stuck behind a slow group while another actor is idle."""

AS_LONG = 0.9
"""A waiting group that takes this share of the longest one's time may be chosen instead, if its states are nearer."""

UNEQUAL = 1.3
"""Actors are treated as unequal from this ratio of their times on; smaller ones are mostly chance."""

A_MOMENT = 0.005
"""Seconds after which it is looked again whether an idle, slower actor should take a group after all."""


class Timings:
    """Expected durations of groups, from their durations so far.

    A client that took twice as long as its cost suggests is expected to do so again.

    Parameters
    ----------
    costs : ``float[num_clients]`` expected duration of each client's turn, in any unit.
    """

    def __init__(self, costs: np.ndarray):
        self._costs = costs
        self._slowness = np.ones(len(costs), dtype=np.float32)
        self._rates: dict[Hashable, float] = {}

    def length(self, clients: Sequence[int] | np.ndarray) -> float:
        """Expected duration of a group of these clients, in any unit."""
        members = np.asarray(clients)
        return max(float((self._slowness[members] * self._costs[members]).sum()), 1e-9)

    def seconds(self, function: Hashable, clients: Sequence[int] | np.ndarray) -> float:
        """The same in seconds; 0 if this function was never timed."""
        return self._rates.get(function, 0.0) * self.length(clients)

    def note(self, function: Hashable, clients: Sequence[int], seconds: float) -> None:
        """Learn from a group of these clients that took `seconds`."""
        length = self.length(clients)
        rate = self._rates.setdefault(function, seconds / length)
        # Half of the way each time, since one slow group may have met a busy machine.
        self._slowness[list(clients)] *= np.clip((seconds / (rate * length)) ** 0.5, 0.25, 4.0)
        self._rates[function] = 0.9 * rate + 0.1 * seconds / length


class Speeds:
    """How much longer one place takes than another for the same group, from what groups took there.

    A place is any hashable value, such as the actors of one kind on one node.
    """

    def __init__(self) -> None:
        self._slowness: dict[Hashable, float] = {}
        self._rates: dict[Hashable, float] = {}

    def slowness(self, place: Hashable) -> float:
        """Expected duration of a group there, in relation to other places."""
        return self._slowness.setdefault(place, 1.0)

    def note(self, place: Hashable, function: Hashable, group: Group, seconds: float) -> float:
        """Learn from a group that took `seconds`; returns how long it would have taken where the slowness is 1."""
        slowness, seconds = self.slowness(place), max(seconds, 1e-9)
        if len(self._slowness) > 1:
            rate = self._rates.setdefault(function, seconds / slowness / group.length)
            # A third of the way each time: the group's clients, or others on the machine, may have been the reason.
            off = seconds / (rate * group.length * slowness)
            slowness = self._slowness[place] = slowness * float(np.clip(off, 0.1, 10.0)) ** (1 / 3)
            self._rates[function] = 0.9 * rate + 0.1 * seconds / slowness / group.length
        return seconds / slowness


@dataclass
class _Queue:
    """The groups of an actor, in order; the first one runs since `since`."""

    node: str
    slowness: float = 1.0
    groups: list[Group] = field(default_factory=list)
    since: float = 0.0

    def takes(self, group: Group) -> float:
        """Expected seconds of a group here."""
        return self.slowness * group.seconds

    def idle_at(self) -> float:
        """When the actor is expected to be idle."""
        return self.since + sum(map(self.takes, self.groups)) if self.groups else 0.0


class Dispatch:
    """Assigns groups to actors, the longest first, to the node that has its clients' states if that costs no time.

    Among actors of unequal speed, a group waits for one that is busy if it would be done sooner there.
    An actor is any hashable value.
    """

    def __init__(self, groups: Iterable[Group]):
        self._waiting = sorted(groups, key=lambda group: (-group.length, group.index))
        self._queues: dict[Any, _Queue] = {}
        self._shares: dict[Group, Mapping[str, float]] = {}

    def join(self, actor: Any, node: str, slowness: float = 1.0) -> None:
        """An actor is ready for groups; `node` is where it runs. For `slowness`, see :class:`Speeds`."""
        self._queues.setdefault(actor, _Queue(node, slowness))

    @property
    def done(self) -> bool:
        """Whether nothing waits and nothing is out."""
        return not self._waiting and not any(queue.groups for queue in self._queues.values())

    def next(self, now: float) -> tuple[Any, Group] | None:
        """The next ``(actor, group)`` to push now; None if there is none. To be called until it returns None."""
        if not self._waiting:
            return None
        free = [actor for actor, queue in self._queues.items() if self._may_get_one(queue, now)]
        if not free:
            return None
        if self._are_unequal():
            if (chosen := self._done_soonest(free, now)) is None:
                return None
            actor, index = chosen
        else:
            least = min(self._load(one) for one in free)
            actor, index = self._nearest([one for one in free if self._load(one) == least])
        queue = self._queues[actor]
        group = self._waiting.pop(index)
        if not queue.groups:
            queue.since = now
        queue.groups.append(group)
        return actor, group

    def pause(self, now: float) -> float:
        """Seconds until :meth:`next` may return a group if nothing else happens; infinite if it will not."""
        if not self._waiting:
            return float("inf")
        queues = [queue for queue in self._queues.values() if queue.groups and self._may_prefetch(queue)]
        least = A_MOMENT if self._are_unequal() else 0.0  # an actor that was left idle on purpose stays so for a while
        return max(least, min((queue.idle_at() - AHEAD - now for queue in queues), default=float("inf")))

    def finished(self, actor: Hashable, group: Group, now: float) -> None:
        """An actor is done with a group."""
        queue = self._queues[actor]
        queue.groups.remove(group)
        queue.since = now

    def lost(self, actor: Hashable) -> list[Group]:
        """An actor died; returns its groups, which wait again."""
        queue = self._queues.pop(actor, None)
        groups = queue.groups if queue else []
        self._waiting[:0] = groups
        return groups

    def drop(self, group: Group) -> None:
        """Remove a waiting group."""
        self._waiting.remove(group)

    def append(self, group: Group) -> None:
        """Let a group wait until all others are out."""
        self._waiting.append(group)

    def _may_get_one(self, queue: _Queue, now: float) -> bool:
        return not queue.groups or (self._may_prefetch(queue) and queue.idle_at() - AHEAD <= now)

    def _may_prefetch(self, queue: _Queue) -> bool:
        """Whether an actor may get the next group while it has others."""
        return len(queue.groups) < IN_FLIGHT and not any(group.alone for group in (self._waiting[0], *queue.groups))

    def _are_unequal(self) -> bool:
        """Whether actors are known to take different times for the groups that wait."""
        slowness = [queue.slowness for queue in self._queues.values()]
        timed = self._waiting[0].seconds > 0 and not any(group.alone for group in self._waiting)
        return timed and max(slowness) > UNEQUAL * min(slowness)

    def _done_soonest(self, free: Sequence[Any], now: float) -> tuple[Any, int] | None:
        """The first free actor, and the index of its group, if each group in turn went where it is done soonest."""
        ends = {actor: max(now, queue.idle_at()) for actor, queue in self._queues.items()}
        for index, group in enumerate(self._waiting):
            done = {actor: end + self._queues[actor].takes(group) for actor, end in ends.items()}
            actor = min(done, key=done.__getitem__)
            if actor in free:
                return actor, index
            ends[actor] = done[actor]
        return None

    def _load(self, actor: Any) -> tuple[int, float]:
        queue = self._queues[actor]
        return len(queue.groups), queue.idle_at()

    def _nearest(self, actors: Sequence[Any]) -> tuple[Any, int]:
        """One of these actors, and the index of the waiting group to push to it."""
        if len({queue.node for queue in self._queues.values()}) < 2:
            return actors[0], 0
        enough = AS_LONG * self._waiting[0].length
        front = enumerate(self._waiting[: len(self._queues)])
        candidates = [i for i, group in front if i == 0 or (group.length >= enough and not group.alone)]
        first = {self._queues[actor].node: actor for actor in reversed(actors)}
        pairs = [(i, node) for i in candidates for node in reversed(first)]
        i, node = max(pairs, key=lambda pair: self._share(self._waiting[pair[0]]).get(pair[1], 0.0))
        return first[node], i

    def _share(self, group: Group) -> Mapping[str, float]:
        """Node -> share of a group's clients whose states are there."""
        if group not in self._shares:
            homes = [refs[0].node for refs in group.states if refs and len({ref.node for ref in refs}) == 1]
            self._shares[group] = {node: count / len(group.clients) for node, count in Counter(homes).items()}
        return self._shares[group]
