"""Which bundle of groups goes to which actor, and when: the policy alone, without actors or a clock.

What it decides changes how long a round takes and nothing else: neither the cut nor the tree along which sums are added
depends on it. `benchmarks/scheduling.py` replays measured times through the same code. No decision looks at all actors
or all bundles, except for a plan for unequal actors.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from raypfl.federation.exchange.bundles import Bundle
from raypfl.federation.exchange.waiting import Waiting

MAX_IN_FLIGHT = 2
"""Largest number of bundles at an actor: while it computes one, the next is already there."""

PREFETCH_SECONDS = 0.025
"""Seconds before an actor is expected to be idle at which it gets its next bundle, so that this arrives in time. If it
were sent earlier, it could get stuck behind a slow one while another actor is idle."""

UNEQUAL_RATIO = 1.3
"""Actors are treated as unequal from this ratio of their times on; smaller ones are mostly chance."""

RECHECK_SECONDS = 0.005
"""Seconds between two checks whether an idle, slower actor should take a bundle after all."""

ACTORS_PER_BUNDLE = 8
"""A plan for unequal actors is made again after a finished bundle for every so many of them, since it looks at all of
them and at all bundles that wait."""


@dataclass(eq=False)
class _Queue:
    """The bundles of an actor, in order; the first one has been running since `since`.

    `number` : the actor's place in the order in which actors joined.
    """

    number: int
    actor: Any
    node: str
    slowness: float
    bundles: list[Bundle] = field(default_factory=list)
    since: float = 0.0

    def duration(self, bundle: Bundle) -> float:
        """Return the expected seconds of a bundle at this actor."""
        return self.slowness * bundle.seconds

    def idle_at(self) -> float:
        """Return the time at which the actor is expected to be idle; 0 if it is."""
        if not self.bundles:
            return 0.0
        return self.since + sum(map(self.duration, self.bundles))

    def has_room(self) -> bool:
        """Return whether the actor may get the next bundle while it computes another."""
        return len(self.bundles) < MAX_IN_FLIGHT and not any(bundle.alone for bundle in self.bundles)


class _Plan:
    """Which of the waiting bundles each actor is to get: every bundle, in turn, goes where it would finish first.

    Attributes
    ----------
    num_finished : the number of bundles that have finished since.
    bundles : number of the actor -> its bundles.
    perhaps_idle : the numbers of actors that may be idle and have bundles, in the order of these.
    """

    def __init__(self, waiting: Iterable[Bundle], queues: Sequence[_Queue], now: float):
        self.made_at = now
        self.num_finished = 0
        self.bundles: dict[int, deque[Bundle]] = {}

        idle_at = np.array([max(now, queue.idle_at()) for queue in queues])
        slowness = np.array([queue.slowness for queue in queues])
        for bundle in waiting:
            ends = idle_at + slowness * bundle.seconds
            chosen = int(ends.argmin())
            idle_at[chosen] = ends[chosen]
            self.bundles.setdefault(queues[chosen].number, deque()).append(bundle)
        self.perhaps_idle = deque(self.bundles)


class Dispatch:
    """Assigns bundles to actors, the longest bundle first, on the node with its clients' states if that costs no time.

    Among actors of unequal speed, a bundle waits for one that is busy if it would be done sooner there.
    An actor is any hashable value.
    """

    def __init__(self, bundles: Iterable[Bundle]):
        self._waiting = Waiting(bundles)
        self._num_in_flight = 0
        self._plan: _Plan | None = None

        self._queues: dict[Any, _Queue] = {}
        self._by_number: dict[int, _Queue] = {}
        self._num_joined = 0
        self._num_on_node: Counter[str] = Counter()
        self._num_as_slow: Counter[float] = Counter()
        self._is_mixed = False

        # Everything is sorted: the numbers of idle actors, all and by node, and ``(when it is expected to be idle,
        # number)`` of the actors with a bundle and room for another.
        self._idle: list[int] = []
        self._idle_on: dict[str, list[int]] = {}
        self._finishing: list[tuple[float, int]] = []

    def join(self, actor: Any, node: str, slowness: float = 1.0) -> None:
        """Add an actor that is ready for bundles, on a `node`. For `slowness`, see :class:`Speeds`."""
        queue = _Queue(self._num_joined, actor, node, slowness)
        self._num_joined += 1
        self._queues[actor] = queue
        self._by_number[queue.number] = queue
        self._enter(queue)

        self._num_on_node[node] += 1
        self._num_as_slow[slowness] += 1
        self._actors_changed()

    @property
    def done(self) -> bool:
        """Whether all bundles have finished."""
        return not self._waiting and not self._num_in_flight

    def next(self, now: float) -> tuple[Any, Bundle] | None:
        """Return the next ``(actor, bundle)`` to push now, or None. Call it until it returns None."""
        if not self._waiting:
            return None

        if self._are_unequal():
            choice = self._planned(now)
        elif self._idle:
            choice = self._nearest(self._idle_on, self._idle[0])
        else:
            choice = self._prefetched(now)
        if choice is None:
            return None

        queue, bundle = choice
        self._waiting.remove(bundle)
        self._leave(queue)
        if not queue.bundles:
            queue.since = now
        queue.bundles.append(bundle)
        self._enter(queue)
        self._num_in_flight += 1
        return queue.actor, bundle

    def pause(self, now: float) -> float:
        """Return the seconds until :meth:`next` may return something if nothing else happens; infinite: it will not."""
        if not self._waiting or not self._finishing or self._waiting.first.alone:
            return float("inf")

        # Among unequal actors, one may be idle on purpose; check only now and then whether it should take a bundle.
        shortest = self._recheck_seconds() if self._are_unequal() else 0.0
        return max(shortest, self._finishing[0][0] - PREFETCH_SECONDS - now)

    def finished(self, actor: Hashable, bundle: Bundle, now: float) -> None:
        """Note that an actor has finished a bundle."""
        queue = self._queues[actor]
        self._leave(queue)
        queue.bundles.remove(bundle)
        queue.since = now
        self._enter(queue)
        self._num_in_flight -= 1

        if self._plan is not None:
            self._plan.num_finished += 1
            self._plan.perhaps_idle.append(queue.number)

    def lost(self, actor: Hashable) -> list[Bundle]:
        """Remove an actor that died; return its bundles, which wait again."""
        queue = self._queues.pop(actor, None)
        if queue is None:
            return []

        self._leave(queue)
        del self._by_number[queue.number]
        self._num_on_node -= Counter([queue.node])
        self._num_as_slow -= Counter([queue.slowness])
        self._actors_changed()
        self._waiting.put_back(queue.bundles)
        self._num_in_flight -= len(queue.bundles)
        return queue.bundles

    def drop(self, bundle: Bundle) -> None:
        """Remove a waiting bundle."""
        self._waiting.remove(bundle)
        self._plan = None

    def append(self, bundle: Bundle) -> None:
        """Add a bundle that waits until all others are pushed."""
        self._waiting.append(bundle)
        self._plan = None

    def _enter(self, queue: _Queue) -> None:
        """List an actor where it belongs, by its bundles."""
        if not queue.bundles:
            insort(self._idle, queue.number)
            insort(self._idle_on.setdefault(queue.node, []), queue.number)
            self._waiting.note_idle(queue.node)
        elif queue.has_room():
            insort(self._finishing, (queue.idle_at(), queue.number))

    def _leave(self, queue: _Queue) -> None:
        """Undo :meth:`_enter`, before the actor's bundles change."""
        if not queue.bundles:
            on_node = self._idle_on[queue.node]
            del self._idle[bisect_left(self._idle, queue.number)]
            del on_node[bisect_left(on_node, queue.number)]
            if not on_node:
                del self._idle_on[queue.node]
        elif queue.has_room():
            del self._finishing[bisect_left(self._finishing, (queue.idle_at(), queue.number))]

    def _actors_changed(self) -> None:
        slowness = self._num_as_slow
        self._is_mixed = bool(slowness) and max(slowness) > UNEQUAL_RATIO * min(slowness)
        self._plan = None

    def _are_unequal(self) -> bool:
        """Return whether actors are known to take different times for the bundles that wait."""
        return self._is_mixed and self._waiting.first.seconds > 0 and not self._waiting.num_alone

    def _nearest(self, actors_on: Mapping[str, Sequence[int]], first: int) -> tuple[_Queue, Bundle]:
        """Choose an actor, of these (node -> numbers), and a bundle that has most of its states on that node."""
        if len(self._num_on_node) < 2:
            return self._by_number[first], self._waiting.first

        node, bundle = self._waiting.nearest(actors_on, most=len(self._queues))
        number = first if node is None else actors_on[node][0]
        return self._by_number[number], bundle

    def _prefetched(self, now: float) -> tuple[_Queue, Bundle] | None:
        """Choose a bundle for the actor that will be idle first, if it is time to send one."""
        if not self._is_due(now) or self._waiting.first.alone:
            return None
        _, number = self._finishing[0]
        return self._nearest({self._by_number[number].node: [number]}, number)

    def _is_due(self, now: float) -> bool:
        return bool(self._finishing) and self._finishing[0][0] - PREFETCH_SECONDS <= now

    def _planned(self, now: float) -> tuple[_Queue, Bundle] | None:
        """Choose an actor that may get a bundle now, and the first that is planned for it; None if there is none."""
        if not self._idle and not self._is_due(now):
            return None

        plan = self._current_plan(now)
        while plan.perhaps_idle:
            queue = self._by_number[plan.perhaps_idle[0]]
            if not queue.bundles and plan.bundles.get(queue.number):
                return queue, plan.bundles[queue.number].popleft()
            plan.perhaps_idle.popleft()

        for idle_at, number in self._finishing:
            if idle_at - PREFETCH_SECONDS > now:
                break
            if plan.bundles.get(number):
                return self._by_number[number], plan.bundles[number].popleft()
        return None

    def _current_plan(self, now: float) -> _Plan:
        plan = self._plan
        max_finished = len(self._queues) // ACTORS_PER_BUNDLE
        if plan is None or plan.num_finished > max_finished or now >= plan.made_at + self._recheck_seconds():
            plan = self._plan = _Plan(self._waiting, list(self._queues.values()), now)
        return plan

    def _recheck_seconds(self) -> float:
        return RECHECK_SECONDS * max(1.0, len(self._queues) / ACTORS_PER_BUNDLE)
