"""CUDA graphs, played on a CPU: they give the bits of steps that are taken one by one, in every round."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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


class Tape(TorchDispatchMode):
    """Notes operations on memory, without the Python around them, as CUDA does."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Callable[[], None]] = []
        self.before: dict[int, tuple[Tensor, Tensor]] = {}
        self.made: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = _tensors((args, kwargs))
        for tensor in inputs:
            address = _address(tensor)
            if address not in self.before and address not in self.made:
                whole = tensor.detach().as_strided(
                    (tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0
                )
                self.before[address] = (whole, whole.clone())

        result = func(*args, **kwargs)
        used = {_address(tensor) for tensor in inputs}
        new = [(i, tensor) for i, tensor in enumerate(_tensors(result)) if _address(tensor) not in used]
        self.made.update(_address(tensor) for _, tensor in new)

        def again() -> None:
            outputs = _tensors(func(*args, **kwargs))
            for i, tensor in new:
                tensor.copy_(outputs[i])

        self.operations.append(again)
        return result


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
        # What is recorded has no effect.
        for storage, copy in tape.before.values():
            storage.copy_(copy)

        def replay() -> None:
            self.replays += 1
            with torch.no_grad():
                for operation in tape.operations:
                    operation()

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


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def with_graphs(graphs: CudaGraphs | None, **options: Any) -> Federation:
    fed = Federation(**{"training": FP32} | options)
    fed.context.executor = Vectorised(fed.model, recorder=graphs)
    return fed


def over_rounds(case: str, graphs: CudaGraphs | None, sizes: tuple[int, ...] = (30, 15, 60, 33)) -> list[Tensor]:
    """Return the models of four rounds, each of which begins at other models, and visits samples in another order."""
    fed = with_graphs(graphs, **CASES[case], sizes=sizes)
    models = []
    for round in range(4):
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
        assert len({_address(tensors[name]) for tensors in inputs}) == 1


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_steps_with_a_number_in_the_hosts_memory_which_a_graph_would_not_read_again_get_none(device):
    def train(fed: Federation, round: int) -> Tensor:
        clients = fed.clients(round=round)
        factor = torch.tensor(1.0 + round, device=device)
        return unmarked(clients.sgd(lambda p, batch: factor * clients.loss(p, batch), clients.initial, steps=20))

    graphs = TapedGraphs()
    with pretend_gpu():
        recorded = with_graphs(graphs, device="cuda", sizes=(12, 12))
        plain = with_graphs(None, device="cuda", sizes=(12, 12))
        for round in range(3):
            assert torch.equal(train(recorded, round), train(plain, round))
    assert graphs.recordings == (1 if device == "cuda" else 0)


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


@pytest.mark.parametrize("broken", ["capture_begin", "capture_end"])
def test_a_recording_that_fails_at_its_beginning_or_its_end_is_done_without(broken, monkeypatch):
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

    stream = SimpleNamespace(wait_stream=lambda other: None)
    calls = dict.fromkeys(["capture_begin", "capture_end", "pool", "replay"], lambda *_, **__: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(**calls | {broken: refuse}))

    # What is captured has no effect, and the graph's inputs are copies.
    with pytest.warns(UserWarning, match="cannot be recorded.*during capture$"):
        recorded = over_rounds("plain", CudaGraphs())
    for models, expected in zip(recorded, over_rounds("plain", None), strict=True):
        assert torch.equal(models, expected)
