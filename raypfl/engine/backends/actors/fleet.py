"""The client actors of a run on Ray: those that are there, those that start, and those that replace others."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from raypfl.clients.gpu_errors import out_of_memory
from raypfl.common.errors import RaypflError
from raypfl.engine.backends.actors.actor_pools import ActorPools
from raypfl.engine.backends.actors.home_checks import HomeChecks
from raypfl.engine.backends.actors.restarts import MAX_SETUP_FAILURES, RestartPolicy
from raypfl.engine.backends.client_actor import Home
from raypfl.engine.backends.shipment import Shipment

LOOK = 1.0
"""Seconds at least between looks at the cluster's nodes."""

POLL = 0.1
"""Seconds between checks whether the run was asked to stop, and at least between looks at actors that start."""


@dataclass(eq=False)
class StartedActor:
    """A client actor that was started.

    Attributes
    ----------
    prepared : the reference that `prepare` returned.
    home : where the actor is, once it is ready.
    takes_part : whether it gets groups; not if it computes on another type of device.
    """

    pool: int
    handle: Any
    prepared: Any
    home: Home | None = None
    takes_part: bool = True

    @property
    def place(self) -> tuple[int, str]:
        """The pool and the node: actors of one place are equally fast."""
        return self.pool, self.home.node if self.home else ""


class ActorFleet:
    """Keeps as many client actors as a run should have.

    From round to round, their number follows the nodes that there are. If a GPU's memory is too small for the actors
    that share it, fewer of them do.

    Parameters
    ----------
    actors : the client actors, which may still be starting, as ``(pool, handle)``.
    start : a function that starts another actor with options for Ray.
    mixed_devices : whether actors may compute on devices of several types.
    """

    def __init__(
        self,
        actors: Sequence[tuple[int, Any]],
        start: Callable[[Mapping[str, Any]], Any],
        pools: ActorPools,
        shipment: Shipment,
        warn: Callable[[str], None],
        mixed_devices: bool,
    ):
        self.restarts = RestartPolicy()
        self._start = start
        self._pools = pools
        self._shipment = shipment
        self._warn = warn
        self._checks = HomeChecks(mixed_devices, warn)
        self._has_begun = False
        self._round = 0
        self._last_look = 0.0
        self._targets = [sum(actor_pool == pool for actor_pool, _ in actors) for pool in range(len(pools))]
        # Dicts serve as ordered sets. `_starting` has the actors that are being set up, by the reference of `prepare`.
        self._pool_actors: list[dict[StartedActor, None]] = [{} for _ in range(len(pools))]
        self._starting: dict[Any, StartedActor] = {}
        self._next_look_at_starting = 0.0
        for pool, handle in actors:
            self._add(pool, handle)

    def __contains__(self, actor: StartedActor) -> bool:
        return actor in self._pool_actors[actor.pool]

    @property
    def target(self) -> int:
        """The number of actors that the run should have."""
        return sum(self._targets)

    @property
    def actors(self) -> list[StartedActor]:
        """All actors, pool by pool."""
        return [actor for actors in self._pool_actors for actor in actors]

    @property
    def homes(self) -> list[Home]:
        """Where the actors are that are ready."""
        return _homes_of(self.actors)

    def handles_by_node(self) -> dict[str, list[Any]]:
        """Return the handles of the actors that are ready, by node."""
        homes = {actor: actor.home for actor in self.actors if actor.home is not None}
        ready, _ = ray.wait(list(self._starting), num_returns=len(self._starting), timeout=0)
        for prepared in ready:
            # A failed set-up is handled later, when groups run.
            with contextlib.suppress(RayError):
                homes[self._starting[prepared]] = ray.get(prepared)

        handles_by_node: dict[str, list[Any]] = {}
        for actor, home in homes.items():
            handles_by_node.setdefault(home.node, []).append(actor.handle)
        return handles_by_node

    def wait_until_ready(self, seconds: float, stopped: Callable[[], bool]) -> None:
        """Wait until all actors with room are ready, at most `seconds`: other jobs may hold the resources."""
        deadline = time.monotonic() + seconds
        # If nodes have joined, there may be room for more actors than have been started.
        expected = 0
        for pool, placeable in enumerate(self._pools.placeable_counts()):
            expected += min(placeable, len(self._pool_actors[pool]))

        ready: list[Any] = []
        while len(ready) < expected and time.monotonic() < deadline and not stopped():
            ready, _ = ray.wait([actor.prepared for actor in self.actors], num_returns=expected, timeout=POLL)

        if (expected and len(ready) >= expected) or stopped():
            return
        if not expected:
            self._warn("The run waits for nodes to join: none has room for a client actor.")
            return
        self._warn(
            f"Only {len(ready)} of {expected} client actors came up within {seconds:g} s: the cluster is busy "
            "or slow. The others take part as soon as they are ready."
        )

    def wait_for_starting(self) -> None:
        """Wait a moment, or until an actor that starts is ready."""
        if self._starting:
            ray.wait(list(self._starting), num_returns=1, timeout=POLL)
        else:
            time.sleep(POLL)

    def follow_the_cluster(self, round: int) -> None:
        """Adapt the number of actors to the room in the cluster in a new round; give up actors whose room is gone."""
        if round == self._round or time.monotonic() < self._last_look + LOOK:
            return
        self._round = round
        self._last_look = time.monotonic()

        before = self._targets
        self._targets = self._pools.target_counts()
        if self._targets == before:
            return

        self._warn(f"The cluster has changed: the run now has {sum(self._targets)} client actors, not {sum(before)}.")
        for pool, target in enumerate(self._targets):
            waiting = [actor for actor in self._pool_actors[pool] if actor.home is None]
            surplus = max(0, len(self._pool_actors[pool]) - target)
            for actor in waiting[:surplus]:
                self.kill(actor)

    def start_missing(self) -> None:
        """Start the actors that are missing; after deaths in the set-up, only once a pause is over."""
        for pool, target in enumerate(self._targets):
            while len(self._pool_actors[pool]) < target and self.restarts.may_start(time.monotonic()):
                self._add(pool, self._start(self._pools.options(pool)))

    def prepared_actors(self, may_wait: bool) -> list[StartedActor]:
        """Return the actors whose set-up has ended, also in failure; see :meth:`note_ready`.

        `may_wait` : return none if the last look was only a moment ago.
        """
        # Checked only now and then: actors may wait for room for the whole run.
        if not self._starting or (may_wait and time.monotonic() < self._next_look_at_starting):
            return []
        self._next_look_at_starting = time.monotonic() + POLL
        ready, _ = ray.wait(list(self._starting), num_returns=len(self._starting), timeout=0)
        return [self._starting[prepared] for prepared in ready]

    def note_ready(self, actor: StartedActor) -> list[StartedActor]:
        """Note where an actor is, or why its set-up failed; return the actors that were killed for it.

        Raises
        ------
        RaypflError : if no actor can be set up.
        """
        # The set-up of another actor may have removed this one.
        if self._starting.pop(actor.prepared, None) is None:
            return []
        try:
            actor.home = ray.get(actor.prepared)
        except RayTaskError as error:
            killed = self.make_room(actor, error.cause)
            if not killed:
                raise RaypflError(f"A client actor could not be set up: {error.cause}") from error
            return killed
        except RayError as error:
            self.kill(actor)
            self._died_in_setup(error)
            return []

        actor.takes_part = self._checks.takes_part(actor.home, self._has_begun)
        share = self._pools.options(actor.pool)["num_gpus"]
        self._checks.check_gpu(actor.home, share, _homes_of(self._pool_actors[actor.pool]), self.homes)
        return []

    def make_room(self, actor: StartedActor, error: BaseException | None) -> list[StartedActor]:
        """If a GPU share had too little memory, let fewer actors of its pool share a GPU.

        Return all actors of the pool, which were killed; none if something else failed.
        """
        if not out_of_memory(error):
            return []
        counts = self._pools.reduce_sharing(actor.pool)
        if counts is None:
            return []

        killed = list(self._pool_actors[actor.pool])
        for pool_actor in killed:
            self.kill(pool_actor)
        self._targets = self._pools.target_counts()
        before, now = counts
        self._warn(f"A GPU's memory was too small for {before} client actors; from now on {now} share it.")
        return killed

    def group_finished(self) -> None:
        """Note that a group was finished, so actors do work."""
        self._has_begun = True
        self.restarts.group_finished()

    def kill(self, actor: StartedActor) -> None:
        """End an actor; another one may be started in its place."""
        del self._pool_actors[actor.pool][actor]
        self._starting.pop(actor.prepared, None)
        ray.kill(actor.handle)

    def _add(self, pool: int, handle: Any) -> None:
        """Let an actor prepare for the run's job."""
        actor = StartedActor(pool, handle, handle.prepare.remote(self._shipment))
        self._pool_actors[pool][actor] = None
        self._starting[actor.prepared] = actor

    def _died_in_setup(self, error: RayError) -> None:
        """Give up if actors keep dying in their set-up and there is no other one that can work."""
        now = time.monotonic()
        policy = self.restarts
        policy.died_in_setup(now, getattr(error, "actor_init_failed", False))
        if policy.setup_deaths == MAX_SETUP_FAILURES:
            self._warn("Client actors die while they are set up; others are started after growing pauses.")
        if policy.is_hopeless(now) and not self.homes:
            raise RaypflError(
                f"Client actors die while they are set up: {policy.setup_deaths} since the last group was finished, "
                f"and none is left. {reason_of(error)}"
            ) from error


def reason_of(error: BaseException) -> str:
    """Return the cause at the end of Ray's message about a death, and what may help."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    cause = " ".join(line for line in lines[-3:] if not line.startswith(("namespace:", "ip:")))
    # Then follows Ray's list of common causes, such as `ray stop`, the same after every death.
    cause = cause.partition(" Some common causes include:")[0]
    return f"{cause} Is there enough memory for the actors? Fewer of them (ray.actors) need less."


def _homes_of(actors: Iterable[StartedActor]) -> list[Home]:
    return [actor.home for actor in actors if actor.home is not None]
