"""The Ray backend: groups pushed to client actors."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError, RayTaskError

from raypfl.backends.client_actor import fetched, opened
from raypfl.backends.restarts import STILLBORN, Hiring
from raypfl.clients.worker import Call, Group, Reply
from raypfl.common.errors import RaypflError, Stopped
from raypfl.federation.backend import Done, Failed
from raypfl.federation.broadcasts import INSIDE
from raypfl.federation.placement import Dispatch
from raypfl.storage.states import Stack

APART = 1_000_000
"""Bytes of a client's state from which it is an object of its own, so that it is gone as soon as there is a newer one.
An object costs about a millisecond, as much as copying so many bytes."""

POLL = 0.1
"""Seconds between looks at whether the run was asked to stop."""


@dataclass(eq=False)
class _Crew:
    """A client actor as the server sees it; `node` is where it runs, once it is ready."""

    actor: Any
    prepared: Any
    node: str | None = None


@dataclass(frozen=True, eq=False)
class _Flight:
    """A group on its way through an actor."""

    group: Group
    crew: _Crew
    reply: Any
    stacks: Sequence[Any]


class RayBackend:
    """Pushes groups to client actors, the longest first; replaces actors that die and runs their groups elsewhere.

    Parameters
    ----------
    actors : client actors, perhaps still on their way up. hire : makes another one.
    order : what they are to prepare for.
    stopped : asked between results whether to give up.
    warn : told of actors that died.
    """

    def __init__(
        self,
        actors: Sequence[Any],
        hire: Callable[[], Any],
        order: bytes,
        stopped: Callable[[], bool],
        warn: Callable[[str], None],
    ):
        self._hiring = Hiring()
        self._hire = hire
        self._order = order
        self._apart: dict[Hashable, bool] = {}  # function -> whether its clients' states were large the last time
        self._stopped = stopped
        self._warn = warn
        self._wanted = len(actors)
        self._crews = [_Crew(actor, actor.prepare.remote(order)) for actor in actors]

    def broadcast(self, arrays: Mapping[str, np.ndarray]) -> Any:
        whole = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
        return whole if sum(array.nbytes for array in whole.values()) <= INSIDE else ray.put(whole)

    def opened(self, handle: Any) -> Mapping[str, np.ndarray]:
        return opened([handle])[0]

    def keep(self, stack: Stack) -> Any:
        return ray.put(stack)

    def fetch(self, handle: Any) -> Stack:
        return fetched([handle])[0]

    def assemble(self, seconds: float) -> None:
        """Wait until all actors are ready, but no longer than this: the cluster may be short of room for some."""
        deadline = time.monotonic() + seconds
        ready: list[Any] = []
        while len(ready) < self._wanted and time.monotonic() < deadline and not self._stopped():
            ready, _ = ray.wait([crew.prepared for crew in self._crews], num_returns=self._wanted, timeout=POLL)
        if len(ready) < self._wanted and not self._stopped():
            self._warn(
                f"Only {len(ready)} of {self._wanted} client actors came up within {seconds:g} s: the cluster is busy, "
                "or slow. The others take part as they come."
            )

    @property
    def survivors(self) -> list[Any]:
        """The client actors that are left, for another run."""
        return [crew.actor for crew in self._crews]

    def run(self, call: Call, groups: Sequence[Group]) -> Iterator[tuple[Group, Done | Failed]]:
        dispatch = Dispatch(groups)
        flying: dict[Any, _Flight] = {}
        try:
            while not dispatch.done:
                self._muster(dispatch)
                self._push(call, dispatch, flying)
                for reply in self._arrived(flying, dispatch.pause(time.monotonic())):
                    if reply not in flying:  # its actor died, and was found to by another of its groups
                        continue
                    flight = flying[reply]
                    try:
                        outcome = self._outcome(call, flight)
                    except RayError as error:  # the actor, its node, or its memory; a RayTaskError is an outcome
                        yield from self._bury(flight.crew, flying, dispatch, error)
                    else:
                        del flying[reply]
                        self._hiring.worked()
                        dispatch.finished(flight.crew, flight.group, time.monotonic())
                        self._push(call, dispatch, flying)
                        yield flight.group, outcome
        finally:
            self._give_up(flying)

    def _outcome(self, call: Call, flight: _Flight) -> Done | Failed:
        try:
            reply: Reply | Failed = ray.get(flight.reply)
        except RayTaskError as error:
            return Failed(error, str(error))
        if isinstance(reply, Failed):
            return reply
        if reply.kept is None:
            return Done(reply)
        clients, kept = flight.group.clients, [reply.kept]
        owners = [clients]
        if len(flight.stacks) == len(clients):
            owners, kept = [(client,) for client in clients], reply.kept.apart()
        self._apart[call.function] = reply.kept.nbytes >= APART * len(clients)
        return Done(reply, list(zip(owners, flight.stacks, kept, strict=True)), flight.crew.node or "")

    def _push(self, call: Call, dispatch: Dispatch, flying: dict[Any, _Flight]) -> None:
        apart = self._apart.get(call.function, False)
        while chosen := dispatch.next(time.monotonic()):
            crew, group = chosen
            count = len(group.clients) if apart else 1
            work = crew.actor.work.options(num_returns=1 + count)
            reply, *stacks = work.remote(call, group, apart)
            flying[reply] = _Flight(group, crew, reply, stacks)

    def _muster(self, dispatch: Dispatch) -> None:
        """Have all actors, and let them take part once they run: one without room must not be handed a group."""
        while len(self._crews) < self._wanted and self._hiring.may(time.monotonic()):
            actor = self._hire()
            self._crews.append(_Crew(actor, actor.prepare.remote(self._order)))
        absent = {crew.prepared: crew for crew in self._crews if crew.node is None}
        if absent:
            there, _ = ray.wait(list(absent), num_returns=len(absent), timeout=0)
            for ref in there:
                self._greet(absent[ref])
        for crew in self._crews:
            if crew.node is not None:
                dispatch.join(crew, crew.node)

    def _greet(self, crew: _Crew) -> None:
        try:
            crew.node = ray.get(crew.prepared)
        except RayTaskError as error:
            raise RaypflError(f"A client actor could not be set up: {error.cause}") from error
        except RayError as error:
            self._dismiss(crew)
            self._mourn(error)

    def _mourn(self, error: RayError) -> None:
        """Give up if actors keep dying while they are set up, and there is no other one that can work."""
        now = time.monotonic()
        self._hiring.lost(now, getattr(error, "actor_init_failed", False))
        if self._hiring.stillborn == STILLBORN:
            self._warn("Client actors die while they are set up; others are tried, after growing pauses.")
        if self._hiring.is_hopeless(now) and not any(crew.node for crew in self._crews):
            raise RaypflError(
                f"Client actors die while they are set up: {self._hiring.stillborn} since the last group was finished, "
                f"and none is left. {_why(error)}"
            ) from error

    def _arrived(self, flying: Mapping[Any, _Flight], pause: float) -> list[Any]:
        if self._stopped():
            raise Stopped("The run was asked to stop.")
        if flying:
            return ray.wait(list(flying), num_returns=1, timeout=min(POLL, pause))[0]
        if self._crews:
            ray.wait([crew.prepared for crew in self._crews], num_returns=1, timeout=POLL)
        else:
            time.sleep(POLL)
        return []

    def _bury(
        self, crew: _Crew, flying: dict[Any, _Flight], dispatch: Dispatch, error: BaseException
    ) -> Iterator[tuple[Group, Failed]]:
        """Put a dead actor's groups back, unless there is only one, and that was its last try.

        Of two, either may have begun, and taken the other's reply along when it ended the process.
        """
        self._dismiss(crew)
        self._warn("A client actor died; another takes its place, and its groups run again.")
        for flight in [flight for flight in flying.values() if flight.crew is crew]:
            del flying[flight.reply]
        lost = dispatch.lost(crew)
        for group in lost:
            if len(lost) == 1 and group.tries == 1:
                dispatch.drop(group)
                yield group, Failed(error, f"Its actor's process died. {_why(error)}")
            else:
                dispatch.drop(group, instead=replace(group, tries=max(1, group.tries - 1), alone=True))

    def _give_up(self, flying: Mapping[Any, _Flight]) -> None:
        """Nobody wants these results any more, and a running method cannot be interrupted: its actor goes."""
        for crew in [crew for crew in self._crews if any(f.crew is crew for f in flying.values())]:
            self._dismiss(crew)

    def _dismiss(self, crew: _Crew) -> None:
        self._crews.remove(crew)
        ray.kill(crew.actor)


def _why(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[-3:]) + " Is there enough memory for the actors? Fewer of them (ray.actors) need less."
