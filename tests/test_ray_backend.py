"""What the Ray backend puts into objects, and what it asks for."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from raypfl.backends import ray_backend
from raypfl.backends.ray_backend import APART, INSIDE, RayBackend
from raypfl.backends.restarts import MAX_SETUP_FAILURES, PATIENCE
from raypfl.clients.worker import Call, Group, Reply
from raypfl.common.errors import RaypflError
from raypfl.storage.states import Contents

pytestmark = pytest.mark.usefixtures("ray_cluster")


class Stand:
    """Stands for a client actor: its clients keep much when they train, and nothing when they are evaluated.

    Attributes
    ----------
    objects : how many it was to return, for each group.
    """

    def __init__(self) -> None:
        import ray

        self.put = ray.put
        self.objects: list[int] = []
        self.prepare = SimpleNamespace(remote=lambda job: self.put("node"))
        self.work = SimpleNamespace(options=lambda num_returns: SimpleNamespace(remote=self._returning(num_returns)))

    def _returning(self, count: int) -> Any:
        def work(call: Call, group: Group, apart: bool) -> list[Any]:
            self.objects.append(count)
            kept = Contents(({"w": APART},) * len(group.clients)) if call.function == "train" else None
            return [self.put(Reply({}, None, 0.0, kept)), *[self.put(None)] * (count - 1)]

        return work


@pytest.fixture
def stand() -> Stand:
    return Stand()


@pytest.fixture
def backend(stand: Stand) -> Iterator[RayBackend]:
    warnings: list[str] = []
    yield RayBackend([stand], lambda: stand, b"", lambda: False, warnings.append)
    assert not warnings


def test_only_a_function_whose_states_are_large_returns_an_object_for_each_client(backend, stand):
    for function in ["train", "evaluate", "train", "evaluate"]:
        group = Group(0, (4, 5, 6), np.arange(3), {}, [None] * 3)
        list(backend.run(Call(function, 1, 0.1), [group]))
    assert stand.objects == [1 + 1, 1 + 1, 1 + 3, 1 + 1]  # the first time, nobody knows yet


def test_a_small_broadcast_travels_with_the_call_and_a_large_one_is_an_object(backend):
    import ray

    half = np.arange(INSIDE // 8, dtype=np.float32)
    small = backend.broadcast({"theta": half})
    assert list(small) == ["theta"] and np.array_equal(small["theta"], half)
    large = backend.broadcast({"theta": half, "control": half, "scale": np.ones(1)})
    assert isinstance(large, ray.ObjectRef) and np.array_equal(ray.get(large)["control"], half)


class DiesInSetup:
    """Stands for a client actor that dies while it is set up."""

    def __init__(self, failed: bool = False) -> None:
        import ray

        error = ray.exceptions.ActorDiedError()
        error._actor_init_failed = failed
        died = ray.put(error)
        self.prepare = SimpleNamespace(remote=lambda job: died)


class Clock:
    """Stands for the module `time`: a look at it takes a tenth of a second."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        self.now += 0.1
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(ray_backend, "time", clock)
    monkeypatch.setattr(ray_backend.ray, "kill", lambda actor: None)
    return clock


def groups(count: int) -> list[Group]:
    return [Group(i, (i,), np.arange(1), {}, [None]) for i in range(count)]


def test_actors_that_die_while_they_are_set_up_end_no_run_in_which_another_works(stand, clock):
    started: list[DiesInSetup] = []

    def start() -> DiesInSetup:
        started.append(DiesInSetup())
        return started[-1]

    backend = RayBackend([stand, start()], start, b"", lambda: False, lambda text: None)
    for _ in range(1500):
        assert len(list(backend.run(Call("evaluate", 1, 0.1), groups(3)))) == 3
    assert clock.now > PATIENCE and len(started) > MAX_SETUP_FAILURES


def test_where_every_actor_dies_while_it_is_set_up_the_run_ends_after_fewer_and_fewer_tries(clock):
    moments: list[float] = []

    def start() -> DiesInSetup:
        moments.append(clock.now)
        return DiesInSetup()

    warnings: list[str] = []
    backend = RayBackend([start()], start, b"", lambda: False, warnings.append)
    with pytest.raises(RaypflError, match=r"die while they are set up: \d+ since the last group was finished"):
        list(backend.run(Call("evaluate", 1, 0.1), groups(1)))
    pauses = np.diff(moments)
    assert clock.now > PATIENCE and len(pauses) < 50 and pauses[-1] > 5 * pauses[0]
    assert len(warnings) == 1


def test_where_setting_actors_up_fails_nobody_waits_for_better_times(clock):
    backend = RayBackend([DiesInSetup(True)], lambda: DiesInSetup(True), b"", lambda: False, lambda text: None)
    with pytest.raises(RaypflError, match=f"{MAX_SETUP_FAILURES} since the last group"):
        list(backend.run(Call("evaluate", 1, 0.1), groups(1)))
    assert clock.now < PATIENCE / 10


def test_an_actor_that_comes_up_after_others_have_died_does_the_work(stand, clock):
    later = iter([DiesInSetup() for _ in range(5)])
    backend = RayBackend([DiesInSetup()], lambda: next(later, stand), b"", lambda: False, lambda text: None)
    assert len(list(backend.run(Call("evaluate", 1, 0.1), groups(3)))) == 3
