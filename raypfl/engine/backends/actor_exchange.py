"""One exchange on client actors: its groups run, and run again where an actor dies."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from raypfl.clients.worker import Call, Group
from raypfl.common.counting import counted
from raypfl.common.errors import Stopped
from raypfl.engine.backends.actors.fleet import POLL, ActorFleet, StartedActor, reason_of
from raypfl.engine.backends.objects.bundle_replies import BundleReplies
from raypfl.engine.backends.objects.sums_on_nodes import SumsOnNodes
from raypfl.federation.exchange.backend import BundleReply, Done, Failed
from raypfl.federation.exchange.bundles import Bundle
from raypfl.federation.exchange.partial_sums import PartialSum
from raypfl.federation.exchange.placement import Dispatch
from raypfl.federation.exchange.timings import Speeds

MAX_REPLIES = 64
"""Replies that are handled after one look at all that are awaited. A look takes 0.1 ms for 100 references, and 0.9 for
2,000."""


@dataclass(frozen=True, eq=False)
class _Task:
    """A bundle that was pushed to an actor, with references to its reply, its groups' states and, perhaps, its sums."""

    bundle: Bundle
    actor: StartedActor
    reply: Any
    stacks: Sequence[Any]
    sums: Any = None


class ActorExchange:
    """Pushes bundles of groups to client actors, the longest first, until all have finished.

    `sums` : the sums that stay on nodes; None: they come with the replies.
    """

    def __init__(
        self,
        call: Call,
        bundles: Sequence[Bundle],
        sums: SumsOnNodes | None,
        fleet: ActorFleet,
        bundle_replies: BundleReplies,
        speeds: Speeds,
        stopped: Callable[[], bool],
        warn: Callable[[str], None],
    ):
        self._call = call
        self._sums = sums
        self._fleet = fleet
        self._bundle_replies = bundle_replies
        self._speeds = speeds
        self._stopped = stopped
        self._warn = warn
        self._dispatch = Dispatch(bundles)
        # Reference to the reply -> its task.
        self._tasks: dict[Any, _Task] = {}

    def outcomes(self) -> Generator[tuple[Group, Done | Failed], None, None]:
        """Run all groups; yield their outcomes as they arrive, without the sums if these stay on nodes."""
        # Sorted, so that neighbouring bundles go to actors of the same node.
        for actor in sorted(self._fleet.actors, key=lambda actor: actor.place):
            self._join(actor)
        try:
            while not self._is_over():
                self._fleet.start_missing()
                self._add_ready_actors()
                self._push()
                for reply in self._replies():
                    if self._sums is not None and reply in self._sums.awaited:
                        self._run_again(self._sums.arrived(reply))
                    # Otherwise the reply is of an actor that is already known to have died.
                    elif reply in self._tasks:
                        yield from self._finish(self._tasks[reply])
        finally:
            # A method's code cannot be interrupted, so actors with unwanted work are killed.
            for actor in {task.actor for task in self._tasks.values()}:
                if actor in self._fleet:
                    self._fleet.kill(actor)

    def _join(self, actor: StartedActor) -> None:
        """Let an actor have groups, if it is ready and takes part."""
        if actor.home is not None and actor.takes_part:
            self._dispatch.join(actor, actor.home.node, self._speeds.slowness(actor.place))

    def _add_ready_actors(self) -> None:
        """Let actors take part once they run: a group that is pushed to one without room would wait for ever."""
        for actor in self._fleet.prepared_actors(may_wait=bool(self._tasks)):
            self._forget(self._fleet.note_ready(actor))
            self._join(actor)

    def _forget(self, killed: Sequence[StartedActor]) -> None:
        """Let the groups of actors that were killed wait again."""
        for actor in killed:
            self._forget_tasks(actor)
            self._dispatch.lost(actor)

    def _forget_tasks(self, actor: StartedActor) -> None:
        for task in list(self._tasks.values()):
            if task.actor is actor:
                del self._tasks[task.reply]

    def _is_over(self) -> bool:
        """Return whether all groups have finished, and all sums are here that were left on nodes."""
        if not self._dispatch.done or self._sums is None:
            return self._dispatch.done
        if not self._sums.awaited:
            self._run_again(self._sums.fetch())
        return self._dispatch.done and not self._sums.awaited

    def _run_again(self, groups: Sequence[Group]) -> None:
        """Run the groups again whose sums were lost."""
        if groups:
            self._warn(
                f"Sums of {counted(len(groups), 'group')} are lost, perhaps with a node; the work is done again."
            )
        for group in groups:
            self._dispatch.append(Bundle.of(group))

    def _push(self) -> None:
        """Push bundles to the actors that have room for one."""
        are_separate = self._bundle_replies.are_separate(self._call.function)
        while chosen := self._dispatch.next(time.monotonic()):
            actor, bundle = chosen
            num_stacks = sum(len(group.clients) if are_separate else 1 for group in bundle.groups)
            if self._sums is None:
                work = actor.handle.work.options(num_returns=1 + num_stacks)
                reply, *stacks = work.remote(self._call, bundle.groups, are_separate)
                self._tasks[reply] = _Task(bundle, actor, reply, stacks)
            else:
                work = actor.handle.work_leaving_sums.options(num_returns=2 + num_stacks)
                reply, subtrees, *stacks = work.remote(self._call, bundle.groups, are_separate)
                self._tasks[reply] = _Task(bundle, actor, reply, stacks, subtrees)

    def _replies(self) -> list[Any]:
        """Return references of replies that have arrived, after a moment at most."""
        awaited = [*self._tasks, *(self._sums.awaited if self._sums else ())]
        pause = self._dispatch.pause(time.monotonic())
        if self._stopped():
            raise Stopped("The run was asked to stop.")
        if not awaited:
            self._fleet.wait_for_starting()
            return []

        ready, _ = ray.wait(awaited, num_returns=min(len(awaited), MAX_REPLIES), timeout=0)
        if not ready:
            ready, _ = ray.wait(awaited, num_returns=1, timeout=min(POLL, pause))
        return ready

    def _finish(self, task: _Task) -> Iterator[tuple[Group, Done | Failed]]:
        """Yield the outcomes of a task that has replied; if its actor failed, its groups run again."""
        try:
            outcomes = self._outcomes_of(task)
        except RayError as error:
            # The process failed. An error of a group would have come as an outcome.
            self._warn("A client actor died; another takes its place, and its groups run again.")
            failed = Failed(error, f"Its actor's process died. {reason_of(error)}")
            yield from self._replace(task.actor, failed)
            return

        for _, outcome in outcomes:
            if isinstance(outcome, Failed):
                if outcome.gpu_failure:
                    self._warn(
                        f"The GPU failed in a client actor's process ({outcome.gpu_failure}); another actor takes its "
                        "place, and its groups run again."
                    )
                    yield from self._replace(task.actor, replace(outcome, gpu_failure=""))
                    return
                killed = self._fleet.make_room(task.actor, outcome.error)
                if killed:
                    self._forget(killed)
                    return

        del self._tasks[task.reply]
        self._fleet.group_finished()
        self._dispatch.finished(task.actor, task.bundle, time.monotonic())
        if self._sums is not None:
            done_groups = tuple(group for group, outcome in outcomes if isinstance(outcome, Done))
            if done_groups:
                self._sums.add(PartialSum(done_groups, task.sums), task.actor.handle)
        # The actor gets its next bundle before the server looks at the outcomes.
        self._push()
        yield from outcomes

    def _outcomes_of(self, task: _Task) -> list[tuple[Group, Done | Failed]]:
        groups = task.bundle.groups
        try:
            bundle_reply: BundleReply = ray.get(task.reply)
        except RayTaskError as error:
            return [(group, Failed(error, str(error))) for group in groups]

        _, node = task.actor.place
        outcomes = self._bundle_replies.outcomes(self._call.function, groups, bundle_reply, task.stacks, node)
        for group, outcome in outcomes:
            if isinstance(outcome, Done):
                reply = outcome.reply
                reply.seconds = self._speeds.note(task.actor.place, self._call.function, group, reply.seconds)
        return outcomes

    def _replace(self, actor: StartedActor, failed: Failed) -> Iterator[tuple[Group, Failed]]:
        """Give up an actor that is dead, or whose GPU has failed, which counts as a death.

        Its groups go to the end of the queue, or the only one has `failed` if its actors died too often. Of several
        groups any may have caused the death, so each runs alone the next time, after the groups that wait.
        """
        self._fleet.kill(actor)
        self._forget_tasks(actor)

        groups: list[Group] = []
        for bundle in self._dispatch.lost(actor):
            self._dispatch.drop(bundle)
            groups += bundle.groups

        for group in groups:
            deaths = 0
            if len(groups) == 1:
                deaths = self._fleet.restarts.died_at_work((group.index, group.clients))
            if deaths == group.deaths:
                yield group, replace(failed, deaths=deaths)
            else:
                self._dispatch.append(Bundle.of(replace(group, alone=True)))
