"""The actor that runs the server and drives the client actors.

Its process begins by importing this module, so the module imports nothing slow. The rest is imported after the client
actors were requested, so that all processes import torch at the same time.
"""

from __future__ import annotations

import gc
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import ray

from raypfl.engine.backends.client_actor import ClientActor, reserved_device, reserved_gpus
from raypfl.engine.backends.processes import importing
from raypfl.engine.backends.shipment import Shipment

if TYPE_CHECKING:
    from raypfl.engine.events import Event, RunFinished
    from raypfl.experiment.settings import RaySettings

LOCKSTEP_POLL = 0.02
"""Seconds between checks whether the driver has passed an event on."""

START_UP = 20.0
"""Seconds to wait for all client actors before a run begins with those that are ready."""


@dataclass
class _EventStream:
    """Events of a run that the driver has not received.

    Attributes
    ----------
    run : the id of the run.
    id : the id of the stream, of which a run has another after its server was started again.
    events : the events.
    num_received : the number of events before those, which the driver has received.
    num_added : the number of all events.
    """

    run: str = ""
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    events: list[Event] = field(default_factory=list)
    num_received: int = 0
    num_added: int = 0

    def add(self, event: Event) -> None:
        """Add an event."""
        self.events.append(event)
        # Counted, since another thread may be in :meth:`after`, where `events` and `num_received` do not fit together.
        self.num_added += 1

    def after(self, received: int) -> list[Event]:
        """Return the events after the first `received`, and forget those."""
        del self.events[: max(received - self.num_received, 0)]
        self.num_received = max(received, self.num_received)
        return list(self.events)


class ServerActor:
    """Runs jobs, one after the other, in a process of the cluster, with client actors of its own.

    If it dies, Ray starts it again and repeats `run`, which continues from the job's checkpoint.

    Parameters
    ----------
    actors : the number of client actors of each pool, for the first job.
    pools : what an actor of each pool reserves, as options for ``ray.remote``.
    """

    def __init__(self, actors: Sequence[int], pools: Sequence[Mapping[str, Any]]):
        self._remote = ray.remote(ClientActor)
        self._pools = list(pools)
        # (pool, handle)
        self._actors: list[tuple[int, Any]] = []
        # Before the imports, so that the actors' processes start in the meantime.
        self._keep_actors(actors)
        with importing():
            import raypfl.engine.backends.ray_backend
            import raypfl.engine.server  # noqa: F401
        self._run_to_stop = ""
        self._stream = _EventStream()

    def run(self, run: str, shipment: Shipment, settings: RaySettings, groups: int) -> RunFinished:
        """Run a job; each cohort has `groups` groups.

        `run` identifies it for :meth:`events` and :meth:`stop`.
        """
        import torch

        from raypfl.common.user_code import explain_user_errors
        from raypfl.engine.backends import cluster
        from raypfl.engine.backends.processes import keep_freed_memory
        from raypfl.engine.backends.ray_backend import RayBackend
        from raypfl.engine.building.devices import limit_memory
        from raypfl.engine.prepared import Prepared, threads_of_server
        from raypfl.engine.server import Server

        # If the last run could not begin, its error kept its server alive until now.
        gc.collect()
        self._stream = _EventStream(run)
        actor_pools = cluster.pools_of(ray, settings, groups)
        self._keep_actors(actor_pools.target_counts())
        backend = RayBackend(
            self._actors,
            self._start,
            actor_pools,
            shipment,
            lambda: self._run_to_stop == run,
            self._warn,
            settings.mixed_devices,
        )

        keep_freed_memory()
        job, data = shipment.unpack()
        torch.set_num_threads(threads_of_server(job.experiment))
        limit_memory(reserved_gpus())
        with explain_user_errors("in the server's process"):
            prepared = Prepared(job.experiment, data, reserved_device()).build()

        metadata = {
            "backend": "ray",
            "actors": len(self._actors),
            "device": "cuda" if job.experiment.ray.on_gpu else "cpu",
            "ray": ray.__version__,
        }
        backend.wait_for_actors(START_UP)
        emit = self._in_lockstep if job.lockstep else self._stream.add
        try:
            return Server(job, prepared, backend, emit, metadata).run()
        finally:
            self._actors = backend.actors
            if actor_pools.has_shrunk:
                # The next run starts with the shares in the settings again.
                self._keep_actors([0] * len(self._pools))
            # A server has reference cycles, and keeps clients' states in the object store until it is collected.
            gc.collect()

    def _start(self, options: Mapping[str, Any]) -> Any:
        return self._remote.options(max_restarts=0, **options).remote()

    def _keep_actors(self, counts: Sequence[int]) -> None:
        """Start or kill client actors until each pool has its number of them."""
        for pool, count in enumerate(counts):
            running = [entry for entry in self._actors if entry[0] == pool]
            for entry in running[count:]:
                self._actors.remove(entry)
                ray.kill(entry[1])
            for _ in range(count - len(running)):
                self._actors.append((pool, self._start(self._pools[pool])))

    def _in_lockstep(self, event: Event) -> None:
        """Store an event; after a checkpoint, wait until the driver has passed it on or stops the run."""
        from raypfl.engine.events import Checkpointed

        stream = self._stream
        stream.add(event)
        if not isinstance(event, Checkpointed):
            return
        while stream.num_received < stream.num_added and self._run_to_stop != stream.run:
            time.sleep(LOCKSTEP_POLL)

    def _warn(self, text: str) -> None:
        from raypfl.engine.events import Warned

        self._stream.add(Warned(text))

    @ray.method(concurrency_group="control")
    def events(self, run: str, stream: str, received: int) -> tuple[str, list[Event]]:
        """Return the id of a run's event stream, and its events after the first `received`.

        A server that was started again begins a new stream, from which nothing was received yet.
        """
        current = self._stream
        if current.run != run:
            return stream, []
        return current.id, current.after(received if stream == current.id else 0)

    @ray.method(concurrency_group="control")
    def stop(self, run: str) -> None:
        """Ask a run to stop. It saves a checkpoint and returns."""
        self._run_to_stop = run
