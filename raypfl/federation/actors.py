"""The Ray backend: client actors, and the server actor that drives them."""

from __future__ import annotations

import threading
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import ray
import torch
from ray.exceptions import ActorUnavailableError, ObjectLostError, RayActorError, RayTaskError

from raypfl.data import FederatedData
from raypfl.errors import LostState, Stopped
from raypfl.federation.backend import Done, Failed, states_of
from raypfl.federation.events import Event, RunFinished, Warned
from raypfl.federation.server import Job, Server
from raypfl.federation.setup import make_bench, make_task
from raypfl.federation.states import Stack
from raypfl.federation.work import Call, Group, Reply, Worker

IN_FLIGHT = 2
"""Groups pushed to an actor at a time: while it computes one, the next is already there."""

POLL = 0.1
"""Seconds between looks at whether the run was asked to stop."""


class ClientActor:
    """A process in which virtual clients work, one group at a time."""

    def __init__(self, job: Job, data: FederatedData):
        self._job = job
        self._data = data
        self._worker: Worker | None = None
        self._broadcast: tuple[int, Any] = (-1, None)

    def prepare(self) -> str:
        """Build the network and open the data; returns the node's id. Not in the constructor, whose errors Ray hides."""
        if self._worker is None:
            torch.set_num_threads(self._job.experiment.engine.threads)
            device = torch.device("cuda" if ray.get_gpu_ids() else "cpu")
            task = make_task(self._job.experiment, self._data, device)
            bench = make_bench(self._job.experiment, self._data, task, self._job.executor)
            self._worker = Worker(bench, self._job.experiment.method)
        return ray.get_runtime_context().get_node_id()

    @ray.method(num_returns=2)
    def work(self, call: Call, group: Group) -> tuple[Reply, Stack | None]:
        """Run a group. The new states are an object of their own, returned and so owned by the server."""
        self.prepare()
        assert self._worker is not None
        if self._broadcast[0] != call.number:
            self._broadcast = (call.number, ray.get(call.broadcast))
        return self._worker.work(call, self._broadcast[1], group, states_of(group.states, _fetched))


def _fetched(handle: Any) -> Stack:
    try:
        return ray.get(handle)
    except ObjectLostError as error:
        raise LostState("The node that held some clients' states is gone, and their states with it.") from error


@dataclass(eq=False)
class _Crew:
    """A client actor as the server sees it: `flights` in the order in which they were pushed, the first one running."""

    actor: Any
    prepared: Any
    ready: bool = False
    flights: list[_Flight] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class _Flight:
    """A group on its way through an actor."""

    group: Group
    crew: _Crew
    reply: Any
    stack: Any


class RayBackend:
    """Pushes groups to client actors, costliest first; replaces actors that die and runs their groups elsewhere.

    Parameters
    ----------
    job, data : what every actor gets.
    actors : how many.
    options : of ``ray.remote`` for a client actor.
    stopped : asked between results whether to give up.
    warn : told of actors that died.
    """

    def __init__(
        self,
        job: Job,
        data: FederatedData,
        actors: int,
        options: Mapping[str, Any],
        stopped: Callable[[], bool],
        warn: Callable[[str], None],
    ):
        self._arguments = (ray.put(job), ray.put(data))
        self._remote = ray.remote(ClientActor).options(max_restarts=0, **options)
        self._stopped = stopped
        self._warn = warn
        self._retries = job.experiment.failures.retries
        self._actors = actors
        self._crews: list[_Crew] = []
        self._muster()

    def broadcast(self, arrays: Mapping[str, np.ndarray]) -> Any:
        return ray.put({name: np.ascontiguousarray(array) for name, array in arrays.items()})

    def keep(self, stack: Stack) -> Any:
        return ray.put(stack)

    def fetch(self, handle: Any) -> Stack:
        return _fetched(handle)

    def close(self) -> None:
        for crew in list(self._crews):
            self._dismiss(crew)

    def run(self, call: Call, groups: Sequence[Group]) -> Iterator[tuple[Group, Done | Failed]]:
        waiting = deque(groups)
        flying: dict[Any, _Flight] = {}
        deaths = dict.fromkeys((g.index for g in groups), 0)
        try:
            while waiting or flying:
                self._push(call, waiting, flying)
                for reply in self._arrived(flying):
                    flight = flying[reply]
                    try:
                        outcome = self._outcome(flight)
                    except (RayActorError, ActorUnavailableError) as error:
                        yield from self._bury(flight.crew, flying, waiting, deaths, error)
                    else:
                        del flying[reply]
                        flight.crew.flights.remove(flight)
                        yield flight.group, outcome
        finally:
            self._give_up(flying)

    def _outcome(self, flight: _Flight) -> Done | Failed:
        try:
            reply: Reply = ray.get(flight.reply)
        except RayTaskError as error:
            if isinstance(error, LostState):
                raise LostState(str(error.cause)) from error
            cause = error.cause if isinstance(error.cause, BaseException) else error
            return Failed(cause, error.traceback_str)
        return Done(reply, flight.stack if reply.stateful else None)

    def _push(self, call: Call, waiting: deque[Group], flying: dict[Any, _Flight]) -> None:
        self._muster()
        for depth in range(IN_FLIGHT):
            for crew in self._crews:
                if waiting and crew.ready and len(crew.flights) == depth:
                    group = waiting.popleft()
                    reply, stack = crew.actor.work.remote(call, group)
                    flying[reply] = _Flight(group, crew, reply, stack)
                    crew.flights.append(flying[reply])

    def _muster(self) -> None:
        """Have all actors, and let them take part once they run: one without room must not be handed a group."""
        while len(self._crews) < self._actors:
            actor = self._remote.remote(*self._arguments)
            prepared = actor.prepare.remote()  # type: ignore[attr-defined]
            self._crews.append(_Crew(actor, prepared))
        absent = {crew.prepared: crew for crew in self._crews if not crew.ready}
        if absent:
            there, _ = ray.wait(list(absent), num_returns=len(absent), timeout=0)
            for ref in there:
                absent[ref].ready = True

    def _arrived(self, flying: Mapping[Any, _Flight]) -> list[Any]:
        if self._stopped():
            raise Stopped("The run was asked to stop.")
        if flying:
            return ray.wait(list(flying), num_returns=1, timeout=POLL)[0]
        ray.wait([crew.prepared for crew in self._crews], num_returns=1, timeout=POLL)
        return []

    def _bury(
        self,
        crew: _Crew,
        flying: dict[Any, _Flight],
        waiting: deque[Group],
        deaths: dict[int, int],
        error: BaseException,
    ) -> Iterator[tuple[Group, Failed]]:
        """Put a dead actor's groups back, unless the one that it was running has cost too many actors."""
        self._dismiss(crew)
        self._warn("A client actor died; another takes its place, and its groups run again.")
        lost = [flying.pop(flight.reply).group for flight in crew.flights]
        deaths[lost[0].index] += 1
        if deaths[lost[0].index] > self._retries:
            running = lost.pop(0)
            yield running, Failed(error, f"Its actor's process died {deaths[running.index]} times. {_why(error)}")
        waiting.extendleft(reversed(lost))

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


class ServerActor:
    """Runs a job in a process of the cluster. If it dies, Ray starts it again and `run` goes on from the checkpoint."""

    def __init__(self, job: Job, data: FederatedData, actors: int, options: Mapping[str, Any]):
        self._job = job
        self._data = data
        self._actors = actors
        self._options = options
        self._incarnation = uuid.uuid4().hex
        self._events: list[Event] = []
        self._stop = threading.Event()

    def run(self) -> RunFinished:
        """The whole run."""
        torch.set_num_threads(self._job.experiment.engine.threads)
        backend = RayBackend(self._job, self._data, self._actors, self._options, self._stop.is_set, self._warn)
        try:
            task = make_task(self._job.experiment, self._data, torch.device("cpu"))
            facts = {"backend": "ray", "actors": self._actors, "ray": ray.__version__}
            return Server(self._job, task, backend, self._events.append, facts).run()
        finally:
            backend.close()

    def _warn(self, text: str) -> None:
        self._events.append(Warned(text))

    @ray.method(concurrency_group="control")
    def events(self, incarnation: str, seen: int) -> tuple[str, list[Event]]:
        """Events after the first `seen` that this incarnation of the actor has had."""
        return self._incarnation, self._events[seen if incarnation == self._incarnation else 0 :]

    @ray.method(concurrency_group="control")
    def stop(self) -> None:
        """Ask the run to stop; `run` then returns after a checkpoint."""
        self._stop.set()
