"""CUDA graphs, played on a CPU: they give the bits of steps that are taken one by one, in every round."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from math import inf
from typing import Any

import pytest
import torch
from torch import Tensor

from raypfl.common import device_rng
from raypfl.common.messages import per_client, unmarked
from raypfl.learning.optimizers import StepDraws
from raypfl.learning.recording import CudaGraphs
from raypfl.learning.recording.cuda_graphs import CannotRecord
from raypfl.learning.vectorised import Vectorised
from tests.learning.test_gpu_steps import CASES
from tests.learning.test_recorded_steps import trained
from tests.support.federation import FP32, Federation
from tests.support.pretend_gpu import pretend_gpu
from tests.support.pretend_graphs import PretendedGraph, Tape, address_of


class TapedGraphs(CudaGraphs):
    """Graphs on a CPU, which count what they record and what they replay."""

    def __init__(self) -> None:
        super().__init__()
        self.recordings = 0
        self.replays = 0

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        self.recordings += 1
        tape = Tape()
        with tape:
            work()
        tape.undo()

        def replay() -> None:
            self.replays += 1
            tape.replay()

        replay()
        return replay


class WatchedGraphs(TapedGraphs):
    """Graphs that know whether the steps that they recorded still exist, and with them their tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[weakref.ref[Callable[[], None]]] = []

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        self.steps.append(weakref.ref(work))
        return super().record(work)


class Broken(CudaGraphs):
    """Cannot record anything."""

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        raise CannotRecord("operation not permitted when stream is capturing")


def with_graphs(graphs: CudaGraphs | None, **options: Any) -> Federation:
    fed = Federation(**{"training": FP32} | options)
    fed.context.executor = Vectorised(fed.model, recorder=graphs)
    return fed


def over_rounds(
    case: str,
    graphs: CudaGraphs | None,
    sizes: tuple[int, ...] = (30, 15, 60, 33),
    device: str = "cpu",
    rounds: int = 4,
) -> list[Tensor]:
    """Return the models of some rounds, each of which begins at other models, and visits samples in another order."""
    fed = with_graphs(graphs, **CASES[case], sizes=sizes, device=device)
    models = []
    for round in range(rounds):
        clients = fed.clients(round=round)
        anchor = fed.model.init(10 + round)
        start = torch.stack([fed.model.init(4 * round + k) for k in range(len(clients))])

        def pull(p: Tensor, batch: Any, anchor: Tensor) -> Tensor:
            return (p - anchor).square().sum()

        penalty = {"penalty": pull, "anchor": fed.model.parameters(anchor)}
        models.append(unmarked(clients.sgd(clients.loss, per_client(start), epochs=2, **penalty)))
    return models


@pytest.mark.parametrize("case", CASES)
def test_a_graph_gives_the_bits_of_steps_taken_one_by_one_in_every_round(case, monkeypatch):
    monkeypatch.setattr(StepDraws, "normal", lambda draws: device_rng.normal(draws.keys, draws.like))  # as on a GPU
    graphs = TapedGraphs()
    for recorded, expected in zip(over_rounds(case, graphs), over_rounds(case, None), strict=True):
        assert torch.equal(recorded, expected)
    # Three phases; steps with augmentation or noise have no signature, and are recorded in each round anew.
    assert graphs.recordings == (3 * 4 if case in ("augmentation", "noise") else 3)


def test_tensors_that_steps_made_before_they_were_recorded_live_as_long_as_the_graph():
    graphs = WatchedGraphs()
    over_rounds("plain", graphs)
    assert len(graphs.steps) == 3
    assert all(steps() is not None for steps in graphs.steps)


def test_graphs_of_a_run_share_their_copies_of_samples_and_models():
    graphs = TapedGraphs()
    over_rounds("plain", graphs)
    inputs = [graph.inputs.tensors for graph in graphs._graphs.values()]
    assert len(inputs) == 3
    for name in ("x", "theta"):
        assert len({address_of(tensors[name]) for tensors in inputs}) == 1


@pytest.mark.parametrize("case", ["plain", "augmentation"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_steps_with_a_number_in_the_hosts_memory_which_a_graph_would_not_read_again_get_none(device, case):
    def train(fed: Federation, round: int) -> Tensor:
        clients = fed.clients(round=round)
        factor = torch.tensor(1.0 + round, device=device)
        return unmarked(clients.sgd(lambda p, batch: factor * clients.loss(p, batch), clients.initial, steps=20))

    graphs = TapedGraphs()
    with pretend_gpu():
        recorded = with_graphs(graphs, device="cuda", sizes=(12, 12), **CASES[case])
        plain = with_graphs(None, device="cuda", sizes=(12, 12), **CASES[case])
        for round in range(2):
            assert torch.equal(train(recorded, round), train(plain, round))
    assert graphs.recordings == (0 if device == "cpu" else 1 if case == "plain" else 2)


def test_a_longer_round_gets_a_graph_with_more_room_and_a_short_one_none():
    graphs = TapedGraphs()
    recorded = with_graphs(graphs, sizes=(12, 12, 12))
    plain = with_graphs(None, sizes=(12, 12, 12))
    for steps, recordings in [(6, 1), (2, 1), (4, 1), (9, 2), (6, 2)]:
        models = []
        for fed in (recorded, plain):
            clients = fed.clients()
            models.append(unmarked(clients.sgd(clients.loss, clients.initial, steps=steps)))
        assert torch.equal(*models)
        assert graphs.recordings == recordings


def test_cohorts_with_more_samples_get_a_graph_with_more_room():
    graphs = TapedGraphs()
    sizes = (12, 12, 12, 16, 40, 40)
    recorded = with_graphs(graphs, sizes=sizes)
    plain = with_graphs(None, sizes=sizes)
    for cohort, recordings in [((0, 1), 1), ((1, 2), 1), ((0, 3), 1), ((4, 5), 2), ((0, 1), 2)]:
        models = []
        for fed in (recorded, plain):
            clients = fed.clients(cohort)
            models.append(unmarked(clients.sgd(clients.loss, clients.initial, steps=6)))
        assert torch.equal(*models)
        assert graphs.recordings == recordings


def test_a_step_that_cannot_be_recorded_is_taken_one_by_one_with_the_reason():
    for case in ("plain", "augmentation"):
        with pytest.warns(UserWarning, match="cannot be recorded.*not permitted when stream is capturing$"):
            models, executor = trained(case, Broken())
        assert torch.equal(models, trained(case, None)[0])
    assert executor.recorder is None


FAILURES = {
    "Stream": RuntimeError("CUDA error: out of memory"),
    "capture_begin": torch.AcceleratorError("CUDA error: operation not permitted"),
    "the third operation": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    "the last operation": ValueError("not while a graph is captured"),
    "capture_end": torch.AcceleratorError("CUDA error: operation failed due to a previous error during capture"),
    "replay": torch.AcceleratorError("CUDA error: out of memory"),
}


class FailingGraphs:
    """Lets the pretended GPU fail where graphs are captured, so many times.

    Attributes
    ----------
    ended : what the allocator was told in place of graphs that could not: functions and pools.
    emptied : how often its cache was emptied.
    """

    def __init__(self, patches: pytest.MonkeyPatch, where: str, times: float = inf):
        self.where = where
        self.remaining = times
        self.ended: list[tuple[str, tuple[int, int]]] = []
        self.emptied = 0
        failing = self

        class FailingTape(Tape):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                if len(self.operations) == 2:
                    failing.fail("the third operation")
                return super().__torch_dispatch__(func, types, args, kwargs)

        class FailingGraph(PretendedGraph):
            def __init__(self):
                super().__init__()
                self._tape = FailingTape()

            def capture_begin(self, pool, capture_error_mode):
                failing.fail("capture_begin")
                super().capture_begin(pool, capture_error_mode)

            def capture_end(self):
                is_open = PretendedGraph.captures
                super().capture_end()
                if is_open and failing.where == "the last operation":
                    failing.fail("the last operation")
                failing.fail("capture_end")

            def replay(self):
                failing.fail("replay")
                super().replay()

        def empty_cache() -> None:
            self.emptied += 1

        patches.setattr(torch.cuda, "CUDAGraph", FailingGraph)
        patches.setattr(torch.cuda, "empty_cache", empty_cache)
        stream = torch.cuda.Stream
        patches.setattr(torch.cuda, "Stream", lambda: self.fail("Stream") or stream())
        for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
            patches.setattr(
                torch._C, name, lambda device, pool, name=name: self.ended.append((name, pool)), raising=False
            )

    def fail(self, where: str) -> None:
        if where == self.where and self.remaining:
            self.remaining -= 1
            raise FAILURES[where]


@pytest.mark.parametrize("where", FAILURES)
@pytest.mark.parametrize("case", ["plain", "augmentation"])
def test_whatever_fails_while_a_step_is_recorded_it_is_taken_once_with_one_warning(case, where):
    # Undone before the pretended GPU is: its functions would stay otherwise.
    with pretend_gpu(), pytest.MonkeyPatch.context() as patches, pytest.warns(UserWarning) as warned:
        failing = FailingGraphs(patches, where)
        (recorded,) = over_rounds(case, CudaGraphs(), (32, 32), "cuda", rounds=1)
    (expected,) = over_rounds(case, None, (32, 32), rounds=1)
    assert torch.equal(recorded, expected)

    (warning,) = warned
    assert str(warning.message).startswith("A training step cannot be recorded as a CUDA graph, so")
    assert str(warning.message).endswith(f"The reason: {FAILURES[where]}")
    assert PretendedGraph.captures == 0
    assert gc.isenabled()
    if where == "capture_end":
        functions = [function for function, _ in failing.ended]
        assert functions == ["_cuda_endAllocateToPool", "_cuda_releasePool"] * (len(functions) // 2) != []


def test_a_capture_for_which_the_cache_left_no_memory_is_tried_again_without_it():
    with pretend_gpu(), pytest.MonkeyPatch.context() as patches:
        failing = FailingGraphs(patches, "the third operation", times=1)
        (recorded,) = over_rounds("plain", CudaGraphs(), (32, 32), "cuda", rounds=1)
    assert failing.emptied == 1
    assert torch.equal(recorded, over_rounds("plain", None, (32, 32), rounds=1)[0])


@pytest.mark.parametrize("case", ["plain", "augmentation"])
def test_on_a_gpu_steps_are_recorded_with_the_bits_of_plain_ones(case):
    class CountedGraphs(CudaGraphs):
        recordings = 0

        def record(self, work: Callable[[], None]) -> Callable[[], None]:
            self.recordings += 1
            return super().record(work)

    graphs = CountedGraphs()
    with pretend_gpu():
        recorded = over_rounds(case, graphs, (32, 32), "cuda", rounds=2)
    expected = over_rounds(case, None, (32, 32), rounds=2)
    assert all(map(torch.equal, recorded, expected))
    assert graphs.recordings == (2 if case == "augmentation" else 1)
