"""Connecting to a Ray cluster, or starting a local one."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from raypfl.common import registry
from raypfl.common.counting import counted
from raypfl.common.errors import ConfigError, RaypflError
from raypfl.common.stopping import handlers_restored, hangups_ignored, signals_deferred, signals_interrupt
from raypfl.common.user_modules import copy_files, module_files
from raypfl.engine.backends.actors.actor_pools import ActorPools, Nodes, reserved, room_for
from raypfl.engine.backends.node_affinity import on_node
from raypfl.engine.events import Listener, Progress
from raypfl.experiment.settings import ActorPool, RaySettings
from raypfl.storage.filesystems import is_shared

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

FREE_AT_ONCE = {"free_objects_period_milliseconds": 0}
"""By default Ray frees objects once a second. Until then rounds fill fresh memory, whose page faults cost more than the
writing."""

NO_TASK_EVENTS = {"task_events_report_interval_ms": 0}
"""By default Ray records up to 100,000 tasks for its dashboard: 8 MB in 1,000 rounds of ten clients."""

IN_A_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""An environment variable that Ray sets in its jobs, which bring their modules along."""

_QUIET = {"log_to_driver": False, "logging_level": "error"}


@contextlib.contextmanager
def connected(settings: RaySettings, emit: Listener = lambda event: None) -> Iterator[Any]:
    """While active, this process is connected to Ray: to a cluster that runs already, or to a local one of its own.

    The first is at ``ray.address``, or at ``$RAY_ADDRESS``, which Ray sets in its jobs. A signal that asks to stop is
    held back while a local cluster starts or shuts down, so that none of its processes is left behind.

    Raises
    ------
    ConfigError : if no cluster can be reached at the address.
    RaypflError : if a local cluster cannot be started.
    """
    address = settings.address or os.environ.get("RAY_ADDRESS")
    if address and "://" in address:
        kind = "of Ray Client, with whose connection a run would end" if address.startswith("ray:") else "for jobs"
        raise ConfigError(
            f"The address {address!r} is one {kind}. Send a job: raypfl submit run ... --address http://HEAD:8265. Or "
            "give the cluster's own address, such as HEAD:6379, on a machine that is one of its nodes."
        )
    # Ray reads its authentication settings when it is imported.
    if "ray" not in sys.modules:
        _authenticate(local=address is None)
    import ray

    if ray.is_initialized():
        yield ray
        return

    emit(Progress("connecting to Ray" if address else "starting Ray"))
    cluster = _local(ray, settings.dashboard, emit) if address is None else _attached(ray, address)
    with signals_interrupt(), cluster as dashboard:
        _silence_deaths(ray)
        if dashboard:
            token = os.environ.get("RAY_AUTH_TOKEN")
            token_note = f" It asks for this token: {token}" if token else ""
            emit(Progress(f"Ray's dashboard: http://{dashboard}.{token_note}", stays=True))
        yield ray


@contextlib.contextmanager
def _local(ray: Any, dashboard: bool, emit: Listener) -> Iterator[str | None]:
    """While active, a local cluster runs; yields the address of its dashboard, if it has one."""
    system = FREE_AT_ONCE if dashboard else FREE_AT_ONCE | NO_TASK_EVENTS
    folder = ""
    try:
        with signals_deferred(), hangups_ignored(), _without_sigterm_handler(ray):
            folder = tempfile.mkdtemp(prefix="raypfl-", dir="/tmp")  # not $TMPDIR: the paths of sockets must be short
            context = start_local(ray, folder, emit, include_dashboard=dashboard, _system_config=system)
        yield context.dashboard_url if dashboard else None
    finally:
        with signals_deferred():
            ray.shutdown()
            shutil.rmtree(folder, ignore_errors=True)


def start_local(ray: Any, folder: str, emit: Listener, tries: int = 2, **options: Any) -> Any:
    """Start a local cluster with its files in a folder; return Ray's description of it.

    Raises
    ------
    RaypflError : if it does not start.
    """
    try:
        return ray.init(_temp_dir=folder, **options, **_QUIET)
    except Exception as error:
        _kill_processes_of(folder)
        # Ray waits some 15 seconds for its own processes, which is too short on a busy machine or a slow disk.
        if tries == 1 or "timed out" not in str(error):
            raise RaypflError(
                f"Ray could not be started on this machine: {str(error).splitlines()[0]} Try again when it is less "
                "busy, or run without Ray: engine.backend=inline."
            ) from error
    emit(Progress("Ray took too long to start; starting it again"))
    return start_local(ray, folder, emit, tries - 1, **options)


def _kill_processes_of(folder: str) -> None:
    """Kill the processes of a cluster that did not start; some are no longer children of this one."""
    for process in psutil.process_iter(["cmdline"]):
        if any(folder in word for word in process.info["cmdline"] or ()):
            with contextlib.suppress(psutil.Error):
                process.kill()


@contextlib.contextmanager
def _attached(ray: Any, address: str) -> Iterator[None]:
    """While active, this process is connected to a running cluster, whose processes get the user's modules."""
    try:
        with handlers_restored(), _without_sigterm_handler(ray), tempfile.TemporaryDirectory() as folder:
            if IN_A_JOB not in os.environ:
                copy_files(module_files(registry.user_modules), Path(folder))
            modules = [str(path) for path in Path(folder).iterdir()]
            try:
                _refuse_closed(address)
                ray.init(address=address, runtime_env={"py_modules": modules} if modules else None, **_QUIET)
            except ray.exceptions.AuthenticationError as error:
                raise token_error(f" at {address}", error) from error
            except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
                raise ConfigError(
                    f"No Ray cluster can be reached at {address!r}: {str(error).splitlines()[0]} Is it running? "
                    "Without ray.address, a local one is started."
                ) from error
        yield
    finally:
        with signals_deferred():
            ray.shutdown()


def token_error(at_address: str, error: Exception) -> ConfigError:
    """Return the error for a missing or rejected token; `at_address` is empty or `` at ADDRESS``."""
    is_rejected = str(error).startswith("Authentication failed")
    problem = (
        f"The cluster{at_address} refuses this token"
        if is_rejected
        else f"There is no token for the cluster{at_address}"
    )
    without = "" if is_rejected else " If they were started without one, set RAY_AUTH_MODE=disabled."
    return ConfigError(
        f"{problem}. Set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN_PATH to a file (mode 600) with the token that its "
        f"nodes were started with, or RAY_AUTH_TOKEN to the token itself.{without}"
    )


def _refuse_closed(address: str) -> None:
    """Raise an OSError if nothing listens at ``HOST:PORT``; Ray would try for a minute."""
    host, _, port = address.rpartition(":")
    if port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()


def has_local_cluster_died(ray: Any) -> bool:
    """Return whether a cluster that this process started is gone: Ray would end the process in a minute, or hang."""
    # Ray's public functions ask the cluster, so they hang if it is gone.
    infos_by_kind = ray._private.worker._global_node.all_processes
    infos = [*infos_by_kind.get("gcs_server", ()), *infos_by_kind.get("raylet", ())]
    return any(info.process.poll() is not None for info in infos)


def nodes_of(ray: Any) -> list[Mapping[str, float]]:
    """Return the resources of each node of the cluster."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def client_resources(settings: RaySettings) -> dict[str, Any]:
    """Return what a client actor reserves, as options for Ray, if all actors are alike.

    Raises
    ------
    ConfigError : if there are several pools, or if the share of a GPU is to be measured.
    """
    if settings.pools or settings.gpus_per_actor == "auto":
        cause = "ray.pools is set" if settings.pools else "ray.gpus_per_actor is auto"
        raise ConfigError(
            f"{cause}, which is for one run at a time; a sweep's trials and a study's cells each reserve "
            "ray.cpus_per_actor and ray.gpus_per_actor, such as 0.25 for four on a GPU."
        )
    return reserved(settings)


def bundle(options: Mapping[str, Any]) -> dict[str, float]:
    """Return options for Ray as a bundle of a placement group, which lists only what is reserved."""
    amounts = {"CPU": options["num_cpus"], "GPU": options["num_gpus"]}
    accelerator = options.get("accelerator_type")
    if accelerator:
        # The amount that Ray itself requests for an accelerator type.
        amounts[f"accelerator_type:{accelerator}"] = 0.001
    return {name: amount for name, amount in amounts.items() if amount}


def server_resources(settings: RaySettings) -> dict[str, float]:
    """Return what the server actor reserves, as options for Ray."""
    return {"num_cpus": settings.cpus_for_server, "num_gpus": settings.gpus_for_server}


def in_one_process(settings: RaySettings) -> RaySettings:
    """Return settings for one process in which server and clients take turns; it reserves the larger of each share."""
    client = client_resources(settings)
    server = server_resources(settings)
    return replace(
        settings,
        cpus_per_actor=max(client["num_cpus"], server["num_cpus"]),
        gpus_per_actor=max(client["num_gpus"], server["num_gpus"]),
        cpus_for_server=0.0,
        gpus_for_server=0.0,
    )


def pools_of(ray: Any, settings: RaySettings, groups: int) -> ActorPools:
    """Return the client actors that a run should have; each cohort has `groups` groups."""
    return ActorPools(settings.actor_pools, server_resources(settings), groups, lambda: nodes_of(ray))


def client_actors(ray: Any, settings: RaySettings, groups: int) -> list[int]:
    """Return the number of client actors of each pool that a run begins with.

    Raises
    ------
    ConfigError : if the cluster has no room for the server and them, unless they may wait for nodes to join.
    """
    pools = pools_of(ray, settings, groups)
    nodes = nodes_of(ray)
    server = server_resources(settings)
    for pool, room in zip(settings.actor_pools, pools.placeable_counts(), strict=True):
        # Room beside the server, without other pools.
        room_alone = room_for(reserved(pool), nodes, server)
        is_too_small = room_alone is not None and (room_alone < 1 or room < (pool.actors or 0))
        if room_alone is None or (is_too_small and pool.max_actors is None):
            raise _no_room_error(pool, server, nodes)
    return pools.target_counts()


def _no_room_error(pool: ActorPool, server: Mapping[str, float], nodes: Nodes) -> ConfigError:
    """Return the error for a cluster that is too small for the server and a pool's client actors."""
    total = {name: sum(node.get(name, 0.0) for node in nodes) for name in ("CPU", "GPU")}
    remedy = "Lower ray.actors, ray.cpus_per_actor (with 0.5, two actors share a core) or ray.gpus_per_actor"
    beside = ""
    if any(server.values()):
        beside = f"beside a server with {_describe(server)} "
        remedy += ", or what ray.cpus_for_server and ray.gpus_for_server reserve"
    return ConfigError(
        f"{pool.actors or 1} client actors with {_describe(reserved(pool))} each {beside}need more than this "
        f"cluster has: {total['CPU']:g} CPUs and {total['GPU']:g} GPUs on {counted(len(nodes), 'node')}. {remedy}; or "
        "set ray.max_actors instead of ray.actors, if nodes are still to join."
    )


def refuse_too_many_actors(settings: RaySettings) -> None:
    """Raise a ConfigError if this machine has too few cores for the run's actors, before Ray starts on it.

    On a cluster that runs already, :func:`client_actors` checks all that actors reserve.
    """
    ray = sys.modules.get("ray")
    has_cluster = settings.address or os.environ.get("RAY_ADDRESS") or (ray is not None and ray.is_initialized())
    if has_cluster:
        return

    cpus = settings.cpus_for_server
    for pool in settings.actor_pools:
        cpus += (pool.actors or 0) * pool.cpus_per_actor
    cores = os.cpu_count()
    if cores is not None and cpus > cores:
        raise ConfigError(
            f"The client actors and the server reserve {cpus:g} CPUs, but this machine has {cores}. Lower ray.actors, "
            "ray.cpus_per_actor (with 0.5, two actors share a core) or ray.cpus_for_server; or run on a larger cluster "
            "(ray.address)."
        )


def on_this_node(ray: Any) -> dict[str, Any]:
    """Return options for an actor without CPUs on this process's node, with which it dies."""
    return {"num_cpus": 0, **on_node(ray, ray.get_runtime_context().get_node_id())}


def node_for_server(ray: Any, settings: RaySettings, checkpoints: str) -> str | None:
    """Return the id of the driver's node if the server must run there, to write into a local folder; else None.

    In a placement group it is None too, since that decides.

    Raises
    ------
    ConfigError : if that node does not have what the server reserves.
    """
    if is_shared(checkpoints) or ray.util.get_current_placement_group() is not None:
        return None

    driver_node = ray.get_runtime_context().get_node_id()
    server = server_resources(settings)
    resources = next(node["Resources"] for node in ray.nodes() if node["NodeID"] == driver_node)
    if any(server.values()) and not room_for(server, [resources], {}):
        raise ConfigError(
            f"The server reserves {_describe(server)}, which this node does not have, and can be on no other node "
            f"because its checkpoints are in {checkpoints}. Set checkpoint.location to an address that all nodes can "
            "reach (s3://bucket/folder, file:///shared/folder), or start raypfl on a larger node."
        )
    return driver_node


def _describe(options: Mapping[str, Any]) -> str:
    text = f"{options['num_cpus']:g} CPUs and {options['num_gpus']:g} GPUs"
    accelerator = options.get("accelerator_type")
    return f"{text} of type {accelerator}" if accelerator else text


def _authenticate(local: bool) -> None:
    """Switch Ray's token authentication on, with a token of our own for a local cluster."""
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    has_token = "RAY_AUTH_TOKEN" in os.environ or "RAY_AUTH_TOKEN_PATH" in os.environ
    if local and not has_token and os.environ["RAY_AUTH_MODE"] == "token":
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


@contextlib.contextmanager
def _without_sigterm_handler(ray: Any) -> Iterator[None]:
    """While active, `ray.init` installs no Python handler by which SIGTERM ends this process.

    It has no option for that, and does so before it starts its processes, which takes seconds. Restoring the handler
    afterwards is too late: a SIGTERM meanwhile would break the start off, instead of being held back until its end.
    Blocking the signal is no way either, since Ray's processes would inherit that.
    """
    utils = ray._private.utils
    set_handler = utils.set_sigterm_handler
    utils.set_sigterm_handler = lambda handler: None
    try:
        yield
    finally:
        utils.set_sigterm_handler = set_handler


def _silence_deaths(ray: Any) -> None:
    # Ray prints a paragraph for every process that dies, even with `log_to_driver=False`, and has no public setting
    # against it. The run reports a death in a sentence of its own.
    worker = ray._private.worker
    if hasattr(worker, "print_to_stdstream"):
        worker.print_to_stdstream = lambda *args, **kwargs: None
