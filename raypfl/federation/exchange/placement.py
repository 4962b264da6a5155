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

MAX_IN_FLIGHT = 2
"""Largest number of groups at an actor: while it computes one, the next is already there."""

PREFETCH_SECONDS = 0.025
"""Seconds before an actor is expected to be idle at which it gets its next group, so that the group arrives in time. A
group that is sent earlier could get stuck behind a slow one while another actor is idle."""

NEARLY_LONGEST = 0.9
"""A waiting group that takes this share of the longest one's time may be chosen instead, if its states are nearer."""

UNEQUAL_RATIO = 1.3
"""Actors are treated as unequal from this ratio of their times on; smaller ones are mostly chance."""

RECHECK_SECONDS = 0.005
"""Seconds between two checks whether an idle, slower actor should take a group after all."""


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
        """Return the expected duration of a group of these clients, in any unit."""
        members = np.asarray(clients)
        return max(float((self._slowness[members] * self._costs[members]).sum()), 1e-9)

    def seconds(self, function: Hashable, clients: Sequence[int] | np.ndarray) -> float:
        """Return the same in seconds; 0 if this function was never timed."""
        return self._rates.get(function, 0.0) * self.length(clients)

    def note(self, function: Hashable, clients: Sequence[int], seconds: float) -> None:
        """Learn from a group of these clients that took `seconds`."""
        length = self.length(clients)
        rate = self._rates.setdefault(function, seconds / length)

        # Half of the way each time (a square root), since one slow group may have met a busy machine.
        surprise = seconds / (rate * length)
        self._slowness[list(clients)] *= np.clip(surprise**0.5, 0.25, 4.0)
        self._rates[function] = 0.9 * rate + 0.1 * seconds / length


class Speeds:
    """Learns how much longer one place takes than another for the same group.

    A place is any hashable value, such as the actors of one kind on one node.
    """

    def __init__(self) -> None:
        self._slowness: dict[Hashable, float] = {}
        self._rates: dict[Hashable, float] = {}

    def slowness(self, place: Hashable) -> float:
        """Return the expected duration of a group at this place, relative to other places."""
        return self._slowness.setdefault(place, 1.0)

    def note(self, place: Hashable, function: Hashable, group: Group, seconds: float) -> float:
        """Learn from a group that took `seconds`; return how long it would have taken where the slowness is 1."""
        seconds = max(seconds, 1e-9)
        slowness = self.slowness(place)
        if len(self._slowness) == 1:  # nothing to compare with
            return seconds / slowness

        rate = self._rates.setdefault(function, seconds / slowness / group.length)
        # A third of the way each time (a cube root): the group's clients, or other programs, may have been the reason.
        surprise = seconds / (rate * group.length * slowness)
        slowness *= float(np.clip(surprise, 0.1, 10.0)) ** (1 / 3)
        self._slowness[place] = slowness
        self._rates[function] = 0.9 * rate + 0.1 * seconds / slowness / group.length
        return seconds / slowness


@dataclass
class _Queue:
    """The groups of an actor, in order; the first one runs since `since`."""

    node: str
    slowness: float = 1.0
    groups: list[Group] = field(default_factory=list)
    since: float = 0.0

    def duration(self, group: Group) -> float:
        """Return the expected seconds of a group at this actor."""
        return self.slowness * group.seconds

    def idle_at(self) -> float:
        """Return the time at which the actor is expected to be idle; 0 if it is."""
        if not self.groups:
            return 0.0
        return self.since + sum(map(self.duration, self.groups))


class Dispatch:
    """Assigns groups to actors, the longest group first, on the node with its clients' states if that costs no time.

    Among actors of unequal speed, a group waits for one that is busy if it would be done sooner there.
    An actor is any hashable value.
    """

    def __init__(self, groups: Iterable[Group]):
        self._waiting = sorted(groups, key=lambda group: (-group.length, group.index))
        self._queues: dict[Any, _Queue] = {}
        self._shares: dict[Group, Mapping[str, float]] = {}

    def join(self, actor: Any, node: str, slowness: float = 1.0) -> None:
        """Add an actor that is ready for groups, on a `node`. For `slowness`, see :class:`Speeds`."""
        self._queues.setdefault(actor, _Queue(node, slowness))

    @property
    def done(self) -> bool:
        """Whether all groups have finished."""
        return not self._waiting and not any(queue.groups for queue in self._queues.values())

    def next(self, now: float) -> tuple[Any, Group] | None:
        """Return the next ``(actor, group)`` to push now, or None. Call it until it returns None."""
        if not self._waiting:
            return None
        free = [actor for actor, queue in self._queues.items() if self._may_push(queue, now)]
        if not free:
            return None

        if self._are_unequal():
            choice = self._finishing_first(free, now)
            if choice is None:
                return None
        else:
            lowest_load = min(self._load(actor) for actor in free)
            choice = self._nearest([actor for actor in free if self._load(actor) == lowest_load])

        actor, index = choice
        queue = self._queues[actor]
        group = self._waiting.pop(index)
        if not queue.groups:
            queue.since = now
        queue.groups.append(group)
        return actor, group

    def pause(self, now: float) -> float:
        """Return the seconds until :meth:`next` may return a group if nothing else happens; infinite if it will not."""
        if not self._waiting:
            return float("inf")

        pauses = []
        for queue in self._queues.values():
            if queue.groups and self._may_prefetch(queue):
                pauses.append(queue.idle_at() - PREFETCH_SECONDS - now)

        # Among unequal actors, one that is idle on purpose may take a group after all; do not ask all the time.
        shortest = RECHECK_SECONDS if self._are_unequal() else 0.0
        return max(shortest, min(pauses, default=float("inf")))

    def finished(self, actor: Hashable, group: Group, now: float) -> None:
        """Note that an actor has finished a group."""
        queue = self._queues[actor]
        queue.groups.remove(group)
        queue.since = now

    def lost(self, actor: Hashable) -> list[Group]:
        """Remove an actor that died; return its groups, which wait again."""
        queue = self._queues.pop(actor, None)
        groups = queue.groups if queue else []
        self._waiting[:0] = groups
        return groups

    def drop(self, group: Group) -> None:
        """Remove a waiting group."""
        self._waiting.remove(group)

    def append(self, group: Group) -> None:
        """Add a group that waits until all others are pushed."""
        self._waiting.append(group)

    def _may_push(self, queue: _Queue, now: float) -> bool:
        return not queue.groups or (self._may_prefetch(queue) and queue.idle_at() - PREFETCH_SECONDS <= now)

    def _may_prefetch(self, queue: _Queue) -> bool:
        """Whether an actor may get the next group while it computes another."""
        if len(queue.groups) >= MAX_IN_FLIGHT:
            return False
        return not any(group.alone for group in (self._waiting[0], *queue.groups))

    def _are_unequal(self) -> bool:
        """Whether actors are known to take different times for the groups that wait."""
        slowness = [queue.slowness for queue in self._queues.values()]
        is_timed = self._waiting[0].seconds > 0 and not any(group.alone for group in self._waiting)
        return is_timed and max(slowness) > UNEQUAL_RATIO * min(slowness)

    def _finishing_first(self, free: Sequence[Any], now: float) -> tuple[Any, int] | None:
        """Plan each group in turn where it would finish first; return the first free actor in this plan and its group.

        The group is an index into the waiting ones. None if the plan leaves all free actors idle.
        """
        idle_at = {actor: max(now, queue.idle_at()) for actor, queue in self._queues.items()}
        for index, group in enumerate(self._waiting):
            ends = {actor: start + self._queues[actor].duration(group) for actor, start in idle_at.items()}
            actor = min(ends, key=ends.__getitem__)
            if actor in free:
                return actor, index
            idle_at[actor] = ends[actor]
        return None

    def _load(self, actor: Any) -> tuple[int, float]:
        queue = self._queues[actor]
        return len(queue.groups), queue.idle_at()

    def _nearest(self, actors: Sequence[Any]) -> tuple[Any, int]:
        """Choose one of these actors and the index of a waiting group, so that most states are on the actor's node."""
        nodes = {queue.node for queue in self._queues.values()}
        if len(nodes) < 2:
            return actors[0], 0

        # The longest group, or one of the next that is nearly as long: as many as there are actors.
        min_length = NEARLY_LONGEST * self._waiting[0].length
        candidates = [0]
        for index, group in enumerate(self._waiting[1 : len(self._queues)], start=1):
            if group.length >= min_length and not group.alone:
                candidates.append(index)

        first_actor = {self._queues[actor].node: actor for actor in reversed(actors)}
        pairs = [(index, node) for index in candidates for node in reversed(first_actor)]
        index, node = max(pairs, key=lambda pair: self._share(self._waiting[pair[0]]).get(pair[1], 0.0))
        return first_actor[node], index

    def _share(self, group: Group) -> Mapping[str, float]:
        """Return node -> share of a group's clients whose states are there."""
        if group not in self._shares:
            clients_on_node: Counter[str] = Counter()
            for refs in group.states:
                nodes = {ref.node for ref in refs or ()}
                if len(nodes) == 1:
                    clients_on_node.update(nodes)
            self._shares[group] = {node: count / len(group.clients) for node, count in clients_on_node.items()}
        return self._shares[group]
