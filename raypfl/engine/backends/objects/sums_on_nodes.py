"""Sums that stay in the object stores of the nodes that computed them, until client actors have added them up."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Generator, Iterator, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import ObjectLostError, RayError

from raypfl.clients.worker import Group
from raypfl.common.counting import counted
from raypfl.common.errors import LostState
from raypfl.federation.exchange.backend import Done, Failed
from raypfl.federation.exchange.partial_sums import PartialSum, PartialSums
from raypfl.federation.exchange.tree_sum import TreeSum


class SumsOnNodes:
    """The sums of an exchange: actors add up blocks of them, and the server adds up the blocks.

    If a node is gone with its sums, their groups run again.
    """

    def __init__(self, groups: Sequence[Group]):
        self._partials = PartialSums(groups)
        # Reference to the outcome of an addition -> the actor, the parts, and the reference to their sum.
        self._in_flight: dict[Any, tuple[Any, list[PartialSum], Any]] = {}
        self._tree = TreeSum()

    @property
    def awaited(self) -> Collection[Any]:
        """The references for which :meth:`arrived` is to be called once they are ready."""
        return self._in_flight.keys()

    def add(self, partial: PartialSum, actor: Any) -> None:
        """Add sums that an actor left on its node. If they complete a block, the actor (a handle) adds that up."""
        parts = self._partials.add(partial)
        if parts:
            lost, subtrees = actor.add_up.options(num_returns=2).remote([part.subtrees for part in parts])
            self._in_flight[lost] = (actor, parts, subtrees)

    def arrived(self, reference: Any) -> list[Group]:
        """Note that an actor has added a block up, or died; return the groups whose sums are lost."""
        actor, parts, subtrees = self._in_flight.pop(reference)
        try:
            lost = [parts[place] for place in ray.get(reference)]
        except RayError:
            # The actor died or the addition failed: the server adds the parts up, and raises its error, if any.
            self._partials.leave(parts)
            return []

        groups = [group for part in parts if part not in lost for group in part.groups]
        if groups:
            self.add(PartialSum(tuple(groups), subtrees), actor)
        return [group for part in lost for group in part.groups]

    def fetch(self) -> list[Group]:
        """Add up the remaining sums in this process; return the groups whose sums are lost."""
        lost: list[Group] = []
        for partial in self._partials.pop_all():
            try:
                subtrees = ray.get(partial.subtrees)
            except ObjectLostError:
                lost += partial.groups
                continue
            for subtree in subtrees:
                self._tree.add(subtree)
        return lost

    def with_sums(
        self, outcomes: Generator[tuple[Group, Done | Failed], None, None]
    ) -> Iterator[tuple[Group, Done | Failed]]:
        """Yield groups' outcomes; the last group that succeeds brings the sums of all.

        Raises
        ------
        LostState : if a group succeeds and, after its sums were lost, fails.
        """
        succeeded: set[int] = set()
        last: tuple[Group, Done] | None = None
        with contextlib.closing(outcomes):
            for group, outcome in outcomes:
                is_again = group.index in succeeded
                if isinstance(outcome, Failed):
                    if is_again:
                        raise LostState(
                            f"The sums of {counted(len(group.clients), 'client')} were lost with their node, and "
                            f"running the clients again failed: {outcome.trace}"
                        ) from outcome.error
                    yield group, outcome
                elif is_again:
                    yield group, replace(outcome, is_again=True)
                else:
                    succeeded.add(group.index)
                    if last is not None:
                        yield last
                    last = group, outcome

        if last is not None:
            group, done = last
            yield group, replace(done, subtrees=self._tree.subtrees())
