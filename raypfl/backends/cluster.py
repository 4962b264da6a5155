"""Connecting to a Ray cluster, or starting a local one."""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from raypfl.common.errors import ConfigError, RaypflError
from raypfl.common.stopping import handlers_kept, hangups_ignored, interrupting, undisturbed
from raypfl.config.settings import RaySettings
from raypfl.server.events import Listener, Progress

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

AT_ONCE = {"free_objects_period_milliseconds": 0}
"""Ray frees objects once a second otherwise: meanwhile rounds fill fresh memory, whose page faults cost more than what
is written there."""
UNRECORDED = {"task_events_report_interval_ms": 0}
"""Ray records up to 100,000 tasks for its dashboard otherwise: 8 MB in 1,000 rounds of ten clients."""

QUIET = {"log_to_driver": False, "logging_level": "error"}


@contextlib.contextmanager
def connected(settings: RaySettings, emit: Listener = lambda event: None) -> Iterator[Any]:
    """Within: Ray is there. A local cluster is started and stopped; one that was there before is left as it was.

    That is the cluster at ``ray.address``, or at ``$RAY_ADDRESS``, which Ray sets in its jobs. A signal that asks to
    stop waits until a local cluster is up, or is gone: in the middle, its processes would be left behind.

    Raises
    ------
    ConfigError : if ``ray.address`` names a cluster that cannot be reached.
    """
    address = settings.address or os.environ.get("RAY_ADDRESS")
    if "ray" not in sys.modules:  # Ray reads its authentication settings when it is imported
        _authenticate(local=address is None)
    import ray

    if ray.is_initialized():
        yield ray
        return
    emit(Progress("connecting to Ray" if address else "starting Ray"))
    with interrupting(), _local(ray, settings.dashboard) if address is None else _attached(ray, address):
        _without_chatter(ray)
        yield ray


@contextlib.contextmanager
def _local(ray: Any, dashboard: bool) -> Iterator[None]:
    system = AT_ONCE if dashboard else AT_ONCE | UNRECORDED
    folder = ""
    try:
        with undisturbed(), hangups_ignored(), _without_its_handler(ray):
            folder = tempfile.mkdtemp(prefix="raypfl-", dir="/tmp")  # not $TMPDIR: the paths of sockets must be short
            _start(ray, {"include_dashboard": dashboard, "_temp_dir": folder, "_system_config": system, **QUIET})
        yield
    finally:
        with undisturbed():
            ray.shutdown()
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _attached(ray: Any, address: str) -> Iterator[None]:
    try:
        with handlers_kept(), _without_its_handler(ray):
            _attach(ray, address)
        yield
    finally:
        with undisturbed():
            ray.shutdown()


def has_died(ray: Any) -> bool:
    """Whether a cluster that this process has started is gone. Ray would end the process a minute later, or wait."""
    processes = ray._private.worker._global_node.all_processes
    return any(one.process.poll() is not None for kind in ("gcs_server", "raylet") for one in processes.get(kind, ()))


def for_client(settings: RaySettings) -> dict[str, float]:
    """What a client actor reserves, as options for Ray."""
    return {"num_cpus": settings.cpus_per_actor, "num_gpus": settings.gpus_per_actor}


def for_server(settings: RaySettings) -> dict[str, float]:
    """What the server actor reserves, as options for Ray."""
    return {"num_cpus": settings.cpus_for_server, "num_gpus": settings.gpus_for_server}


def in_one_process(settings: RaySettings) -> RaySettings:
    """For a process in which a run's server and clients take turns: it reserves the larger of what either would."""
    client, server = for_client(settings), for_server(settings)
    return replace(
        settings,
        cpus_per_actor=max(client["num_cpus"], server["num_cpus"]),
        gpus_per_actor=max(client["num_gpus"], server["num_gpus"]),
        cpus_for_server=0.0,
        gpus_for_server=0.0,
    )


def client_actors(ray: Any, settings: RaySettings, groups: int) -> int:
    """How many client actors a run gets: what is asked for, or what the cluster has room for and there is work for.

    Raises
    ------
    ConfigError : if the cluster has no room for as many as are asked for beside the server.
    """
    total, server, wanted = ray.cluster_resources(), for_server(settings), settings.actors or 1
    room = _room(total, for_client(settings), beside=server)
    if room < wanted:
        beside = f"beside a server with {_said(server)} " if any(server.values()) else ""
        raise ConfigError(
            f"{wanted} client actors with {_said(for_client(settings))} each {beside}need more than this cluster has: "
            f"{total.get('CPU', 0):g} CPUs and {total.get('GPU', 0):g} GPUs. Lower ray.actors, ray.cpus_per_actor or "
            f"ray.gpus_per_actor{', or what ray.cpus_for_server and ray.gpus_for_server reserve' * bool(beside)}."
        )
    return settings.actors or max(1, int(min(room, groups)))


def _room(total: Mapping[str, float], each: Mapping[str, float], beside: Mapping[str, float]) -> float:
    """How many actors the resources have room for, if another one is `beside` them; less than 0: not even for that."""
    room = math.inf
    for resource, option in (("CPU", "num_cpus"), ("GPU", "num_gpus")):
        left = total.get(resource, 0.0) - beside[option]
        if each[option] or left < 0:
            room = min(room, left / (each[option] or 1.0) + 1e-9)
    return room


def _said(options: Mapping[str, float]) -> str:
    return f"{options['num_cpus']:g} CPUs and {options['num_gpus']:g} GPUs"


def _start(ray: Any, options: dict[str, Any]) -> None:
    try:
        ray.init(**options)
    except Exception as error:  # whatever kept one of its processes from coming up
        raise RaypflError(
            f"Ray could not be started on this machine: {str(error).splitlines()[0]} Try again when it is less busy, "
            "or run without Ray: engine.backend=inline."
        ) from error


def _attach(ray: Any, address: str) -> None:
    try:
        ray.init(address=address, **QUIET)
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise ConfigError(
            f"No Ray cluster can be reached at {address!r}: {str(error).splitlines()[0]} Is it running, "
            "and has this machine its token (RAY_AUTH_TOKEN, or RAY_AUTH_TOKEN_PATH)? Without ray.address, a local "
            "one is started."
        ) from error


def _authenticate(local: bool) -> None:
    """Ray's token authentication, on: with a token of our own for a local cluster, the user's for another."""
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    given = "RAY_AUTH_TOKEN" in os.environ or "RAY_AUTH_TOKEN_PATH" in os.environ
    if local and not given and os.environ["RAY_AUTH_MODE"] == "token":
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


@contextlib.contextmanager
def _without_its_handler(ray: Any) -> Iterator[None]:
    """Within: `ray.init` does not have SIGTERM end this process. What it installs below Python remains to be undone."""
    utils = ray._private.utils
    theirs, utils.set_sigterm_handler = utils.set_sigterm_handler, lambda handler: None
    try:
        yield
    finally:
        utils.set_sigterm_handler = theirs


def _without_chatter(ray: Any) -> None:
    # Ray prints a paragraph for every process that dies, whatever its log settings; the run says it in a sentence.
    worker = ray._private.worker
    if hasattr(worker, "print_to_stdstream"):
        worker.print_to_stdstream = lambda *args, **kwargs: None
