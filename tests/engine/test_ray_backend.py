"""The Ray backend: what it puts into objects, and how it starts and replaces client actors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from raypfl.clients.worker import Call, Group, Reply, Worker
from raypfl.common.errors import RaypflError
from raypfl.common.messages import Each, Mean, Sum
from raypfl.engine.backends import actor_exchange
from raypfl.engine.backends.actors import fleet
from raypfl.engine.backends.actors.actor_pools import ActorPools
from raypfl.engine.backends.actors.restarts import MAX_SETUP_FAILURES, PATIENCE
from raypfl.engine.backends.client_actor import ClientActor, Home
from raypfl.engine.backends.inline import Inline
from raypfl.engine.backends.objects.bundle_replies import SEPARATE_BYTES
from raypfl.engine.backends.ray_backend import INLINE_BYTES, RayBackend
from raypfl.experiment.settings import ActorPool
from raypfl.federation.exchange.backend import Backend, BundleReply, Failed
from raypfl.federation.settings import FailureSettings
from raypfl.storage.stacks import Contents
from tests.federation.test_cohort import Probe, ids_of, rows_of
from tests.support.federation import Federation

pytestmark = pytest.mark.usefixtures("ray_cluster")


def backend_of(
    actors: list[Any],
    start: Callable[[], Any],
    warn: Callable[[str], None] = lambda text: None,
    pools: ActorPools | None = None,
    **options: Any,
) -> RayBackend:
    """A backend of one pool with these actors, which keeps their number."""
    pools = pools or ActorPools([ActorPool(actors=len(actors))], {}, 99, lambda: [{"CPU": 99.0}])
    every = [(0, actor) for actor in actors]
    return RayBackend(every, lambda reserved: start(), pools, b"", lambda: False, warn, **options)


def sharing(shares: float, gpus: float = 1.0, **counts: int) -> ActorPools:
    nodes = [{"CPU": 99.0, "GPU": gpus}]
    return ActorPools([ActorPool(gpus_per_actor=shares, **counts)], {}, 99, lambda: nodes)


class Stand:
    """A pretended client actor: its clients' states are large after training, and there are none after evaluation.

    Attributes
    ----------
    objects : the number of objects that each group was to return.
    """

    def __init__(self, home: Home | None = None) -> None:
        import ray

        home = home or Home("node")

        self.put = ray.put
        self.objects: list[int] = []
        self.prepare = SimpleNamespace(remote=lambda job: self.put(home))
        self.work = SimpleNamespace(options=lambda num_returns: SimpleNamespace(remote=self._returning(num_returns)))

    def _returning(self, count: int) -> Any:
        def work(call: Call, groups: Sequence[Group], apart: bool) -> list[Any]:
            self.objects.append(count)
            returned = [self.put(result) for result in self.results(call, groups, apart)]
            assert len(returned) == count
            return returned

        return work

    def results(self, call: Call, groups: Sequence[Group], apart: bool) -> Sequence[Any]:
        replies = []
        for group in groups:
            states = Contents(({"w": SEPARATE_BYTES},) * len(group.clients)) if call.function == "train" else None
            replies.append(Reply({}, None, 0.0, states))
        num_stacks = sum(len(group.clients) if apart else 1 for group in groups)
        return [BundleReply(replies, ()), *[None] * num_stacks]


@pytest.fixture
def stand() -> Stand:
    return Stand()


@pytest.fixture
def backend(stand: Stand) -> Iterator[RayBackend]:
    warnings: list[str] = []
    yield backend_of([stand], lambda: stand, warnings.append)
    assert not warnings


def test_the_reason_of_a_death_is_rays_cause_without_its_general_advice():
    death = RuntimeError(
        "The actor died unexpectedly before finishing this task.\n\tclass_name: ClientActor\n\tnamespace: 9e50\n"
        "\tip: 10.0.0.2\nThe actor is dead because its worker process has died. Worker exit detail: End of file. Some "
        "common causes include: (1) ray stop --force was called, or (2) SIGSEGV."
    )
    cause, _, remedy = fleet.reason_of(death).partition(" Is there enough memory")
    assert cause == "The actor is dead because its worker process has died. Worker exit detail: End of file."
    assert remedy


def test_only_a_function_whose_states_are_large_returns_an_object_for_each_client(backend, stand):
    for function in ["train", "evaluate", "train", "evaluate"]:
        group = Group(0, (4, 5, 6), np.arange(3), {}, [None] * 3)
        list(backend.run(Call(function, 1, 0.1), [group]))
    assert stand.objects == [1 + 1, 1 + 1, 1 + 3, 1 + 1]  # the first time, nobody knows yet


def test_states_are_read_and_written_by_a_ready_actor_of_their_node(backend, stand):
    stand.map_states = SimpleNamespace(remote=lambda function, job: stand.put(f"the actor: {job}"))
    jobs = [("node", 1), ("another node", 2), ("", 3)]
    results = backend.map_states(lambda fetch, job: f"the server: {job}", jobs)
    assert results == ["the actor: 1", "the server: 2", "the server: 3"]


def test_a_small_broadcast_travels_with_the_call_and_a_large_one_is_an_object(backend):
    import ray

    half = np.arange(INLINE_BYTES // 8, dtype=np.float32)
    small = backend.broadcast({"theta": half})
    assert list(small) == ["theta"] and np.array_equal(small["theta"], half)
    large = backend.broadcast({"theta": half, "control": half, "scale": np.ones(1)})
    assert isinstance(large, ray.ObjectRef) and np.array_equal(ray.get(large)["control"], half)


class DiesInSetup:
    """A pretended client actor that dies while it is set up."""

    def __init__(self, failed: bool = False) -> None:
        import ray

        error = ray.exceptions.ActorDiedError()
        error._actor_init_failed = failed
        died = ray.put(error)
        self.prepare = SimpleNamespace(remote=lambda job: died)


class Clock:
    """A pretended module `time`, in which reading the clock takes `look` seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self.look = 0.1

    def monotonic(self) -> float:
        self.now += self.look
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def killed_actors(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The actors that were killed."""
    gone: list[Any] = []
    monkeypatch.setattr("ray.kill", gone.append)
    return gone


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (actor_exchange, fleet):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr("ray.kill", lambda actor: None)
    return clock


def groups(count: int, **options: Any) -> list[Group]:
    return [Group(i, (i,), np.arange(1), {}, [None], **options) for i in range(count)]


class DiesAtWork(Stand):
    """A pretended client actor that dies at the calls for whose number `dies` is true, counted over all such actors."""

    calls = 0

    def __init__(self, dies: Callable[[int], bool]) -> None:
        super().__init__()
        self.dies = dies

    def _returning(self, count: int) -> Any:
        import ray

        finish = super()._returning(count)

        def work(call: Call, groups: Sequence[Group], apart: bool) -> list[Any]:
            DiesAtWork.calls += 1
            if not self.dies(DiesAtWork.calls):
                return finish(call, groups, apart)
            dead = self.put(ray.exceptions.ActorDiedError())
            return [dead] * count

        return work


def test_groups_whose_actors_keep_dying_run_again_as_long_as_others_finish(killed_actors, monkeypatch):
    monkeypatch.setattr(DiesAtWork, "calls", 0)

    def start() -> DiesAtWork:
        return DiesAtWork(lambda number: number % 3 != 0)

    backend = backend_of([start()], start)
    outcomes = [outcome for _, outcome in backend.run(Call("evaluate", 1, 0.1), groups(12, deaths=3))]
    assert len(outcomes) == 12 and not any(isinstance(outcome, Failed) for outcome in outcomes)
    assert len(killed_actors) >= 12


def test_a_group_whose_actors_die_while_nothing_finishes_is_given_up(killed_actors, monkeypatch):
    monkeypatch.setattr(DiesAtWork, "calls", 0)

    def start() -> DiesAtWork:
        return DiesAtWork(lambda number: True)

    backend = backend_of([start()], start)
    [(group, failed)] = backend.run(Call("evaluate", 1, 0.1), groups(1, deaths=4))
    assert isinstance(failed, Failed) and failed.deaths == 4 and "process died" in failed.trace
    assert group.index == 0 and len(killed_actors) == 4


class Works(DiesAtWork):
    """A pretended client actor that does the work of a real one, in this process, unless it dies."""

    def __init__(self, worker: Worker, dies: Callable[[int], bool]) -> None:
        super().__init__(dies)
        self.actor = ClientActor()
        self.actor._worker = worker

    def results(self, call: Call, groups: Sequence[Group], apart: bool) -> Sequence[Any]:
        return self.actor.work(call, groups, apart)


def two_exchanges(backend: Callable[[Worker], Backend]) -> tuple[Any, ...]:
    """What two exchanges of clients in 13 groups leave behind; client 6 fails in the second."""

    def answer(clients, exchange):
        if exchange == 2 and 6 in clients.ids:
            raise ZeroDivisionError
        rows = rows_of(clients, 200).float() * 10 ** (ids_of(clients)[:, None] % 7).float()
        clients.state["rows"] = clients.state.get("rows", torch.zeros(200)) + rows
        return {"sum": Sum(rows), "mean": Mean(rows, weight=clients.num_samples), "rows": Each(rows)}

    skip = FailureSettings(on_client_failure="skip", retries=0, deaths=3)
    fed = Federation(sizes=range(3, 16), method=Probe(answer=answer), group_size=1, failures=skip, backend=backend)
    replies = []
    for exchange in (1, 2):
        cohort = fed.cohort()
        reply = cohort.run(fed.method.reply, exchange=exchange)
        replies.append({name: tensor.tolist() for name, tensor in reply.items()})
        fed.states.commit()

    states = []
    for client in cohort.ids:
        (ref,) = fed.states.refs(client)
        ((stack,),) = fed.runner.backend.map_states(lambda fetch, stack: fetch([stack]), [("", ref.stack)])
        states.append(stack.state_of(ref.slot)["rows"].tolist())
    return replies, list(cohort.failed), fed.ledger.entries, states, len(fed.states.stacks())


@pytest.mark.parametrize("dying", [(), (14,), (15, 17)])
def test_bundles_give_the_bits_of_single_groups_though_a_client_fails_in_one_and_an_actor_dies(
    killed_actors, monkeypatch, dying
):
    monkeypatch.setattr(DiesAtWork, "calls", 0)
    started: list[Works] = []

    def backend(worker: Worker) -> RayBackend:
        def start() -> Works:
            started.append(Works(worker, lambda number: number in dying))
            return started[-1]

        return backend_of([start()], start)

    assert two_exchanges(backend) == two_exchanges(Inline)
    pushed = [count - 1 for actor in started for count in actor.objects]
    # The first exchange shows how much groups keep. In the second, the first bundle is a half of the work at most.
    assert pushed[:13] == [1] * 13 and len(started) == 1 + len(dying)
    assert max(pushed[13:]) > 1


def test_actors_that_die_in_setup_do_not_end_a_run_in_which_another_works(stand, clock):
    started: list[DiesInSetup] = []

    def start() -> DiesInSetup:
        started.append(DiesInSetup())
        return started[-1]

    backend = backend_of([stand, start()], start)
    clock.look = 2.0
    for _ in range(75):
        assert len(list(backend.run(Call("evaluate", 1, 0.1), groups(3)))) == 3
    assert clock.now > PATIENCE and len(started) > MAX_SETUP_FAILURES


def test_if_every_actor_dies_in_setup_the_run_ends_after_ever_rarer_tries(clock):
    moments: list[float] = []

    def start() -> DiesInSetup:
        moments.append(clock.now)
        return DiesInSetup()

    warnings: list[str] = []
    backend = backend_of([start()], start, warnings.append)
    with pytest.raises(RaypflError, match=r"die while they are set up: \d+ since the last group was finished"):
        list(backend.run(Call("evaluate", 1, 0.1), groups(1)))
    pauses = np.diff(moments)
    assert clock.now > PATIENCE and len(pauses) < 50 and pauses[-1] > 5 * pauses[0]
    assert len(warnings) == 1


def test_an_error_in_setting_actors_up_ends_the_run_without_waiting(clock):
    backend = backend_of([DiesInSetup(True)], lambda: DiesInSetup(True))
    with pytest.raises(RaypflError, match=f"{MAX_SETUP_FAILURES} since the last group"):
        list(backend.run(Call("evaluate", 1, 0.1), groups(1)))
    assert clock.now < PATIENCE / 10


def test_an_actor_that_comes_up_after_others_have_died_does_the_work(stand, clock):
    later = iter([DiesInSetup() for _ in range(5)])
    backend = backend_of([DiesInSetup()], lambda: next(later, stand))
    assert len(list(backend.run(Call("evaluate", 1, 0.1), groups(3)))) == 3


# --- nodes that join and leave ----------------------------------------------------------------------------------------


class Waits:
    """A pretended client actor for which the cluster never has room."""

    def __init__(self) -> None:
        import ray

        never = ray.remote(num_cpus=10_000)(lambda: None)
        self.prepare = SimpleNamespace(remote=lambda job: never.remote())


def evaluated(backend: RayBackend, round: int, count: int = 6) -> list[Any]:
    return list(backend.run(Call("evaluate", round, 0.1), groups(count)))


def test_actors_follow_the_nodes_from_round_to_round_and_never_outnumber_the_groups(clock, killed_actors):
    nodes = [{"CPU": 2.0}]
    warnings: list[str] = []
    started: list[Any] = []

    def start() -> Any:
        started.append(Stand() if len(started) < 3 else Waits())
        return started[-1]

    pools = ActorPools([ActorPool()], {}, 6, lambda: nodes)
    backend = backend_of([Stand(), Stand()], start, warnings.append, pools)
    evaluated(backend, 1)
    assert not started
    nodes.append({"CPU": 3.0})
    clock.now += 10
    assert len(evaluated(backend, 2)) == 6
    assert len(started) == 3 and all(actor.objects for actor in started[:3])
    nodes.append({"CPU": 100.0})
    clock.now += 10
    evaluated(backend, 3)
    assert len(started) == 4 and len(backend.actors) == 6  # one waits for room that is gone before it has come
    del nodes[1:]
    clock.now += 10
    assert len(evaluated(backend, 4)) == 6
    assert killed_actors == [started[3]] and len(backend.actors) == 5

    changes = ((5, 2), (6, 5), (2, 6))
    assert warnings == [f"The cluster has changed: the run now has {n} client actors, not {m}." for n, m in changes]


def test_a_restarted_server_waits_for_its_first_actors_even_if_the_cluster_has_grown():
    nodes = [{"CPU": 2.0}]
    warnings: list[str] = []
    pools = ActorPools([ActorPool(max_actors=2, cpus_per_actor=2), ActorPool()], {}, 6, lambda: nodes)
    actors = []
    for pool, count in enumerate(pools.target_counts()):
        actors += [(pool, Stand()) for _ in range(count)]

    nodes.append({"CPU": 8.0})
    backend = RayBackend(actors, lambda options: Stand(), pools, b"", lambda: False, warnings.append)
    backend.wait_for_actors(20)
    assert not warnings


def test_actors_on_devices_of_several_types_are_refused_unless_the_settings_allow_them(killed_actors):
    homes = [Home("a", "A100"), Home("b", "H100")]
    backend = backend_of([Stand(home) for home in homes], Stand)
    with pytest.raises(RaypflError, match=r"compute on A100 and on H100.*ray\.accelerator.*ray\.mixed_devices=true"):
        evaluated(backend, 1)
    actors = [Stand(home) for home in homes]
    assert len(evaluated(backend_of(actors, Stand, mixed_devices=True), 1)) == 6
    assert all(actor.objects for actor in actors)


def test_an_actor_on_another_type_of_device_that_comes_later_is_left_out(clock):
    nodes = [{"CPU": 1.0}]
    warnings: list[str] = []
    late = Stand(Home("b", "H100"))
    pools = ActorPools([ActorPool()], {}, 6, lambda: nodes)
    backend = backend_of([Stand(Home("a", "A100"))], lambda: late, warnings.append, pools)
    evaluated(backend, 1)
    nodes.append({"CPU": 1.0})
    for round in (2, 3):
        clock.now += 10
        assert len(evaluated(backend, round)) == 6

    assert not late.objects and len(backend.actors) == 2
    assert warnings[1:] == ["A client actor that came up later is left out: it computes on H100, not A100."]


def test_more_actors_on_a_gpu_than_it_has_shares_for_are_reported():
    warnings: list[str] = []
    homes = [Home("a", "A100", ("0",)), Home("a", "A100", ("1",)), Home("a", "A100", ("0",)), Home("b", "A100", ("0",))]
    evaluated(backend_of([Stand(home) for home in homes], Stand, warnings.append, sharing(0.5, 2, actors=4)), 1)
    assert not warnings
    homes.append(Home("a", "A100", ("0",)))
    evaluated(backend_of([Stand(home) for home in homes], Stand, warnings.append, sharing(0.5, 2, actors=5)), 1)
    assert warnings == ["Ray has put 3 client actors on a GPU, each with 0.5 of it; it may be full."]


def test_actors_that_take_turns_on_a_gpu_are_reported_once():
    warnings: list[str] = []
    apart = [Home("a", "A100", ("0",), is_time_sliced=True), Home("b", "A100", ("0",), is_time_sliced=True)]
    evaluated(backend_of([Stand(home) for home in apart], Stand, warnings.append, sharing(0.5, 2, actors=2)), 1)
    assert not warnings
    homes = [*apart, *apart]
    evaluated(backend_of([Stand(home) for home in homes], Stand, warnings.append, sharing(0.5, 2, actors=4)), 1)
    assert len(warnings) == 1 and "nvidia-cuda-mps-control -d" in warnings[0]


# --- a GPU's memory ---------------------------------------------------------------------------------------------------


class Full(Stand):
    """A pretended client actor whose share of a GPU is too small for a group of more than `most` clients."""

    def __init__(self, most: int, in_setup: bool = False) -> None:
        super().__init__()
        self.most = most
        if in_setup:
            import ray

            error = ray.exceptions.RayTaskError("prepare", "", torch.OutOfMemoryError("data"))
            self.prepare = SimpleNamespace(remote=lambda job: self.put(error))

    def _returning(self, count: int) -> Any:
        work = super()._returning(count)

        def work_or_fail(call: Call, groups: Sequence[Group], apart: bool) -> list[Any]:
            if len(groups[0].clients) <= self.most:
                return work(call, groups, apart)
            failed = Failed(torch.OutOfMemoryError("CUDA out of memory."), "")
            return [self.put(BundleReply([failed], ())), *[self.put(None)] * (count - 1)]

        return work_or_fail


@pytest.mark.parametrize("in_setup", [False, True])
def test_if_memory_runs_out_fewer_actors_share_a_gpu_and_groups_stay_whole(killed_actors, in_setup):
    shares: list[float] = []

    def start(reserved: dict[str, float]) -> Full:
        shares.append(reserved["num_gpus"])
        return Full(5 if reserved["num_gpus"] > 0.3 else 2, in_setup=in_setup and reserved["num_gpus"] < 0.3)

    warnings: list[str] = []
    first = [(0, start({"num_gpus": 0.2})) for _ in range(5)]
    backend = RayBackend(first, start, sharing(0.2), b"", lambda: False, warnings.append)
    large = [Group(i, tuple(range(5)), np.arange(5), {}, [None] * 5, tries=1) for i in range(7)]
    outcomes = list(backend.run(Call("train", 1, 0.1), large))
    assert sorted(group.index for group, _ in outcomes) == list(range(7))
    assert all(not isinstance(outcome, Failed) for _, outcome in outcomes)
    assert shares == [0.2] * 5 + [0.25] * 4 + [0.3333] * 3
    assert warnings == [
        "A GPU's memory was too small for 5 client actors; from now on 4 share it.",
        "A GPU's memory was too small for 4 client actors; from now on 3 share it.",
    ]


def test_a_group_that_does_not_fit_a_whole_gpu_is_a_failure(killed_actors):
    backend = backend_of([Full(2)], lambda: Full(2), pools=sharing(0.5, actors=1))
    large = [Group(0, (0, 1, 2), np.arange(3), {}, [None] * 3, tries=1)]
    ((_, outcome),) = backend.run(Call("train", 1, 0.1), large)
    assert isinstance(outcome, Failed) and isinstance(outcome.error, torch.OutOfMemoryError)
