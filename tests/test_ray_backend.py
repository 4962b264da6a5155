"""What the Ray backend puts into objects, and what it asks for."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from raypfl.federation.ray_backend import APART, INSIDE, RayBackend
from raypfl.federation.states import Kept
from raypfl.federation.work import Call, Group, Reply

pytestmark = pytest.mark.usefixtures("ray_cluster")


class Stand:
    """Stands for a client actor: its clients keep much when they train, and nothing when they are judged.

    Attributes
    ----------
    objects : how many it was to return, for each group.
    """

    def __init__(self) -> None:
        import ray

        self.put = ray.put
        self.objects: list[int] = []
        self.prepare = SimpleNamespace(remote=lambda order: self.put("node"))
        self.work = SimpleNamespace(options=lambda num_returns: SimpleNamespace(remote=self._returning(num_returns)))

    def _returning(self, count: int) -> Any:
        def work(call: Call, group: Group, apart: bool) -> list[Any]:
            self.objects.append(count)
            kept = Kept(({"w": APART},) * len(group.clients)) if call.function == "train" else None
            return [self.put(Reply({}, None, 0.0, kept)), *[self.put(None)] * (count - 1)]

        return work


@pytest.fixture
def stand() -> Stand:
    return Stand()


@pytest.fixture
def backend(stand: Stand) -> Iterator[RayBackend]:
    told: list[str] = []
    yield RayBackend([stand], lambda: stand, b"", lambda: False, told.append)
    assert not told


def test_only_a_function_whose_states_are_large_returns_an_object_for_each_client(backend, stand):
    for number, function in enumerate(["train", "judge", "train", "judge"]):
        group = Group(0, (4, 5, 6), np.arange(3), {}, [None] * 3)
        list(backend.run(Call(number, function, 1, 0.1, {}, {}), [group]))
    assert stand.objects == [1 + 1, 1 + 1, 1 + 3, 1 + 1]  # the first time, nobody knows yet


def test_a_small_broadcast_travels_with_the_call_and_a_large_one_is_an_object(backend):
    import ray

    half = np.arange(INSIDE // 8, dtype=np.float32)
    small = backend.broadcast({"theta": half})
    assert list(small) == ["theta"] and np.array_equal(small["theta"], half)
    large = backend.broadcast({"theta": half, "control": half, "scale": np.ones(1)})
    assert isinstance(large, ray.ObjectRef) and np.array_equal(ray.get(large)["control"], half)
