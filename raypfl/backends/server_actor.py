"""The actor that runs the server and drives the client actors.

Its process begins by importing this module, so the module imports nothing that takes long. The rest is imported after
the client actors were requested, so that all processes import torch at the same time.
"""

from __future__ import annotations

import gc
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import ray

from raypfl.backends.client_actor import ClientActor, reserved_device
from raypfl.backends.imports import importing

if TYPE_CHECKING:
    from raypfl.server.events import Event, RunFinished

ASSEMBLY = 20.0
"""Seconds that a run waits for all of its client actors, before it begins with those that are there."""


@dataclass
class _News:
    """What happened in a run that nobody has asked for yet; `told` events before that are forgotten."""

    run: str = ""
    incarnation: str = ""
    events: list[Event] = field(default_factory=list)
    told: int = 0

    def after(self, seen: int) -> list[Event]:
        """The events after the first `seen`, which whoever asks has had."""
        del self.events[: max(seen - self.told, 0)]
        self.told = max(seen, self.told)
        return list(self.events)


class ServerActor:
    """Runs jobs, one after the other, in a process of the cluster, with client actors of its own.

    If it dies, Ray starts it again and the same `run`, which goes on from the job's checkpoint.

    Parameters
    ----------
    actors : how many client actors. options : of each, as for ``ray.remote``.
    """

    def __init__(self, actors: int, options: Mapping[str, Any]):
        self._remote = ray.remote(ClientActor).options(max_restarts=0, **options)
        self._count = actors
        self._actors = self._hired([])
        with importing():
            import raypfl.backends.ray_backend
            import raypfl.server.server
            import raypfl.server.setup  # noqa: F401
        self._stopping = ""
        self._news = _News()

    def run(self, run: str, order: bytes) -> RunFinished:
        """The whole run of an order, a pickled (job, data); `run` is its name for :meth:`events`."""
        import torch

        from raypfl.backends.allocator import keep_freed_memory
        from raypfl.backends.ray_backend import RayBackend
        from raypfl.server.server import Server
        from raypfl.server.setup import make_task, pools_of_server, threads_of_server

        self._news = _News(run, uuid.uuid4().hex)
        self._actors = self._hired(self._actors)
        backend = RayBackend(
            self._actors, lambda: self._remote.remote(), order, lambda: self._stopping == run, self._warn
        )
        keep_freed_memory()
        job, data = ray.cloudpickle.loads(order)
        torch.set_num_threads(threads_of_server(job.experiment))
        task = make_task(job.experiment, data, reserved_device())
        pools = pools_of_server(job.experiment, data, task)
        metadata = {
            "backend": "ray",
            "actors": len(self._actors),
            "device": "cuda" if job.experiment.ray.gpus_per_actor else "cpu",
            "ray": ray.__version__,
        }
        backend.assemble(ASSEMBLY)
        try:
            return Server(job, task, pools, backend, self._news.events.append, metadata).run()
        finally:
            self._actors = backend.survivors
            gc.collect()  # a server is full of cycles, and its clients' states fill the object store until it is gone

    def _hired(self, actors: list[Any]) -> list[Any]:
        return actors + [self._remote.remote() for _ in range(self._count - len(actors))]

    def _warn(self, text: str) -> None:
        from raypfl.server.events import Warned

        self._news.events.append(Warned(text))

    @ray.method(concurrency_group="control")
    def events(self, run: str, incarnation: str, seen: int) -> tuple[str, list[Event]]:
        """Events of a run after the first `seen` that this incarnation of it has had."""
        news = self._news
        if news.run != run:
            return incarnation, []
        return news.incarnation, news.after(seen if incarnation == news.incarnation else 0)

    @ray.method(concurrency_group="control")
    def stop(self, run: str) -> None:
        """Ask a run to stop; it then returns after a checkpoint."""
        self._stopping = run
