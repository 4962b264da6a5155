"""Sums that stay on nodes: added up there, lost with a node, and computed again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from raypfl.clients.worker import Call, Group, Worker
from raypfl.engine.backends import ray_backend
from raypfl.engine.backends.client_actor import Home
from raypfl.engine.backends.inline import Inline
from raypfl.engine.backends.ray_backend import RayBackend
from raypfl.federation.exchange import partial_sums
from raypfl.federation.exchange.backend import Failed
from tests.engine.test_ray_backend import Works, backend_of, two_exchanges

pytestmark = pytest.mark.usefixtures("ray_cluster")


@dataclass
class Trouble:
    """What goes wrong: each number counts the calls of its kind, from 0, over all actors.

    Attributes
    ----------
    lost_sums, lost_blocks : calls with sums, which are on a node that is gone when somebody needs them.
    dies_adding : calls at which an actor dies that adds a block up.
    left : index of a group -> how often its sums were left on a node.
    lost : indices of the groups whose sums were lost.
    blocks : the groups of each block that was added up.
    """

    lost_sums: tuple[int, ...] = ()
    lost_blocks: tuple[int, ...] = ()
    dies_adding: tuple[int, ...] = ()
    left: Counter[int] = field(default_factory=Counter)
    lost: Counter[int] = field(default_factory=Counter)
    blocks: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.calls = count()
        self.additions = count()
        self.groups_of: dict[Any, list[int]] = {}


class OnNode(Works):
    """A pretended client actor on a node, which works in this process."""

    def __init__(self, worker: Worker, node: str, trouble: Trouble) -> None:
        super().__init__(worker, lambda number: False)
        home = Home(node)
        self.prepare = SimpleNamespace(remote=lambda job: self.put(home))
        self.work_leaving_sums = SimpleNamespace(options=lambda num_returns: SimpleNamespace(remote=self._leave_sums))
        self.add_up = SimpleNamespace(options=lambda num_returns: SimpleNamespace(remote=self._add_up))
        self.trouble = trouble

    def _leave_sums(self, call: Call, groups: Sequence[Group], apart: bool) -> list[Any]:
        reply, sums, *stacks = self.actor.work_leaving_sums(call, groups, apart)
        self.trouble.left.update(group.index for group in groups)

        # A call whose only client fails leaves no sums that could be lost.
        indices = []
        for group, outcome in zip(groups, reply.outcomes, strict=True):
            if not isinstance(outcome, Failed):
                indices.append(group.index)
        is_lost = bool(indices) and next(self.trouble.calls) in self.trouble.lost_sums
        return [self.put(reply), self._kept(sums, indices, is_lost), *map(self.put, stacks)]

    def _add_up(self, parts: Sequence[Any]) -> list[Any]:
        import ray

        number = next(self.trouble.additions)
        if number in self.trouble.dies_adding:
            return [self.put(ray.exceptions.ActorDiedError())] * 2

        places_lost, sums = self.actor.add_up(parts)
        indices = []
        for place, part in enumerate(parts):
            if place not in places_lost:
                indices += self.trouble.groups_of[part]
        self.trouble.blocks.append(sorted(indices))
        return [self.put(places_lost), self._kept(sums, indices, number in self.trouble.lost_blocks)]

    def _kept(self, sums: Any, indices: list[int], is_lost: bool) -> Any:
        import ray

        if is_lost:
            self.trouble.lost.update(indices)
            sums = ray.exceptions.ObjectLostError("", None, "")
        reference = self.put(sums)
        self.trouble.groups_of[reference] = indices
        return reference


@pytest.mark.parametrize(
    "trouble",
    [Trouble(), Trouble(lost_sums=(0, 3)), Trouble(lost_blocks=(0, 2)), Trouble(dies_adding=(0,), lost_sums=(1,))],
    ids=["none", "sums", "blocks", "actor"],
)
def test_sums_that_stay_on_nodes_have_the_bits_of_inline_ones_and_lost_ones_cost_their_groups_only(
    monkeypatch: pytest.MonkeyPatch, trouble: Trouble
):
    monkeypatch.setattr(partial_sums, "FAN_IN", 2)
    monkeypatch.setattr(ray_backend, "should_stay_on_nodes", lambda replies, num_bytes, seconds: num_bytes > 0)
    warnings: list[str] = []

    def backend(worker: Worker) -> RayBackend:
        actors = [OnNode(worker, node, trouble) for node in "abab"]
        return backend_of(actors, lambda: pytest.fail("no actor is to be started"), warnings.append)

    assert two_exchanges(backend) == two_exchanges(Inline)
    # The first exchange shows how large sums are. In the second, client 6 fails alone.
    assert trouble.left == Counter(range(13)) + Counter(index for index in trouble.lost.elements())
    assert len(trouble.blocks) >= 5 and max(map(len, trouble.blocks)) > 4
    assert bool(warnings) == bool(trouble.lost)


def test_sums_stay_on_nodes_only_if_there_are_several(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ray_backend, "should_stay_on_nodes", lambda replies, num_bytes, seconds: num_bytes > 0)
    trouble = Trouble()
    two_exchanges(lambda worker: backend_of([OnNode(worker, "a", trouble), OnNode(worker, "a", trouble)], pytest.fail))
    assert not trouble.left
