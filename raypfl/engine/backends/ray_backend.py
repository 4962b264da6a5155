"""The Ray backend: what the server asks of client actors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import ray

from raypfl.clients.worker import Call, Group
from raypfl.engine.backends.actor_exchange import ActorExchange
from raypfl.engine.backends.actors.actor_pools import ActorPools
from raypfl.engine.backends.actors.fleet import ActorFleet
from raypfl.engine.backends.client_actor import get_broadcasts
from raypfl.engine.backends.objects import states_on_ray
from raypfl.engine.backends.objects.bundle_replies import BundleReplies
from raypfl.engine.backends.objects.sums_on_nodes import SumsOnNodes
from raypfl.engine.backends.shipment import Shipment
from raypfl.federation.exchange.backend import Done, Failed, StoredStack
from raypfl.federation.exchange.broadcasts import INLINE_BYTES
from raypfl.federation.exchange.bundles import Bundle, bundled
from raypfl.federation.exchange.partial_sums import should_stay_on_nodes
from raypfl.federation.exchange.timings import Speeds
from raypfl.storage.filesystems import is_shared
from raypfl.storage.stacks import Fetch
from raypfl.storage.states import StateFile


class RayBackend:
    """Runs groups on client actors, replaces actors that die, and runs their groups elsewhere.

    However many actors there are, the groups stay as they are, and so do the results.

    Parameters
    ----------
    actors, start, pools, shipment, mixed_devices : as for :class:`ActorFleet`.
    """

    def __init__(
        self,
        actors: Sequence[tuple[int, Any]],
        start: Callable[[Mapping[str, Any]], Any],
        pools: ActorPools,
        shipment: Shipment,
        stopped: Callable[[], bool],
        warn: Callable[[str], None],
        mixed_devices: bool = False,
    ):
        self._fleet = ActorFleet(actors, start, pools, shipment, warn, mixed_devices)
        self._bundle_replies = BundleReplies()
        self._speeds = Speeds()
        self._stopped = stopped
        self._warn = warn

    @property
    def num_actors(self) -> int:
        return max(1, self._fleet.target)

    @property
    def actors(self) -> list[tuple[int, Any]]:
        """The client actors that are alive, for the next run."""
        return [(actor.pool, actor.handle) for actor in self._fleet.actors]

    def wait_for_actors(self, seconds: float) -> None:
        """Wait until all actors with room are ready, at most `seconds`: other jobs may hold the resources."""
        self._fleet.wait_until_ready(seconds, self._stopped)

    def broadcast(self, arrays: Mapping[str, np.ndarray], inside: bool = True) -> Any:
        contiguous = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
        inside = inside and sum(array.nbytes for array in contiguous.values()) <= INLINE_BYTES
        return contiguous if inside else ray.put(contiguous)

    def get_broadcast(self, handle: Any) -> Mapping[str, np.ndarray]:
        return get_broadcasts([handle])[0]

    def map_states(self, function: Callable[[Fetch, Any], Any], jobs: Sequence[tuple[str, Any]]) -> list[Any]:
        return states_on_ray.map_states(self._fleet.handles_by_node(), function, jobs)

    def read_states(self, location: str, files: Sequence[StateFile]) -> Iterator[StoredStack]:
        handles_by_node = self._fleet.handles_by_node() if is_shared(location) else {}
        return states_on_ray.read_states(handles_by_node, location, files, self._warn)

    def run(self, call: Call, groups: Sequence[Group]) -> Iterator[tuple[Group, Done | Failed]]:
        self._fleet.follow_the_cluster(call.round)
        bundles = bundled(groups, self._fleet.target, self._bundle_replies.most_clients(call.function))
        sums = SumsOnNodes(groups) if self._should_leave_sums(call, bundles) else None
        exchange = ActorExchange(
            call, bundles, sums, self._fleet, self._bundle_replies, self._speeds, self._stopped, self._warn
        )
        outcomes = exchange.outcomes()
        return outcomes if sums is None else sums.with_sums(outcomes)

    def _should_leave_sums(self, call: Call, bundles: Sequence[Bundle]) -> bool:
        """Return whether the sums of an exchange stay on the nodes, where actors add them up."""
        nodes = {home.node for home in self._fleet.homes}
        if len(nodes) < 2:
            return False
        seconds = sum(bundle.seconds for bundle in bundles) / self._fleet.target
        return should_stay_on_nodes(len(bundles), self._bundle_replies.sum_bytes(call.function), seconds)
