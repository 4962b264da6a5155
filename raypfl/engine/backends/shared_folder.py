"""Check that a folder is the same on all nodes of a cluster, before work that would be lost if it is not."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from raypfl.common.errors import ConfigError
from raypfl.engine.backends.node_affinity import on_node

PROBE = ".probe-"
"""Prefix of the files that the driver and the nodes write into the folder, and that the driver deletes."""


def refuse_unless_shared(ray: Any, folder: Path, needed: Sequence[Mapping[str, float]], what: str) -> None:
    """Raise a ConfigError unless all nodes that may get work read and write one folder.

    The driver writes a file there. Each other node reads it and writes a file of its own, which the driver reads. On a
    cluster of one node there is nothing to ask.

    Parameters
    ----------
    needed : Ray's resources (``{"CPU": 1.0}``) of each process that the work starts. A node that has room for none of
        them is not asked.
    what : the work, as the error names it (``"This sweep"``).

    Raises
    ------
    ConfigError : names the first node without the folder.
    """
    driver_node = ray.get_runtime_context().get_node_id()
    other_nodes = []
    for node in ray.nodes():
        if node["Alive"] and node["NodeID"] != driver_node and _has_room(node, needed):
            other_nodes.append(node)
    if not other_nodes:
        return

    token = secrets.token_hex(8)
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        (folder / f"{PROBE}{token}").write_text(token)
        for node, problem in _probe_nodes(ray, other_nodes, folder, token):
            if problem:
                raise ConfigError(
                    f"{what} puts its runs into {folder}, which has to be one folder on all nodes of the cluster, but "
                    f"on node {node['NodeManagerAddress']} {problem}. Nothing was started. Set output to a folder that "
                    "all nodes share, such as one on NFS (output=/shared/runs)."
                )
    finally:
        for file in folder.glob(f"{PROBE}{token}*"):
            file.unlink(missing_ok=True)
        if is_new:
            with contextlib.suppress(OSError):
                folder.rmdir()


def _has_room(node: Mapping[str, Any], needed: Sequence[Mapping[str, float]]) -> bool:
    total = node["Resources"]
    return any(all(total.get(name, 0.0) >= count for name, count in process.items()) for process in needed)


def _probe_nodes(ray: Any, nodes: Sequence[Any], folder: Path, token: str) -> list[tuple[Any, str]]:
    """Return each node and what is wrong with the folder there; a node that dies meanwhile is left out."""
    probe = ray.remote(num_cpus=0)(_probe)
    probes = []
    for node in nodes:
        probes.append(probe.options(**on_node(ray, node["NodeID"])).remote(folder, token, node["NodeID"]))

    problems = []
    for node, started_probe in zip(nodes, probes, strict=True):
        try:
            problem = ray.get(started_probe)
        except ray.exceptions.RayError:
            continue
        if not problem and not (folder / f"{PROBE}{token}-{node['NodeID']}").exists():
            problem = "what is written there does not arrive here"
        problems.append((node, problem))
    return problems


def _probe(folder: Path, token: str, node: str) -> str:
    """Return what is wrong with the folder on the node that runs this; empty if nothing is."""
    file = folder / f"{PROBE}{token}"
    try:
        if not folder.exists():
            return "there is no such folder"
        if not file.exists():
            return "it is another folder"
        file.with_name(f"{file.name}-{node}").write_text(token)
    except OSError as error:
        return f"it cannot be used ({error.strerror or error})"
    return ""
