"""The actors: clients', and the server's that drives them.

Their processes begin with importing this module, so it imports nothing that takes long. An actor imports the rest when
it is made, the server once it has asked for its client actors: so all of them import torch at the same time.
"""

from __future__ import annotations

import gc
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import ray

from raypfl.errors import LostState
from raypfl.federation.imports import importing

if TYPE_CHECKING:
    import numpy as np
    import torch

    from raypfl.federation.backend import Failed
    from raypfl.federation.events import Event, RunFinished
    from raypfl.federation.states import Stack
    from raypfl.federation.work import Call, Group, Reply, Worker


ASSEMBLY = 20.0
"""Seconds that a run waits for all of its client actors, before it begins with those that are there."""


class ClientActor:
    """A process in which virtual clients work, one group at a time."""

    def __init__(self) -> None:
        with importing():
            import raypfl.federation.setup
            import raypfl.federation.work  # noqa: F401
        self._worker: Worker | None = None

    def prepare(self, order: bytes) -> str:
        """Build the network and open the data of an order, a pickled (job, data); what comes next is work on it.

        Returns the node that this process is on.
        """
        import torch

        from raypfl.federation.allocator import keep_freed_memory
        from raypfl.federation.setup import make_bench, make_task
        from raypfl.federation.work import Worker

        keep_freed_memory()
        job, data = ray.cloudpickle.loads(order)
        torch.set_num_threads(job.experiment.engine.threads)
        task = make_task(job.experiment, data, reserved_device())
        self._worker = Worker(make_bench(job.experiment, data, task), job.experiment.method)
        return ray.get_runtime_context().get_node_id()

    def work(self, call: Call, group: Group, apart: bool) -> tuple[Reply | Failed | Stack | None, ...]:
        """Run a group. The new states are objects of their own, returned and so owned by the server.

        They are one stack or, if they are to lie `apart`, one for each client.
        """
        reply, stack = self._worked(call, group)
        if not apart:
            return reply, stack
        return reply, *(None if stack is None else stack.alone(k) for k in range(len(group.clients)))

    def _worked(self, call: Call, group: Group) -> tuple[Reply | Failed, Stack | None]:
        from raypfl.federation.backend import failure, states_of

        assert self._worker is not None
        try:
            return self._worker.work(call, opened, group, states_of(group.states, fetched))
        except Exception as error:
            return failure(error), None


def reserved_device() -> torch.device:
    """Where this process computes: on a GPU, if Ray has reserved any of one for it."""
    import torch

    return torch.device("cuda" if ray.get_gpu_ids() else "cpu")


def opened(handles: list[Any]) -> list[Mapping[str, np.ndarray]]:
    """The arrays of broadcasts, each a reference or, if they are few, the arrays themselves."""
    references = [handle for handle in handles if isinstance(handle, ray.ObjectRef)]
    found = iter(ray.get(references) if references else [])
    return [next(found) if isinstance(handle, ray.ObjectRef) else handle for handle in handles]


def fetched(handles: list[Any]) -> list[Stack]:
    """The states behind references, in shared memory.

    Raises
    ------
    LostState : if they were on a node that is gone.
    """
    try:
        return ray.get(handles)
    except ray.exceptions.ObjectLostError as error:
        raise LostState("The node that held some clients' states is gone, and their states with it.") from error


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
            import raypfl.federation.ray_backend
            import raypfl.federation.server
            import raypfl.federation.setup  # noqa: F401
        self._stopping = ""
        self._news = _News()

    def run(self, run: str, order: bytes) -> RunFinished:
        """The whole run of an order, a pickled (job, data); `run` is its name for :meth:`events`."""
        import torch

        from raypfl.federation.allocator import keep_freed_memory
        from raypfl.federation.ray_backend import RayBackend
        from raypfl.federation.server import Server
        from raypfl.federation.setup import make_task, pools_of_server, threads_of_server

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
        facts = {
            "backend": "ray",
            "actors": len(self._actors),
            "device": "cuda" if job.experiment.ray.gpus_per_actor else "cpu",
            "ray": ray.__version__,
        }
        backend.assemble(ASSEMBLY)
        try:
            return Server(job, task, pools, backend, self._news.events.append, facts).run()
        finally:
            self._actors = backend.survivors
            gc.collect()  # a server is full of cycles, and its clients' states fill the object store until it is gone

    def _hired(self, actors: list[Any]) -> list[Any]:
        return actors + [self._remote.remote() for _ in range(self._count - len(actors))]

    def _warn(self, text: str) -> None:
        from raypfl.federation.events import Warned

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
