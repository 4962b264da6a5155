"""The Ray backend: pushes groups to client actors and replaces actors that die."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError, RayTaskError

from raypfl.clients.worker import Call, Group
from raypfl.common.counting import counted
from raypfl.common.errors import RaypflError, Stopped
from raypfl.common.memory import out_of_memory
from raypfl.engine.backends.actor_pools import ActorPools
from raypfl.engine.backends.client_actor import Home, get_broadcasts
from raypfl.engine.backends.home_checks import HomeChecks
from raypfl.engine.backends.objects import states_on_ray
from raypfl.engine.backends.objects.answers import Answers
from raypfl.engine.backends.objects.sums_on_nodes import SumsOnNodes
from raypfl.engine.backends.restarts import MAX_SETUP_FAILURES, RestartPolicy
from raypfl.engine.backends.shipment import Shipment
from raypfl.federation.exchange.backend import BundleReply, Done, Failed, StoredStack
from raypfl.federation.exchange.broadcasts import INLINE_BYTES
from raypfl.federation.exchange.bundles import Bundle, bundled
from raypfl.federation.exchange.partial_sums import PartialSum, should_stay_on_nodes
from raypfl.federation.exchange.placement import Dispatch
from raypfl.federation.exchange.timings import Speeds
from raypfl.storage.filesystems import is_shared
from raypfl.storage.stacks import Fetch
from raypfl.storage.states import StateFile

LOOK = 1.0
"""Seconds at least between looks at the cluster's nodes."""

POLL = 0.1
"""Seconds between checks whether the run was asked to stop, and at least between looks at actors that start."""

MAX_REPLIES = 64
"""Replies that are handled after one look at all that are awaited. A look takes 0.1 ms for 100 references, and 0.9 for
2,000."""


@dataclass(eq=False)
class _Actor:
    """A client actor.

    Attributes
    ----------
    pool : the index of its pool.
    handle : the Ray actor.
    prepared : the reference that `prepare` returned.
    home : where the actor is, once it is ready.
    takes_part : whether it gets groups; not if it computes on another type of device.
    """

    pool: int
    handle: Any
    prepared: Any
    home: Home | None = None
    takes_part: bool = True

    @property
    def place(self) -> tuple[int, str]:
        """The pool and the node: actors of one place are equally fast."""
        return self.pool, self.home.node if self.home else ""


@dataclass(frozen=True, eq=False)
class _Submitted:
    """A bundle that was pushed to an actor, with references to its reply, its groups' states and, perhaps, its sums."""

    bundle: Bundle
    actor: _Actor
    reply: Any
    stacks: Sequence[Any]
    sums: Any = None


class RayBackend:
    """Pushes groups to client actors, the longest first. Replaces actors that die and runs their groups elsewhere.

    From round to round, the number of actors follows the nodes that there are. If a GPU's memory is too small for the
    actors that share it, fewer of them do; the groups stay as they are, and so do the results.

    Parameters
    ----------
    actors : the client actors, which may still be starting, as ``(pool, handle)``.
    start : a function that starts another actor with options for Ray.
    pools : the number of actors that each pool should have.
    job : the job that the actors prepare for.
    stopped : a function that tells whether the run was asked to stop; called between results.
    warn : a function that is called with a warning, for example when actors die.
    mixed_devices : whether actors may compute on devices of several types.
    """

    def __init__(
        self,
        actors: Sequence[tuple[int, Any]],
        start: Callable[[Mapping[str, Any]], Any],
        pools: ActorPools,
        job: Shipment,
        stopped: Callable[[], bool],
        warn: Callable[[str], None],
        mixed_devices: bool = False,
    ):
        self._restarts = RestartPolicy()
        self._speeds = Speeds()
        self._start = start
        self._pools = pools
        self._checks = HomeChecks(mixed_devices, warn)
        self._has_begun = False
        self._round = 0
        self._last_look = 0.0
        self._job = job
        self._answers = Answers()
        self._stopped = stopped
        self._warn = warn
        self._targets = [sum(actor_pool == pool for actor_pool, _ in actors) for pool in range(len(pools))]
        # Sets that keep their order: all actors by pool, and by the reference that `prepare` returned those to come.
        self._pool_actors: list[dict[_Actor, None]] = [{} for _ in range(len(pools))]
        self._starting: dict[Any, _Actor] = {}
        self._next_look_at_starting = 0.0
        for pool, handle in actors:
            self._add(pool, handle)

    @property
    def num_actors(self) -> int:
        return max(1, sum(self._targets))

    def broadcast(self, arrays: Mapping[str, np.ndarray], inside: bool = True) -> Any:
        contiguous = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
        inside = inside and sum(array.nbytes for array in contiguous.values()) <= INLINE_BYTES
        return contiguous if inside else ray.put(contiguous)

    def get_broadcast(self, handle: Any) -> Mapping[str, np.ndarray]:
        return get_broadcasts([handle])[0]

    def map_states(self, function: Callable[[Fetch, Any], Any], jobs: Sequence[tuple[str, Any]]) -> list[Any]:
        return states_on_ray.map_states(self._ready_by_node(), function, jobs)

    def read_states(self, location: str, files: Sequence[StateFile]) -> Iterator[StoredStack]:
        actors_by_node = self._ready_by_node() if is_shared(location) else {}
        return states_on_ray.read_states(actors_by_node, location, files, self._warn)

    def _ready_by_node(self) -> dict[str, list[Any]]:
        """Return the handles of the actors that are ready, by node."""
        homes = {actor: actor.home for actor in self._all_actors() if actor.home is not None}
        ready, _ = ray.wait(list(self._starting), num_returns=len(self._starting), timeout=0)
        for prepared in ready:
            # An actor that could not be set up is dealt with when groups run.
            with contextlib.suppress(RayError):
                homes[self._starting[prepared]] = ray.get(prepared)

        handles_by_node: dict[str, list[Any]] = {}
        for actor, home in homes.items():
            handles_by_node.setdefault(home.node, []).append(actor.handle)
        return handles_by_node

    def wait_for_actors(self, seconds: float) -> None:
        """Wait until all actors that have room are ready, but no longer than this: others may use the cluster, too."""
        deadline = time.monotonic() + seconds
        # Nodes may have joined: there can be room for more actors than have been started.
        expected = 0
        for pool, placeable in enumerate(self._pools.placeable_counts()):
            expected += min(placeable, len(self._pool_actors[pool]))

        ready: list[Any] = []
        while len(ready) < expected and time.monotonic() < deadline and not self._stopped():
            ready, _ = ray.wait([actor.prepared for actor in self._all_actors()], num_returns=expected, timeout=POLL)

        if (expected and len(ready) >= expected) or self._stopped():
            return
        if not expected:
            self._warn("The run waits for nodes to join: none has room for a client actor.")
            return
        self._warn(
            f"Only {len(ready)} of {expected} client actors came up within {seconds:g} s: the cluster is busy "
            "or slow. The others take part as soon as they are ready."
        )

    @property
    def actors(self) -> list[tuple[int, Any]]:
        """The client actors that are alive, for the next run."""
        return [(actor.pool, actor.handle) for actor in self._all_actors()]

    def run(self, call: Call, groups: Sequence[Group]) -> Iterator[tuple[Group, Done | Failed]]:
        self._follow_the_cluster(call.round)
        bundles = bundled(groups, sum(self._targets), self._answers.most_clients(call.function))
        if not self._should_leave_sums(call, bundles):
            return self._outcomes_of(call, bundles, None)
        sums = SumsOnNodes(groups)
        return sums.with_sums(self._outcomes_of(call, bundles, sums))

    def _should_leave_sums(self, call: Call, bundles: Sequence[Bundle]) -> bool:
        nodes = {home.node for home in _homes(self._all_actors())}
        if len(nodes) < 2:
            return False
        seconds = sum(bundle.seconds for bundle in bundles) / sum(self._targets)
        return should_stay_on_nodes(len(bundles), self._answers.sum_bytes(call.function), seconds)

    def _outcomes_of(
        self, call: Call, bundles: Sequence[Bundle], sums: SumsOnNodes | None
    ) -> Generator[tuple[Group, Done | Failed], None, None]:
        """Run bundles; yield groups' outcomes as they arrive, without the sums if these stay on nodes."""
        dispatch = Dispatch(bundles)
        submitted: dict[Any, _Submitted] = {}
        # The first bundles, which are neighbours, go to actors of the same node.
        for actor in sorted(self._all_actors(), key=lambda actor: actor.place):
            self._join(actor, dispatch)
        try:
            while not self._is_over(dispatch, sums):
                self._start_missing_actors()
                self._add_ready_actors(submitted, dispatch)
                self._push(call, dispatch, submitted, sums)

                awaited = [*submitted, *(sums.awaited if sums else ())]
                for reply in self._replies(awaited, dispatch.pause(time.monotonic())):
                    if sums is not None and reply in sums.awaited:
                        self._run_again(sums.arrived(reply), dispatch)
                        continue
                    # Another of the actor's groups may have shown that the actor died.
                    if reply not in submitted:
                        continue
                    task = submitted[reply]
                    try:
                        outcomes = self._outcomes(call, task)
                    except RayError as error:
                        # The actor, its node or its memory failed; an error of the group is an outcome.
                        yield from self._died(task.actor, submitted, dispatch, error)
                    else:
                        errors = [outcome.error for _, outcome in outcomes if isinstance(outcome, Failed)]
                        if any(self._made_room(task.actor, error, submitted, dispatch) for error in errors):
                            continue
                        del submitted[reply]
                        self._has_begun = True
                        self._restarts.group_finished()
                        dispatch.finished(task.actor, task.bundle, time.monotonic())
                        if sums is not None:
                            _note_sums(task, outcomes, sums)
                        self._push(call, dispatch, submitted, sums)
                        yield from outcomes
        finally:
            # A method's code cannot be interrupted, so actors with unwanted work are killed.
            for actor in {task.actor for task in submitted.values()}:
                if actor in self._pool_actors[actor.pool]:
                    self._kill(actor)

    def _outcomes(self, call: Call, task: _Submitted) -> list[tuple[Group, Done | Failed]]:
        groups = task.bundle.groups
        try:
            answer: BundleReply = ray.get(task.reply)
        except RayTaskError as error:
            return [(group, Failed(error, str(error))) for group in groups]

        _, node = task.actor.place
        outcomes = self._answers.outcomes(call.function, groups, answer, task.stacks, node)
        for group, outcome in outcomes:
            if isinstance(outcome, Done):
                reply = outcome.reply
                reply.seconds = self._speeds.note(task.actor.place, call.function, group, reply.seconds)
        return outcomes

    def _is_over(self, dispatch: Dispatch, sums: SumsOnNodes | None) -> bool:
        """Return whether all groups have finished, and all sums are here that were left on nodes."""
        if not dispatch.done or sums is None:
            return dispatch.done
        if not sums.awaited:
            self._run_again(sums.fetch(), dispatch)
        return dispatch.done and not sums.awaited

    def _run_again(self, groups: Sequence[Group], dispatch: Dispatch) -> None:
        """Run groups again whose sums are lost."""
        if groups:
            self._warn(
                f"Sums of {counted(len(groups), 'group')} are lost, perhaps with a node; the work is done again."
            )
        for group in groups:
            dispatch.append(Bundle.of(group))

    def _push(self, call: Call, dispatch: Dispatch, submitted: dict[Any, _Submitted], sums: SumsOnNodes | None) -> None:
        are_separate = self._answers.are_separate(call.function)
        while chosen := dispatch.next(time.monotonic()):
            actor, bundle = chosen
            num_stacks = sum(len(group.clients) if are_separate else 1 for group in bundle.groups)
            if sums is None:
                work = actor.handle.work.options(num_returns=1 + num_stacks)
                reply, *stacks = work.remote(call, bundle.groups, are_separate)
                submitted[reply] = _Submitted(bundle, actor, reply, stacks)
            else:
                work = actor.handle.work_leaving_sums.options(num_returns=2 + num_stacks)
                reply, subtrees, *stacks = work.remote(call, bundle.groups, are_separate)
                submitted[reply] = _Submitted(bundle, actor, reply, stacks, subtrees)

    def _follow_the_cluster(self, round: int) -> None:
        """In a new round, have as many actors as have room now; give up those that still wait for room that is gone."""
        if round == self._round or time.monotonic() < self._last_look + LOOK:
            return
        self._round = round
        self._last_look = time.monotonic()

        before = self._targets
        self._targets = self._pools.target_counts()
        if self._targets == before:
            return

        self._warn(f"The cluster has changed: the run now has {sum(self._targets)} client actors, not {sum(before)}.")
        for pool, target in enumerate(self._targets):
            waiting = [actor for actor in self._pool_actors[pool] if actor.home is None]
            surplus = max(0, len(self._pool_actors[pool]) - target)
            for actor in waiting[:surplus]:
                self._kill(actor)

    def _all_actors(self) -> list[_Actor]:
        return [actor for actors in self._pool_actors for actor in actors]

    def _add(self, pool: int, handle: Any) -> None:
        """Let an actor prepare for the run's job."""
        actor = _Actor(pool, handle, handle.prepare.remote(self._job))
        self._pool_actors[pool][actor] = None
        self._starting[actor.prepared] = actor

    def _start_missing_actors(self) -> None:
        for pool, target in enumerate(self._targets):
            while len(self._pool_actors[pool]) < target and self._restarts.may_start(time.monotonic()):
                self._add(pool, self._start(self._pools.options(pool)))

    def _add_ready_actors(self, submitted: dict[Any, _Submitted], dispatch: Dispatch) -> None:
        """Let actors take part once they run: a group that is pushed to one without room would wait for ever."""
        # Many may wait for room for as long as the run takes.
        if not self._starting or (submitted and time.monotonic() < self._next_look_at_starting):
            return
        self._next_look_at_starting = time.monotonic() + POLL

        ready, _ = ray.wait(list(self._starting), num_returns=len(self._starting), timeout=0)
        for reference in ready:
            # An actor before this one may have made the backend give it up.
            actor = self._starting.pop(reference, None)
            if actor is not None:
                self._note_ready(actor, submitted, dispatch)
                self._join(actor, dispatch)

    def _join(self, actor: _Actor, dispatch: Dispatch) -> None:
        """Let an actor have groups, if it is ready and takes part."""
        if actor.home is not None and actor.takes_part:
            dispatch.join(actor, actor.home.node, self._speeds.slowness(actor.place))

    def _note_ready(self, actor: _Actor, submitted: dict[Any, _Submitted], dispatch: Dispatch) -> None:
        try:
            actor.home = ray.get(actor.prepared)
        except RayTaskError as error:
            if self._made_room(actor, error.cause, submitted, dispatch):
                return
            raise RaypflError(f"A client actor could not be set up: {error.cause}") from error
        except RayError as error:
            self._kill(actor)
            self._died_in_setup(error)
        else:
            actor.takes_part = self._checks.takes_part(actor.home, self._has_begun)
            share = self._pools.options(actor.pool)["num_gpus"]
            self._checks.check_gpu(actor.home, share, _homes(self._pool_actors[actor.pool]), _homes(self._all_actors()))

    def _made_room(
        self, actor: _Actor, error: BaseException | None, submitted: dict[Any, _Submitted], dispatch: Dispatch
    ) -> bool:
        """If a GPU share had too little memory, start the actor's pool again with fewer actors and larger shares."""
        if not out_of_memory(error):
            return False
        counts = self._pools.reduce_sharing(actor.pool)
        if counts is None:
            return False

        for pool_actor in list(self._pool_actors[actor.pool]):
            self._kill(pool_actor)
            _forget_tasks(pool_actor, submitted)
            dispatch.lost(pool_actor)

        self._targets = self._pools.target_counts()
        before, now = counts
        self._warn(f"A GPU's memory was too small for {before} client actors; from now on {now} share it.")
        return True

    def _died_in_setup(self, error: RayError) -> None:
        """Give up if actors keep dying in their set-up and there is no other one that can work."""
        now = time.monotonic()
        policy = self._restarts
        policy.died_in_setup(now, getattr(error, "actor_init_failed", False))
        if policy.setup_deaths == MAX_SETUP_FAILURES:
            self._warn("Client actors die while they are set up; others are started after growing pauses.")
        if policy.is_hopeless(now) and not any(actor.home for actor in self._all_actors()):
            raise RaypflError(
                f"Client actors die while they are set up: {policy.setup_deaths} since the last group was finished, "
                f"and none is left. {_reason(error)}"
            ) from error

    def _replies(self, awaited: list[Any], pause: float) -> list[Any]:
        """Return references of replies that have arrived, after `pause` seconds at most."""
        if self._stopped():
            raise Stopped("The run was asked to stop.")
        if awaited:
            ready, _ = ray.wait(awaited, num_returns=min(len(awaited), MAX_REPLIES), timeout=0)
            if not ready:
                ready, _ = ray.wait(awaited, num_returns=1, timeout=min(POLL, pause))
            return ready

        if self._starting:
            ray.wait(list(self._starting), num_returns=1, timeout=POLL)
        else:
            time.sleep(POLL)
        return []

    def _died(
        self, actor: _Actor, submitted: dict[Any, _Submitted], dispatch: Dispatch, error: BaseException
    ) -> Iterator[tuple[Group, Failed]]:
        """Put a dead actor's groups at the end of the queue, or yield the only one if its actors died too often.

        Of several groups any may have caused the death, so each runs alone the next time, after the groups that wait.
        """
        self._kill(actor)
        self._warn("A client actor died; another takes its place, and its groups run again.")
        _forget_tasks(actor, submitted)

        groups: list[Group] = []
        for bundle in dispatch.lost(actor):
            dispatch.drop(bundle)
            groups += bundle.groups

        for group in groups:
            deaths = self._restarts.died_at_work((group.index, group.clients)) if len(groups) == 1 else 0
            if deaths == group.deaths:
                yield group, Failed(error, f"Its actor's process died. {_reason(error)}", deaths)
            else:
                dispatch.append(Bundle.of(replace(group, alone=True)))

    def _kill(self, actor: _Actor) -> None:
        del self._pool_actors[actor.pool][actor]
        self._starting.pop(actor.prepared, None)
        ray.kill(actor.handle)


def _homes(actors: Iterable[_Actor]) -> list[Home]:
    return [actor.home for actor in actors if actor.home is not None]


def _forget_tasks(actor: _Actor, submitted: dict[Any, _Submitted]) -> None:
    for task in list(submitted.values()):
        if task.actor is actor:
            del submitted[task.reply]


def _note_sums(task: _Submitted, outcomes: Sequence[tuple[Group, Done | Failed]], sums: SumsOnNodes) -> None:
    groups = tuple(group for group, outcome in outcomes if isinstance(outcome, Done))
    if groups:
        sums.add(PartialSum(groups, task.sums), task.actor.handle)


def _reason(error: BaseException) -> str:
    """Return the end of Ray's message, and what may help."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[-3:]) + " Is there enough memory for the actors? Fewer of them (ray.actors) need less."
