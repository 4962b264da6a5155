"""Which group runs where, and when: decided without a clock or an actor."""

from __future__ import annotations

import heapq
import math
import sys
from dataclasses import replace

import numpy as np
import pytest

from raypfl.clients.worker import Group
from raypfl.federation.exchange.bundles import Bundle
from raypfl.federation.exchange.placement import PREFETCH_SECONDS, UNEQUAL_RATIO, Dispatch
from raypfl.federation.exchange.timings import Speeds, Timings
from raypfl.federation.exchange.waiting import NEARLY_LONGEST
from raypfl.storage.stacks import StackRef


def group(index: int, length: float, seconds: float = 0.0, homes: str = "") -> Bundle:
    """A group, as a bundle of its own."""
    states = [(StackRef(None, k, home),) for k, home in enumerate(homes)]
    return Bundle.of(Group(index, tuple(range(max(1, len(homes)))), np.arange(1), {}, states, length, seconds))


def dispatching(*groups: Bundle, nodes: str) -> Dispatch:
    dispatch = Dispatch(groups)
    for actor, node in enumerate(nodes):
        dispatch.join(actor, node)
    return dispatch


def pushed(dispatch: Dispatch | Searching, now: float) -> list[tuple[int, Bundle]]:
    out = []
    while chosen := dispatch.next(now):
        out.append(chosen)
    return out


def handed(dispatch: Dispatch, now: float = 0.0) -> list[tuple[int, int]]:
    return [(actor, group.index) for actor, group in pushed(dispatch, now)]


def test_the_longest_groups_go_first_and_every_actor_gets_one_before_any_gets_two():
    dispatch = dispatching(*[group(i, length) for i, length in enumerate([1, 5, 3, 4, 2])], nodes="xx")
    assert handed(dispatch) == [(0, 1), (1, 3), (0, 2), (1, 4)]


def test_a_group_is_not_assigned_long_before_its_actor_is_free():
    long = [group(i, 10, seconds=10) for i in range(3)]
    dispatch = dispatching(*long, nodes="xx")
    assert handed(dispatch, 0.0) == [(0, 0), (1, 1)]
    assert dispatch.pause(0.0) == 10 - PREFETCH_SECONDS
    assert handed(dispatch, 9.0) == []
    dispatch.finished(1, long[1], 9.0)
    assert handed(dispatch, 9.0) == [(1, 2)]
    assert dispatch.pause(9.0) == math.inf


def test_the_next_group_arrives_just_before_an_actor_is_idle():
    groups = [group(i, 1, seconds=1) for i in range(3)]
    dispatch = dispatching(*groups, nodes="x")
    assert handed(dispatch, 0.0) == [(0, 0)]
    assert handed(dispatch, 1 - PREFETCH_SECONDS) == [(0, 1)]
    assert handed(dispatch, 1 - PREFETCH_SECONDS) == []


def test_a_group_goes_to_the_waiting_actor_that_has_its_states():
    groups = [group(i, 10, homes=home * 2) for i, home in enumerate("yyxx")]
    assert handed(dispatching(*groups, nodes="xyxy")) == [(1, 0), (3, 1), (0, 2), (2, 3)]


def test_among_groups_of_similar_length_the_one_with_states_nearby_goes_first():
    groups = [group(0, 10, homes="yy"), group(1, 9.5, homes="yx"), group(2, 9.4, homes="xx"), group(3, 5, homes="xx")]
    assert handed(dispatching(*groups, nodes="xy"))[:2] == [(1, 0), (0, 2)]
    assert handed(dispatching(*groups, nodes="xx"))[:1] == [(0, 0)]


def test_a_lost_actors_groups_are_queued_again_before_or_after_all_others():
    groups = [group(i, 5 - i) for i in range(4)]
    dispatch = dispatching(*groups, nodes="x")
    assert handed(dispatch) == [(0, 0), (0, 1)]
    assert [g.index for g in dispatch.lost(0)] == [0, 1]

    dispatch.drop(groups[0])
    dispatch.append(groups[0])
    dispatch.join(9, "x")
    assert handed(dispatch) == [(9, 1), (9, 2)]
    assert not dispatch.done

    for finished in groups[1:3]:
        dispatch.finished(9, finished, 1.0)
    assert handed(dispatch) == [(9, 3), (9, 0)]

    for finished in groups[3], groups[0]:
        dispatch.finished(9, finished, 2.0)
    assert dispatch.done


def test_a_group_that_must_run_alone_waits_for_an_idle_actor_and_nothing_queues_behind_it():
    groups = [replace(group(i, 9 - i, homes="y"), alone=i < 2) for i in range(4)]
    dispatch = dispatching(*groups, nodes="xy")
    assert handed(dispatch) == [(1, 0), (0, 1)]
    assert dispatch.pause(0.0) == math.inf

    dispatch.finished(1, groups[0], 1.0)
    assert handed(dispatch) == [(1, 2), (1, 3)]

    busy = [group(0, 9), replace(group(1, 8), alone=True), group(2, 7)]
    dispatch = dispatching(*busy, nodes="x")
    assert handed(dispatch) == [(0, 0)] and dispatch.pause(0.0) == math.inf

    dispatch.finished(0, busy[0], 1.0)
    assert handed(dispatch) == [(0, 1)]

    near = replace(group(3, 9, homes="y"), alone=True)
    dispatch = dispatching(group(0, 10, homes="y"), group(1, 10, homes="x"), group(2, 9, homes="x"), near, nodes="yx")
    assert handed(dispatch) == [(0, 0), (1, 1), (0, 2)]


def test_a_client_that_was_slow_is_expected_to_be_slow_again():
    timings = Timings(np.array([1.0, 1.0, 2.0, 1.0]))
    assert timings.seconds("train", [0]) == 0.0 and timings.length([2]) == 2 * timings.length([0])
    for _ in range(10):
        for client, seconds in ((0, 0.1), (1, 0.4), (2, 0.2)):
            timings.note("train", [client], seconds)

    assert timings.seconds("train", [1]) > 3 * timings.seconds("train", [0])
    assert timings.length([0, 1]) > timings.length([0, 2])
    np.testing.assert_allclose(timings.seconds("train", [1]), 0.4, rtol=0.2)
    assert timings.seconds("evaluate", [1]) == 0.0


# --- the same decisions, found by a search ----------------------------------------------------------------------------


class Searching:
    """The policy as its documentation says it: looks at all actors and all groups for every decision."""

    def __init__(self, groups: list[Bundle]):
        self.waiting = sorted(groups, key=lambda group: (-group.length, group.index))
        self.actors: dict[int, tuple[str, float, list[Bundle]]] = {}
        self.since: dict[int, float] = {}

    def join(self, actor: int, node: str, slowness: float) -> None:
        self.actors[actor] = (node, slowness, [])

    def idle_at(self, actor: int) -> float:
        _, slowness, groups = self.actors[actor]
        return self.since[actor] + sum(slowness * group.seconds for group in groups) if groups else 0.0

    def next(self, now: float) -> tuple[int, Bundle] | None:
        free = [actor for actor in self.actors if self.waiting and self.may_get_one(actor, now)]
        if not free:
            return None

        slowness = [slow for _, slow, _ in self.actors.values()]
        is_timed = self.waiting[0].seconds > 0 and not any(group.alone for group in self.waiting)
        if is_timed and max(slowness) > UNEQUAL_RATIO * min(slowness):
            chosen = self.finishing_first(free, now)
        else:
            idle = [actor for actor in free if not self.actors[actor][2]]
            chosen = self.nearest(idle or [min(free, key=self.idle_at)])
        if chosen is None:
            return None

        actor, group = chosen
        self.waiting.remove(group)
        if not self.actors[actor][2]:
            self.since[actor] = now
        self.actors[actor][2].append(group)
        return actor, group

    def may_get_one(self, actor: int, now: float) -> bool:
        groups = self.actors[actor][2]
        is_alone = any(group.alone for group in (self.waiting[0], *groups))
        return not groups or (len(groups) < 2 and not is_alone and self.idle_at(actor) - PREFETCH_SECONDS <= now)

    def nearest(self, actors: list[int]) -> tuple[int, Bundle]:
        first, *others = self.waiting[: len(self.actors)]
        if len({node for node, _, _ in self.actors.values()}) < 2:
            return actors[0], first

        near = [group for group in others if group.length >= NEARLY_LONGEST * first.length and not group.alone]
        pairs = [(actor, group) for group in [first, *near] for actor in actors]
        return max(pairs, key=lambda pair: self.share(*pair))

    def share(self, actor: int, group: Bundle) -> int:
        node, _, _ = self.actors[actor]
        return sum(refs[0].node == node for refs in group.groups[0].states)

    def finishing_first(self, free: list[int], now: float) -> tuple[int, Bundle] | None:
        idle_at = {actor: max(now, self.idle_at(actor)) for actor in self.actors}
        for group in self.waiting:
            actor = min(idle_at, key=lambda actor: idle_at[actor] + self.actors[actor][1] * group.seconds)
            if actor in free:
                return actor, group
            idle_at[actor] += self.actors[actor][1] * group.seconds
        return None

    def finished(self, actor: int, group: Bundle, now: float) -> None:
        self.actors[actor][2].remove(group)
        self.since[actor] = now

    def lost(self, actor: int) -> list[Bundle]:
        _, _, groups = self.actors.pop(actor)
        self.waiting[:0] = groups
        return groups

    def drop(self, group: Bundle) -> None:
        self.waiting.remove(group)

    def append(self, group: Bundle) -> None:
        self.waiting.append(group)


@pytest.mark.parametrize("seed", range(12))
def test_every_decision_is_that_of_a_search_over_all_actors_and_groups(seed):
    """Groups with states on several nodes; actors come, finish and die; every third scenario has unequal actors."""
    draws = np.random.default_rng(seed)
    nodes = "xyz"[: draws.integers(1, 4)]
    is_timed = bool(seed % 2)
    groups = []
    for index in range(60):
        homes = "".join(draws.choice([*nodes, "e"], 4))
        length = float(draws.integers(20, 30) if index % 2 else draws.uniform(5, 30))
        groups.append(group(index, length, 0.01 * length * is_timed, homes))

    policies = Dispatch(groups), Searching(groups)
    working: list[tuple[int, Bundle]] = []
    present: list[int] = []
    now = 0.0
    for step in range(400):
        event = draws.choice(["join", "finish", "finish", "lose"], p=[0.1, 0.5, 0.37, 0.03])
        if event == "join" and len(present) < 7:
            slowness = float(draws.choice([1.0, 2.0, 5.0])) if seed % 3 == 0 else 1.0
            node = str(draws.choice([*nodes]))
            present.append(step)
            for policy in policies:
                policy.join(step, node, slowness)
        elif event == "finish" and working:
            actor, done = working.pop(int(draws.integers(len(working))))
            for policy in policies:
                policy.finished(actor, done, now)
        elif event == "lose" and present:
            actor = present.pop(int(draws.integers(len(present))))
            working = [work for work in working if work[0] != actor]
            lost, _ = (list(policy.lost(actor)) for policy in policies)
            for interrupted in lost if step % 2 else []:
                alone = replace(interrupted, alone=True)
                for policy in policies:
                    policy.drop(interrupted)
                    policy.append(alone)

        now += float(draws.uniform(0.006, 0.05))
        new, expected = (pushed(policy, now) for policy in policies)
        assert set(new) == set(expected), (step, event)
        working += new
        assert policies[0].done == (not policies[1].waiting and not working)
    assert len(policies[1].waiting) < 20


@pytest.mark.parametrize("slowest", [1.0, 3.0])
def test_a_decision_among_a_thousand_actors_looks_at_a_few(slowest):
    nodes = 125
    lengths = np.linspace(5, 1, 3000)
    homes = [chr(200 + k) for k in range(nodes)]
    groups = [group(i, length, float(length), homes[i % nodes]) for i, length in enumerate(lengths)]
    dispatch = Dispatch(groups)
    for actor in range(1000):
        dispatch.join(actor, homes[actor % nodes], slowest if actor % 2 else 1.0)
    working = pushed(dispatch, 0.0)

    calls = 0

    def count(frame: object, event: str, function: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    for turn in range(500):
        actor, done = working[turn]
        dispatch.finished(actor, done, 5 + 0.001 * turn)
        working += pushed(dispatch, 5 + 0.001 * turn)
    sys.setprofile(None)
    assert len(working) > 1400 and calls < 100 * 1000


# --- actors of unequal speed ------------------------------------------------------------------------------------------


def replayed(groups: list[Bundle], slowness: list[float], known_slowness: list[float]) -> tuple[float, int]:
    """Seconds until all groups are done by actors that are so slow and believed to be; and how often it was looked."""
    dispatch = Dispatch(groups)
    now = 0.0
    looks = 0
    for actor, believed in enumerate(known_slowness):
        dispatch.join(actor, "x", believed)
    free = [0.0] * len(slowness)
    ends = []

    while not dispatch.done:
        while chosen := dispatch.next(now):
            actor, group = chosen
            free[actor] = max(free[actor], now) + slowness[actor] * group.seconds
            heapq.heappush(ends, (free[actor], actor, group.index))

        looks += 1
        end = ends[0][0]
        moment = now + dispatch.pause(now)
        if moment < end:
            now = moment
            continue

        now, actor, index = heapq.heappop(ends)
        dispatch.finished(actor, groups[index], now)

    return now, looks


@pytest.mark.parametrize("slowness", [[1, 1, 4], [1, 1, 1, 3, 3], [1, 10], [1, 2, 4, 8]])
def test_slow_actors_get_less_work_and_none_that_others_would_finish_sooner(slowness):
    lengths = [5] * 6 + [4] * 6 + [3] * 6 + [2] * 6 + [1] * 6
    groups = [group(i, length, seconds=float(length)) for i, length in enumerate(lengths)]
    least = sum(lengths) / sum(1 / slow for slow in slowness)
    took, looks = replayed(groups, slowness, slowness)
    assert took < 1.06 * least
    assert looks < 20 * len(groups)
    assert took <= replayed(groups, slowness, [1.0] * len(slowness))[0]


def test_a_last_group_waits_for_a_fast_actor_rather_than_going_to_a_slow_one():
    last = [group(0, 2, seconds=2), group(1, 2, seconds=2)]
    dispatch = Dispatch(last)
    for actor, slowness in enumerate([4.0, 1.0]):
        dispatch.join(actor, "x", slowness)
    assert handed(dispatch) == [(1, 0)]
    assert 0 < dispatch.pause(0.0) <= 2 - PREFETCH_SECONDS
    assert handed(dispatch, 2 - PREFETCH_SECONDS) == [(1, 1)]


def test_small_differences_between_actors_count_as_noise():
    groups = [group(i, 2, seconds=2) for i in range(2)]
    dispatch = Dispatch(groups)
    for actor, slowness in enumerate([0.99 * UNEQUAL_RATIO, 1.0]):
        dispatch.join(actor, "x", slowness)
    assert handed(dispatch) == [(0, 0), (1, 1)]


def test_a_slow_place_is_recognised_after_a_few_groups_and_its_clients_are_not_blamed():
    draws = np.random.default_rng(0)
    true = {"gpu": 1.0, "cpu": 4.0, "old": 8.0}
    timings = Timings(np.ones(300))
    speeds = Speeds()
    for place in true:
        speeds.slowness(place)

    for _ in range(20):
        for place, clients in zip([*true] * 4, draws.permutation(300)[:120].reshape(12, 10), strict=True):
            next_group = Group(0, tuple(clients.tolist()), clients, {}, [], timings.length(clients))
            seconds = 0.1 * true[place] * 10 * draws.lognormal(0, 0.1)
            timings.note("train", next_group.clients, speeds.note(place, "train", next_group, seconds))

    slowness = {place: speeds.slowness(place) / speeds.slowness("gpu") for place in true}
    assert slowness == {place: pytest.approx(slow, rel=0.2) for place, slow in true.items()}
    few, many = np.quantile([timings.length([client]) for client in range(300)], [0.05, 0.95])
    assert many < 1.7 * few

    expected = timings.seconds("train", range(10)) * speeds.slowness("cpu")
    assert expected == pytest.approx(4.0, rel=0.25)


def test_nothing_is_learned_about_places_if_there_is_only_one():
    speeds = Speeds()
    (only,) = group(0, 1.0).groups
    assert [speeds.note("here", "train", only, seconds) for seconds in (1.0, 9.0)] == [1.0, 9.0]
    assert speeds.slowness("here") == 1.0
