"""A run on Ray: a server actor with its client actors, which the driver starts, follows and starts again."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from raypfl.common.errors import RayDied, RaypflError, Stopped
from raypfl.common.stopping import StopRequest
from raypfl.engine.backends.actors.actor_pools import reserved
from raypfl.engine.backends.cluster import (
    client_actors,
    connected,
    has_local_cluster_died,
    node_for_server,
    server_resources,
)
from raypfl.engine.backends.node_affinity import on_node
from raypfl.engine.backends.session import StartedServer, spare_server
from raypfl.engine.dispatcher import EventDispatcher
from raypfl.engine.events import Event, Progress, RunFinished
from raypfl.engine.job import Job
from raypfl.engine.prepared import Prepared
from raypfl.runs.choices.gpu_share import with_gpu_shares

POLL = 0.2
"""Seconds between looks at whether the server has finished."""

PATIENCE = 5.0
"""Seconds to wait for a server's events before asking again."""


@contextlib.contextmanager
def run_on_ray(job: Job, prepared: Prepared, emit: EventDispatcher, stop: StopRequest) -> Iterator[RunFinished]:
    """Run a job on Ray; yield the event of its end before Ray is stopped, which takes seconds.

    `prepared` : the job's experiment; its network is freed, since the actors build their own.
    """
    prepared.free()

    with contextlib.ExitStack() as stack:
        with stop.interruptible():
            ray = stack.enter_context(connected(job.experiment.ray, emit))
            if any(pool.gpus_per_actor == "auto" for pool in job.experiment.ray.actor_pools):
                spare_server.release(ray)
                job = replace(job, experiment=with_gpu_shares(ray, prepared, emit))

            emit(Progress("starting actors"))
            settings = job.experiment.ray
            actors = client_actors(ray, settings, prepared.num_groups)
            pools = [reserved(pool) for pool in settings.actor_pools]
            kind = (pools, server_resources(settings))
            node = node_for_server(ray, settings, job.checkpoints)
            server = spare_server.take(ray, kind, node) or _start_server(ray, actors, kind, node)

        # Some errors on a GPU leave a process in which every later computation fails.
        is_safe_after_failure = not settings.on_gpu and not settings.gpus_for_server
        can_run_another = False
        try:
            finished = None
            while finished is None:
                round_before = emit.round
                try:
                    finished = _follow(ray, server.actor, job, prepared, emit, stop)
                except _ServerDied:
                    if emit.round == round_before:
                        raise
                    # Ray's count of restarts is used up, but rounds were finished in between: go on with a new actor.
                    server = _start_server(ray, actors, kind, node)
                except _NotBegun as failure:
                    can_run_another = is_safe_after_failure
                    raise failure.error from None
            can_run_another = is_safe_after_failure or finished.status != "failed"
            yield finished
        finally:
            if spare_server.shared and can_run_another:
                spare_server.server = server
            elif not has_local_cluster_died(ray):
                ray.kill(server.actor)


def _start_server(
    ray: Any, actors: list[int], kind: tuple[list[dict[str, Any]], dict[str, float]], node: str | None
) -> StartedServer:
    """Start a server actor, in the current placement group if there is one.

    Parameters
    ----------
    actors : the number of its client actors, by pool.
    kind : the resources of a client actor, by pool, and those of the server itself.
    node : the id of the node that it must be on; None: any.
    """
    from raypfl.engine.backends.server_actor import ServerActor

    pools, resources = kind
    options: dict[str, Any] = {**resources, "max_restarts": 3, "max_task_retries": 3}
    if node is not None:
        options |= on_node(ray, node)
    remote = ray.remote(concurrency_groups={"control": 1})(ServerActor)
    return StartedServer(remote.options(**options).remote(actors, pools), kind, node)


def _follow(
    ray: Any, server: Any, job: Job, prepared: Prepared, emit: EventDispatcher, stop: StopRequest
) -> RunFinished:
    """Run a job on a server actor, and pass on its events until it ends.

    Raises
    ------
    KeyboardInterrupt : if the run was asked to stop before it began.
    """
    from raypfl.engine.backends.shipment import Shipment

    run = uuid.uuid4().hex
    shipment = Shipment.pack(job, prepared.data)
    if stop.received and not emit.has_started:
        raise KeyboardInterrupt
    result = server.run.remote(run, shipment, job.experiment.ray, prepared.num_groups)

    feed = _EventFeed(ray, server, run)
    ready: list[Any] = []
    while not ready:
        ready, _ = ray.wait([result], timeout=POLL)
        if has_local_cluster_died(ray):
            raise RayDied(
                "Ray has died: its raylet or GCS process was killed or ran out of memory. "
                f"`raypfl resume {job.run_dir}` continues from the newest checkpoint."
            )

        if stop.received and not emit.has_started:
            raise KeyboardInterrupt
        # At every look, since the server may have been restarted and forgotten it.
        if stop.received:
            server.stop.remote(run)

        for event in feed.new_events():
            try:
                emit(event)
            except Stopped:
                stop.received = True

    return _outcome(ray, result, job)


class _EventFeed:
    """The events of a run on a server actor, of which a restarted server begins a new stream."""

    def __init__(self, ray: Any, server: Any, run: str):
        self._ray = ray
        self._server = server
        self._run = run
        self._stream = ""
        self._received = 0

    def new_events(self) -> list[Event]:
        """Return the events since the last call."""
        errors = self._ray.exceptions
        try:
            reply = self._server.events.remote(self._run, self._stream, self._received)
            stream, events = self._ray.get(reply, timeout=PATIENCE)
        except (errors.RayActorError, errors.ActorUnavailableError, errors.GetTimeoutError):
            # A server that is being restarted is silent; the next call asks again.
            return []

        if stream != self._stream:
            self._stream = stream
            self._received = 0
        self._received += len(events)
        return events


def _outcome(ray: Any, result: Any, job: Job) -> RunFinished:
    """Return the event that a server's `run` returned, a reference that is ready."""
    try:
        return ray.get(result)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, RaypflError):
            raise _NotBegun(error.cause) from None
        raise
    except ray.exceptions.RayError as error:
        raise _ServerDied(
            f"The server's process died, and again after each restart: {str(error).splitlines()[0]} "
            f"`raypfl resume {job.run_dir}` continues from the newest checkpoint."
        ) from error


class _NotBegun(Exception):
    """A server's answer that a run cannot begin, with the error that says why."""

    def __init__(self, error: RaypflError):
        super().__init__(error)
        self.error = error


class _ServerDied(RaypflError):
    """The server's process died as often as Ray may start it."""
