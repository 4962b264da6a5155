"""How many client actors of each pool a run has: the arithmetic alone, without Ray or actors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from raypfl.experiment.settings import ActorPool

Nodes = Sequence[Mapping[str, float]]
"""The resources of each node, as Ray names them."""

_TYPE = "accelerator_type:"
_A_LITTLE = 1e-9


def share_of(actors: int) -> float:
    """What each of so many actors reserves of a GPU: rounded down to Ray's precision, so that all of them fit."""
    return math.floor(10_000 / actors) / 10_000


def reserved(pool: ActorPool) -> dict[str, Any]:
    """What each actor of a pool reserves, as options for Ray."""
    options: dict[str, Any] = {"num_cpus": pool.cpus_per_actor, "num_gpus": pool.gpus_per_actor}
    return options if pool.accelerator is None else options | {"accelerator_type": pool.accelerator}


def room_for(options: Mapping[str, Any], nodes: Nodes, server: Mapping[str, float]) -> int | None:
    """Actors with these options that fit the nodes together with the server; None if not even the server has room."""
    left = _beside(server, nodes)
    return None if left is None else sum(node.fits(options) for node in left)


class ActorPools:
    """The client actors that a run wants, while nodes join and leave.

    Parameters
    ----------
    pools : as the settings describe them. server : what the server reserves, as options for Ray.
    groups : of a cohort, which is as many actors as have something to do.
    nodes : called for the nodes that there are.
    """

    def __init__(
        self, pools: Sequence[ActorPool], server: Mapping[str, float], groups: int, nodes: Callable[[], Nodes]
    ):
        self._pools = list(pools)
        self._server = server
        self._groups = groups
        self._nodes = nodes
        self.are_smaller = False

    def __len__(self) -> int:
        return len(self._pools)

    def options(self, pool: int) -> dict[str, Any]:
        """What each actor of this pool reserves."""
        return reserved(self._pools[pool])

    def wanted(self) -> list[int]:
        """Actors of each pool that there should be now: at least one, for which a run waits if it must."""
        counts = [one.wanted for one in self._counts()]
        return counts if any(counts) else [1, *counts[1:]]

    def with_room(self) -> list[int]:
        """How many of those have room now."""
        return [min(one.wanted, one.room) for one in self._counts()]

    def fewer_on_a_gpu(self, pool: int) -> tuple[int, int] | None:
        """Let a quarter fewer actors of this pool share a GPU, because its memory is too small.

        Returns
        -------
        How many shared one and how many do now; None if an actor has had a GPU, or several, to itself.
        """
        gpus = float(self._pools[pool].gpus_per_actor)
        before = math.floor(1 / gpus + _A_LITTLE) if gpus else 0
        if before < 2:
            return None
        now = before - max(1, before // 4)
        self._pools[pool] = replace(self._pools[pool], gpus_per_actor=share_of(now))
        self.are_smaller = True
        return before, now

    def _counts(self) -> list[_Count]:
        """The first pools choose first what they need of nodes and groups."""
        left, groups = _beside(self._server, self._nodes()) or [], self._groups
        counts = []
        for pool in self._pools:
            options, most = reserved(pool), pool.actors or min(pool.max_actors or groups, groups)
            room = 0
            for node in left:
                room += node.take(options, most - room)
            waits = pool.max_actors is not None or (pool.actors is not None and not self.are_smaller)
            counts.append(_Count(most if waits else room, room))
            groups = max(0, groups - counts[-1].wanted)
        return counts


@dataclass(frozen=True)
class _Count:
    """Actors of a pool that are wanted, and how many of them have room."""

    wanted: int
    room: int


@dataclass
class _Node:
    """What is left on a node; a share of a GPU is taken of one GPU."""

    cpus: float
    gpus: list[float]
    accelerators: frozenset[str]

    def fits(self, options: Mapping[str, Any]) -> int:
        """How many actors with these options have room here."""
        if options.get("accelerator_type") not in (None, *self.accelerators):
            return 0
        cpus, gpus = options["num_cpus"], options["num_gpus"]
        room = [math.floor(self.cpus / cpus + _A_LITTLE)] if cpus else []
        if gpus >= 1:
            room.append(sum(left > 1 - _A_LITTLE for left in self.gpus) // math.ceil(gpus))
        elif gpus:
            room.append(sum(math.floor(left / gpus + _A_LITTLE) for left in self.gpus))
        return min(room)

    def take(self, options: Mapping[str, Any], most: int) -> int:
        """Put as many actors here as have room, but at most so many; returns how many."""
        count = min(self.fits(options), most)
        self.cpus -= count * options["num_cpus"]
        gpus = options["num_gpus"]
        for _ in range(count if gpus else 0):
            need = gpus
            for i, left in enumerate(self.gpus):
                if need > 0 and left > min(need, 1.0) - _A_LITTLE:
                    self.gpus[i] -= min(need, 1.0)
                    need -= min(need, 1.0)
        return count


def _beside(server: Mapping[str, float], nodes: Nodes) -> list[_Node] | None:
    """The nodes without what the server reserves, on the first one that has it; None if none has."""
    left = [
        _Node(
            node.get("CPU", 0.0),
            [1.0] * int(node.get("GPU", 0.0)),
            frozenset(name.removeprefix(_TYPE) for name in node if name.startswith(_TYPE)),
        )
        for node in nodes
    ]
    if not any(server.values()) or any(node.take(server, 1) for node in left):
        return left
    return None
