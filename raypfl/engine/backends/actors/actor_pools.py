"""The number of client actors of each pool of a run: the arithmetic alone, without Ray or actors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from raypfl.experiment.settings import ActorPool

Nodes = Sequence[Mapping[str, float]]
"""The resources of each node, as Ray names them."""

_TYPE = "accelerator_type:"
"""Prefix of the resource by which Ray names a node's type of GPU."""

_TOLERANCE = 1e-9
"""For sums of shares of a GPU, which are rounded."""


def share_of(actors: int) -> float:
    """Return the share of a GPU that each of `actors` reserves, rounded down to Ray's precision so that all fit."""
    return math.floor(10_000 / actors) / 10_000


def reserved(pool: ActorPool) -> dict[str, Any]:
    """Return what each actor of a pool reserves, as options for Ray."""
    options: dict[str, Any] = {"num_cpus": pool.cpus_per_actor, "num_gpus": pool.gpus_per_actor}
    if pool.accelerator is not None:
        options["accelerator_type"] = pool.accelerator
    return options


def room_for(options: Mapping[str, Any], nodes: Nodes, server: Mapping[str, float]) -> int | None:
    """Return how many actors with these options fit beside the server; None if not even the server has room."""
    free_nodes = _nodes_beside(server, nodes)
    if free_nodes is None:
        return None
    return sum(node.count_fitting(options) for node in free_nodes)


class ActorPools:
    """The client actors that a run should have, while nodes join and leave.

    Parameters
    ----------
    server : what the server reserves, as options for Ray.
    groups : the number of groups of a cohort, which is as many actors as have something to do.

    Attributes
    ----------
    has_shrunk : whether fewer actors share a GPU than the settings say.
    """

    def __init__(
        self, pools: Sequence[ActorPool], server: Mapping[str, float], groups: int, nodes: Callable[[], Nodes]
    ):
        self._pools = list(pools)
        self._server = server
        self._groups = groups
        self._nodes = nodes
        self.has_shrunk = False

    def __len__(self) -> int:
        return len(self._pools)

    def options(self, pool: int) -> dict[str, Any]:
        """Return what each actor of this pool reserves, as options for Ray."""
        return reserved(self._pools[pool])

    def target_counts(self) -> list[int]:
        """Return how many actors each pool should have now: at least one in all, for which a run waits if it must."""
        counts = [pool_count.target for pool_count in self._counts()]
        return counts if any(counts) else [1, *counts[1:]]

    def placeable_counts(self) -> list[int]:
        """Return how many of those have room now."""
        return [min(pool_count.target, pool_count.room) for pool_count in self._counts()]

    def reduce_sharing(self, pool: int) -> tuple[int, int] | None:
        """Let a quarter fewer actors of this pool share a GPU, because its memory is too small.

        Return how many shared one before, and how many do now; None if an actor has had a GPU, or several, to itself.
        """
        gpus = float(self._pools[pool].gpus_per_actor)
        before = math.floor(1 / gpus + _TOLERANCE) if gpus else 0
        if before < 2:
            return None
        now = before - max(1, before // 4)
        self._pools[pool] = replace(self._pools[pool], gpus_per_actor=share_of(now))
        self.has_shrunk = True
        return before, now

    def _counts(self) -> list[_PoolCount]:
        """Share nodes and groups out among the pools, the first pools first."""
        free_nodes = _nodes_beside(self._server, self._nodes()) or []
        groups = self._groups
        counts = []
        for pool in self._pools:
            options = reserved(pool)
            most = pool.actors or min(pool.max_actors or groups, groups)

            room = 0
            for node in free_nodes:
                room += node.take(options, most - room)

            may_wait = pool.max_actors is not None or (pool.actors is not None and not self.has_shrunk)
            target = most if may_wait else room
            counts.append(_PoolCount(target, room))
            groups = max(0, groups - target)
        return counts


@dataclass(frozen=True)
class _PoolCount:
    """The number of actors that a pool should have, and the number that has room now."""

    target: int
    room: int


@dataclass
class _Node:
    """The free resources of a node; a share of a GPU is taken from one GPU."""

    cpus: float
    gpus: list[float]
    accelerators: frozenset[str]

    def count_fitting(self, options: Mapping[str, Any]) -> int:
        """Return how many actors with these options have room on this node."""
        if options.get("accelerator_type") not in (None, *self.accelerators):
            return 0

        cpus = options["num_cpus"]
        gpus = options["num_gpus"]
        limits = []
        if cpus:
            limits.append(math.floor(self.cpus / cpus + _TOLERANCE))
        if gpus >= 1:
            num_whole = sum(share > 1 - _TOLERANCE for share in self.gpus)
            limits.append(num_whole // math.ceil(gpus))
        elif gpus:
            limits.append(sum(math.floor(share / gpus + _TOLERANCE) for share in self.gpus))
        return min(limits)

    def take(self, options: Mapping[str, Any], most: int) -> int:
        """Put as many actors on this node as have room, but at most `most`; return how many."""
        count = min(self.count_fitting(options), most)
        self.cpus -= count * options["num_cpus"]

        gpus_per_actor = options["num_gpus"]
        for _ in range(count if gpus_per_actor else 0):
            missing = gpus_per_actor
            for i, share in enumerate(self.gpus):
                if missing > 0 and share > min(missing, 1.0) - _TOLERANCE:
                    self.gpus[i] -= min(missing, 1.0)
                    missing -= min(missing, 1.0)
        return count


def _nodes_beside(server: Mapping[str, float], nodes: Nodes) -> list[_Node] | None:
    """Return the nodes without what the server reserves, on the first one that has it; None if none has."""
    free_nodes = []
    for node in nodes:
        types = frozenset(name.removeprefix(_TYPE) for name in node if name.startswith(_TYPE))
        free_nodes.append(_Node(node.get("CPU", 0.0), [1.0] * int(node.get("GPU", 0.0)), types))

    if not any(server.values()):
        return free_nodes
    if any(node.take(server, 1) for node in free_nodes):
        return free_nodes
    return None
