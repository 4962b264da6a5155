"""A GPU that fails, as after a device-side assert: its process can use it no more, and other processes can."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import raypfl
from raypfl.clients.gpu_errors import gpu_failure
from raypfl.clients.worker import WITHOUT_RECORDINGS, Worker
from raypfl.common.errors import ClientError, RaypflError
from raypfl.common.messages import Sum
from raypfl.engine.backends.inline import Inline
from raypfl.engine.backends.ray_backend import RayBackend
from raypfl.engine.events import Event, RunFinished
from raypfl.federation.exchange.backend import Backend
from raypfl.federation.settings import FailureSettings
from raypfl.learning.recording import CudaGraphs
from raypfl.learning.vectorised import Vectorised
from raypfl.methods import FedAvg
from raypfl.runs.records import write_description
from raypfl.runs.several.resume import resume_all
from tests.engine.test_ray_backend import DiesAtWork, Works, backend_of
from tests.federation.test_cohort import Probe, rows_of
from tests.support.federation import Federation
from tests.support.pretend_gpu import Record, pretend_gpu
from tests.support.runs import experiment

ASSERT = "CUDA error: device-side assert triggered"
OUT_OF_MEMORY = "CUDA out of memory"
MISALIGNED = "CUDA error: misaligned address"
SKIP = FailureSettings(on_client_failure="skip", retries=0, deaths=3)


class Processes:
    """Pretended processes of client actors on GPUs, one of which is at work at a time.

    Attributes
    ----------
    failed : whether the GPU of the process at work has failed.
    started : the actors that were started.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.failed = False
        self.started: list[Works] = []
        self.warnings: list[str] = []
        monkeypatch.setattr(DiesAtWork, "calls", 0)
        monkeypatch.setattr("ray.kill", lambda actor: None)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "synchronize", self.compute)

    def compute(self) -> None:
        """Compute something on the GPU."""
        if self.failed:
            raise torch.AcceleratorError(f"{ASSERT}\nCompile with TORCH_USE_CUDA_DSA")

    def backend(self, worker: Worker) -> RayBackend:
        def start() -> Works:
            self.failed = False
            self.started.append(Works(worker, lambda number: False))
            return self.started[-1]

        return backend_of([start()], start, self.warnings.append)


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Processes:
    return Processes(monkeypatch)


def two_exchanges(
    backend: Callable[[Worker], Backend], compute: Callable[[tuple[int, ...], int], None], failures: FailureSettings
) -> tuple[Any, ...]:
    """What two exchanges of 13 clients, each a group, return, and who failed; all of them `compute` on a GPU."""

    def answer(clients, exchange):
        compute(clients.ids, exchange)
        return {"sum": Sum(rows_of(clients, 20).float())}

    fed = Federation(sizes=range(3, 16), method=Probe(answer=answer), group_size=1, failures=failures, backend=backend)
    sums = []
    for exchange in (1, 2):
        cohort = fed.cohort()
        sums.append(cohort.run(fed.method.reply, exchange=exchange)["sum"].tolist())
    return sums, dict(cohort.failed)


@pytest.mark.parametrize("is_late", [False, True])
def test_an_actor_whose_gpu_fails_is_replaced_and_its_bundles_run_again_to_the_same_bits(
    ray_cluster, processes, is_late
):
    """GPUs report an error late: then the bundle's next client seems to fail."""
    failures = iter([True])

    def compute(ids: tuple[int, ...], exchange: int) -> None:
        fails = exchange == 2 and 6 in ids and next(failures, False)
        if fails:
            processes.failed = True
        if not (fails and is_late):
            processes.compute()

    expected = two_exchanges(Inline, lambda ids, exchange: None, SKIP)
    assert two_exchanges(processes.backend, compute, SKIP) == expected
    assert len(processes.started) == 2 and max(processes.started[0].objects) > 2
    assert processes.warnings == [
        f"The GPU failed in a client actor's process ({ASSERT}); another actor takes its place, and its groups run "
        "again."
    ]


def test_a_client_that_makes_gpus_fail_is_skipped_alone_with_the_error_of_the_gpu(ray_cluster, processes):
    def compute(ids: tuple[int, ...], exchange: int) -> None:
        processes.failed |= exchange == 2 and 6 in ids
        processes.compute()

    _, failed = two_exchanges(processes.backend, compute, SKIP)
    assert list(failed) == [6]
    assert "Client 6 failed 3 times in a row in round 0:" in failed[6] and ASSERT in failed[6]
    assert "process died" not in failed[6] and "compute(clients.ids" in failed[6]


def test_a_run_whose_gpus_keep_failing_ends_with_the_error_of_the_gpu(ray_cluster, processes):
    def compute(ids: tuple[int, ...], exchange: int) -> None:
        processes.failed |= 6 in ids
        processes.compute()

    with pytest.raises(ClientError, match=rf"^Client 6 failed 3 times in a row in round 0:\n(?s:.*){ASSERT}") as error:
        two_exchanges(processes.backend, compute, FailureSettings(retries=0, deaths=3))
    assert error.value.clients == (6,)


@pytest.mark.parametrize("message", ["", "CUDA error: out of memory", ASSERT])
def test_a_gpu_has_failed_only_if_it_refuses_everything(monkeypatch, message):
    def synchronize() -> None:
        if message:
            raise torch.AcceleratorError(message)

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    assert gpu_failure() == ""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert gpu_failure() == (message if message == ASSERT else "")


def test_a_group_for_which_graphs_leave_too_little_memory_runs_again_without_them_to_the_same_bits(monkeypatch):
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)

    def trained(recorder: CudaGraphs | None) -> tuple[Any, list[str]]:
        def answer(clients):
            executor = fed.context.executor
            if executor.recorder is not None:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            return {"sum": Sum(clients.sgd(clients.loss, clients.initial, steps=2))}

        fed = Federation(method=Probe(answer=answer))
        fed.context.executor = Vectorised(fed.model, recorder=recorder)
        return fed.cohort().run(fed.method.reply)["sum"].tolist(), fed.warnings

    sums, texts = trained(CudaGraphs())
    assert (sums, []) == trained(None)
    assert texts == [WITHOUT_RECORDINGS]


# --- in one process ---------------------------------------------------------------------------------------------------


class Fails(FedAvg):
    """The pretended GPU fails in round 3, at a client or on the server; `tried` has the groups of that round."""

    gpu: ClassVar[Record]
    where: ClassVar[str]
    tried: ClassVar[list[tuple[int, ...]]]

    def round(self, server, cohort):
        super().round(server, cohort)
        if cohort.round == 3 and self.where == "server":
            self.gpu.failure = MISALIGNED
            server["theta"] = server["theta"] * 2

    def train(self, clients, theta):
        if clients.round == 3:
            self.tried.append(tuple(clients.ids))
            if self.where == "client":
                self.gpu.failure = ASSERT
        return super().train(clients, theta)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Record]:
    with pretend_gpu() as record:
        monkeypatch.setattr(Fails, "gpu", record, raising=False)
        monkeypatch.setattr(Fails, "tried", [], raising=False)
        yield record


class FailingNetwork(nn.Sequential):
    """Makes the GPU fail, or runs out of its memory."""

    gpu: ClassVar[Record]
    failure: ClassVar[str]

    def __init__(self, input_shape, num_classes):
        super().__init__(nn.Flatten(), nn.Linear(math.prod(input_shape), num_classes))

    def forward(self, x):
        if self.failure == OUT_OF_MEMORY:
            raise torch.OutOfMemoryError(f"{OUT_OF_MEMORY}. Tried to allocate 2.00 GiB")
        self.gpu.failure = self.failure
        return super().forward(x)


@pytest.mark.parametrize(
    ("failure", "advice"),
    [
        (OUT_OF_MEMORY, r"^The GPU's memory is too small for .*batch_size.* CUDA out of memory. Tried to allocate 2"),
        (ASSERT, rf"^Before the run began, the GPU failed: {ASSERT}. .*out of range.*CUDA_LAUNCH_BLOCKING=1"),
    ],
)
def test_a_gpu_that_is_too_small_or_fails_before_a_run_is_told_from_a_network_that_does_not_fit(
    tmp_path, gpu, monkeypatch, failure, advice
):
    monkeypatch.setattr(FailingNetwork, "gpu", gpu, raising=False)
    monkeypatch.setattr(FailingNetwork, "failure", failure, raising=False)
    described = experiment(tmp_path, model=f"{__name__}:FailingNetwork", ray__gpus_per_actor=1)
    with pytest.raises(RaypflError, match=advice):
        raypfl.run(described)


def test_a_gpu_that_fails_ends_all_runs_of_a_process(tmp_path, gpu, monkeypatch):
    monkeypatch.setattr(Fails, "where", "client", raising=False)
    runs = {}
    for seed in (0, 1):
        described = experiment(tmp_path, method=f"{__name__}:Fails", ray__gpus_per_actor=1, seed=seed)
        runs[tmp_path / f"run-{seed}"] = described
        write_description(tmp_path / f"run-{seed}", described)
    outcomes = {}
    for ended in resume_all(runs, {folder: [] for folder in runs}):
        outcomes |= ended
    assert list(outcomes) == [tmp_path / "run-0"]
    assert str(outcomes[tmp_path / "run-0"].error).startswith("The GPU failed in round 3")


@pytest.mark.parametrize(("where", "gpus_for_server"), [("client", 0), ("client", 0.5), ("server", 0.5)])
def test_a_run_in_one_process_ends_when_its_gpu_fails_and_a_resume_goes_on(
    tmp_path, gpu, monkeypatch, where, gpus_for_server
):
    monkeypatch.setattr(Fails, "where", where, raising=False)
    settings = {
        "method": f"{__name__}:Fails",
        "ray__gpus_per_actor": 0.5,
        "ray__gpus_for_server": gpus_for_server,
        "failures__on_client_failure": "skip",
        "rounds": 4,
        # Each operation on the pretended GPU takes about ten times as long as on a CPU.
        "model__hidden": "[4]",
        "partition__clients": 6,
        "cohort__size": 4,
        "training__steps": 1,
        "evaluation__every": 0,
        "evaluation__protocols": "[local]",
    }
    described = experiment(tmp_path, **settings)
    events: list[Event] = []
    with pytest.raises(RaypflError) as raised:
        raypfl.run(described, run_dir=tmp_path / "run", listeners=[events.append])

    error = str(raised.value)
    if where == "client":
        (group,) = Fails.tried
        assert error.startswith(f"The GPU failed in round 3, in the work of clients {group[0]}, {group[1]}:\n")
        assert "A device-side assert often means a label or a token that is out of range." in error
    else:
        assert error.startswith("Fails.round (test_gpu_failures.py, line ")
        assert f"failed in round 3: torch.AcceleratorError: {MISALIGNED}" in error
        assert 'server["theta"] = server["theta"] * 2' in error and "device-side" not in error
    assert "CUDA_LAUNCH_BLOCKING=1" in error and f"`raypfl resume {tmp_path / 'run'}` continues" in error

    finished = events[-1]
    assert isinstance(finished, RunFinished) and finished.status == "failed" and finished.round == 2
    assert bool(finished.weights_hash) == (gpus_for_server == 0)

    gpu.failure = ""
    monkeypatch.setattr(Fails, "where", "nowhere")
    resumed = raypfl.resume(tmp_path / "run")
    assert resumed.status == "finished" and sum(resumed.rounds["failed"].to_pylist()) == 0
    assert resumed.weights_hash == raypfl.run(described).weights_hash
