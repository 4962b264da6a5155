"""The Ray backend: pushes groups to client actors and replaces actors that die."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError, RayTaskError

from raypfl.backends.client_actor import get_broadcasts, get_states
from raypfl.backends.restarts import MAX_SETUP_FAILURES, RestartPolicy
from raypfl.backends.shipment import Shipment
from raypfl.clients.worker import Call, Group, Reply
from raypfl.common.errors import RaypflError, Stopped
from raypfl.federation.backend import Done, Failed
from raypfl.federation.broadcasts import INSIDE
from raypfl.federation.placement import Dispatch
from raypfl.storage.states import Stack

APART = 1_000_000
"""Bytes from which a client's state is a Ray object of its own, so that it is freed as soon as there is a newer one.
An object costs about a millisecond, as much as copying so many bytes."""

POLL = 0.1
"""Seconds between checks whether the run was asked to stop."""


@dataclass(eq=False)
class _Actor:
    """A client actor: its handle, the reference that `prepare` returns, and the node it is on once it is ready."""

    handle: Any
    prepared: Any
    node: str | None = None


@dataclass(frozen=True, eq=False)
class _Submitted:
    """A group that was pushed to an actor, and the references that its reply and its states will be behind."""

    group: Group
    actor: _Actor
    reply: Any
    stacks: Sequence[Any]


class RayBackend:
    """Pushes groups to client actors, the longest first. Replaces actors that die and runs their groups elsewhere.

    Parameters
    ----------
    actors : handles of client actors, which may still be starting. start : starts another one.
    job : what the actors prepare for.
    stopped : whether the run was asked to stop; called between results.
    warn : called with a warning when actors die.
    """

    def __init__(
        self,
        actors: Sequence[Any],
        start: Callable[[], Any],
        job: Shipment,
        stopped: Callable[[], bool],
        warn: Callable[[str], None],
    ):
        self._restarts = RestartPolicy()
        self._start = start
        self._job = job
        self._apart: dict[Hashable, bool] = {}  # function -> whether its clients' states were large the last time
        self._stopped = stopped
        self._warn = warn
        self._wanted = len(actors)
        self._actors = [_Actor(actor, actor.prepare.remote(job)) for actor in actors]

    def broadcast(self, arrays: Mapping[str, np.ndarray], inside: bool = True) -> Any:
        contiguous = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
        inside = inside and sum(array.nbytes for array in contiguous.values()) <= INSIDE
        return contiguous if inside else ray.put(contiguous)

    def get_broadcast(self, handle: Any) -> Mapping[str, np.ndarray]:
        return get_broadcasts([handle])[0]

    def put_states(self, stack: Stack) -> Any:
        return ray.put(stack)

    def get_states(self, handle: Any) -> Stack:
        return get_states([handle])[0]

    def wait_for_actors(self, seconds: float) -> None:
        """Wait until all actors are ready, but no longer than this: the cluster may have no room for some of them."""
        deadline = time.monotonic() + seconds
        ready: list[Any] = []
        while len(ready) < self._wanted and time.monotonic() < deadline and not self._stopped():
            ready, _ = ray.wait([actor.prepared for actor in self._actors], num_returns=self._wanted, timeout=POLL)
        if len(ready) < self._wanted and not self._stopped():
            self._warn(
                f"Only {len(ready)} of {self._wanted} client actors came up within {seconds:g} s: the cluster is busy "
                "or slow. The others take part as soon as they are ready."
            )

    @property
    def actors(self) -> list[Any]:
        """Handles of the client actors that are alive, for the next run."""
        return [actor.handle for actor in self._actors]

    def run(self, call: Call, groups: Sequence[Group]) -> Iterator[tuple[Group, Done | Failed]]:
        dispatch = Dispatch(groups)
        submitted: dict[Any, _Submitted] = {}
        try:
            while not dispatch.done:
                self._start_missing_actors()
                self._add_ready_actors(dispatch)
                self._push(call, dispatch, submitted)
                for reply in self._replies(submitted, dispatch.pause(time.monotonic())):
                    if reply not in submitted:  # another of its actor's groups has found that the actor died
                        continue
                    task = submitted[reply]
                    try:
                        outcome = self._outcome(call, task)
                    except RayError as error:  # of the actor, its node or its memory; a RayTaskError is an outcome
                        yield from self._died(task.actor, submitted, dispatch, error)
                    else:
                        del submitted[reply]
                        self._restarts.group_finished()
                        dispatch.finished(task.actor, task.group, time.monotonic())
                        self._push(call, dispatch, submitted)
                        yield task.group, outcome
        finally:  # a method's code cannot be interrupted, so actors with unwanted work are killed
            for actor in {task.actor for task in submitted.values()} & set(self._actors):
                self._kill(actor)

    def _outcome(self, call: Call, task: _Submitted) -> Done | Failed:
        try:
            reply: Reply | Failed = ray.get(task.reply)
        except RayTaskError as error:
            return Failed(error, str(error))
        if isinstance(reply, Failed):
            return reply
        if reply.kept is None:
            return Done(reply)
        clients, kept = task.group.clients, [reply.kept]
        owners = [clients]
        if len(task.stacks) == len(clients):
            owners, kept = [(client,) for client in clients], reply.kept.apart()
        self._apart[call.function] = reply.kept.nbytes >= APART * len(clients)
        return Done(reply, list(zip(owners, task.stacks, kept, strict=True)), task.actor.node or "")

    def _push(self, call: Call, dispatch: Dispatch, submitted: dict[Any, _Submitted]) -> None:
        apart = self._apart.get(call.function, False)
        while chosen := dispatch.next(time.monotonic()):
            actor, group = chosen
            work = actor.handle.work.options(num_returns=1 + (len(group.clients) if apart else 1))
            reply, *stacks = work.remote(call, group, apart)
            submitted[reply] = _Submitted(group, actor, reply, stacks)

    def _start_missing_actors(self) -> None:
        while len(self._actors) < self._wanted and self._restarts.may_start(time.monotonic()):
            actor = self._start()
            self._actors.append(_Actor(actor, actor.prepare.remote(self._job)))

    def _add_ready_actors(self, dispatch: Dispatch) -> None:
        """Let actors take part once they run: a group that is pushed to one without room would wait for ever."""
        if starting := {actor.prepared: actor for actor in self._actors if actor.node is None}:
            for ref in ray.wait(list(starting), num_returns=len(starting), timeout=0)[0]:
                self._note_ready(starting[ref])
        for actor in self._actors:
            if actor.node is not None:
                dispatch.join(actor, actor.node)

    def _note_ready(self, actor: _Actor) -> None:
        try:
            actor.node = ray.get(actor.prepared)
        except RayTaskError as error:
            raise RaypflError(f"A client actor could not be set up: {error.cause}") from error
        except RayError as error:
            self._kill(actor)
            self._died_in_setup(error)

    def _died_in_setup(self, error: RayError) -> None:
        """Give up if actors keep dying in their set-up and there is no other one that can work."""
        now, policy = time.monotonic(), self._restarts
        policy.died_in_setup(now, getattr(error, "actor_init_failed", False))
        if policy.setup_deaths == MAX_SETUP_FAILURES:
            self._warn("Client actors die while they are set up; others are started after growing pauses.")
        if policy.is_hopeless(now) and not any(actor.node for actor in self._actors):
            raise RaypflError(
                f"Client actors die while they are set up: {policy.setup_deaths} since the last group was finished, "
                f"and none is left. {_reason(error)}"
            ) from error

    def _replies(self, submitted: Mapping[Any, _Submitted], pause: float) -> list[Any]:
        """References of replies that are there, after `pause` seconds at most."""
        if self._stopped():
            raise Stopped("The run was asked to stop.")
        if submitted:
            return ray.wait(list(submitted), num_returns=1, timeout=min(POLL, pause))[0]
        if self._actors:
            ray.wait([actor.prepared for actor in self._actors], num_returns=1, timeout=POLL)
        else:
            time.sleep(POLL)
        return []

    def _died(
        self, actor: _Actor, submitted: dict[Any, _Submitted], dispatch: Dispatch, error: BaseException
    ) -> Iterator[tuple[Group, Failed]]:
        """Put a dead actor's groups back in the queue, or yield the only one if that was its last try.

        Of two groups either may have caused the death, so each is run alone the next time.
        """
        self._kill(actor)
        self._warn("A client actor died; another takes its place, and its groups run again.")
        for task in [task for task in submitted.values() if task.actor is actor]:
            del submitted[task.reply]
        lost = dispatch.lost(actor)
        for group in lost:
            if len(lost) == 1 and group.tries == 1:
                dispatch.drop(group)
                yield group, Failed(error, f"Its actor's process died. {_reason(error)}")
            else:
                dispatch.drop(group, instead=replace(group, tries=max(1, group.tries - 1), alone=True))

    def _kill(self, actor: _Actor) -> None:
        self._actors.remove(actor)
        ray.kill(actor.handle)


def _reason(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[-3:]) + " Is there enough memory for the actors? Fewer of them (ray.actors) need less."
