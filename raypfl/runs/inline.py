"""A run in this process, without Ray."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from raypfl.clients.worker import Worker
from raypfl.common.stopping import StopRequest
from raypfl.common.threads import threads
from raypfl.engine.backends.inline import Inline
from raypfl.engine.backends.processes import keep_freed_memory
from raypfl.engine.building.devices import device_for, memory_limited
from raypfl.engine.events import Listener, RunFinished
from raypfl.engine.job import Job
from raypfl.engine.prepared import Prepared, threads_of_server
from raypfl.engine.server import Server
from raypfl.runs.together import Place


@contextlib.contextmanager
def run_inline(
    job: Job, prepared: Prepared, emit: Listener, stop: StopRequest, place: Place | None = None
) -> Iterator[RunFinished]:
    """Run a job in this process; yield the event of its end.

    Parameters
    ----------
    prepared : the job's experiment, on the clients' device.
    place : the run's place among runs that advance together; None: it is on its own.
    """
    keep_freed_memory()
    experiment = prepared.experiment
    clients = prepared.with_settings(experiment, gpus=experiment.ray.gpus or 1.0)
    server = clients.on(device_for(experiment.ray.gpus_for_server))
    metadata: dict[str, Any] = {"backend": "inline", "actors": 1, "device": str(clients.device)}

    # Trials of a sweep and cells of a study share a GPU; each reserves the larger of the two shares.
    share = max(experiment.ray.gpus, experiment.ray.gpus_for_server)
    with memory_limited(share), threads(threads_of_server(experiment)):
        server.build()
        clock = time.perf_counter
        if place is not None:
            place.prepare(clients.context)
            metadata["together"] = place.count
            clock = place.clock
        worker = Worker(clients.context, experiment.method, experiment.analyses)
        backend = Inline(worker, stop, experiment.engine.threads)
        yield Server(job, server, backend, emit, metadata, clock).run()
