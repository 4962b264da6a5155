"""Sharing a GPU: what `ray.gpus_per_actor=auto` measures, what each process may use, and that the driver opens none."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import ray
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

import raypfl
from raypfl.common.errors import ConfigError, RaypflError
from raypfl.data import load_federated
from raypfl.engine.backends.actors.actor_pools import share_of
from raypfl.engine.backends.cluster import client_resources
from raypfl.engine.backends.session import SpareServer
from raypfl.engine.backends.shipment import Shipment
from raypfl.engine.building.devices import CONTEXT_BYTES, limit_memory, same_bits_on_gpus
from raypfl.engine.events import Progress
from raypfl.engine.prepared import Prepared
from raypfl.experiment.settings import RaySettings
from raypfl.methods import Ditto
from raypfl.runs import driver, on_ray, preparing
from raypfl.runs.choices import gpu_share, pretraining
from raypfl.runs.choices.autotune import Candidate
from raypfl.runs.choices.gpu_share import GpuMeasurement, actors_on, bytes_needed, fit_line, with_gpu_shares
from raypfl.runs.several.worker import PlannedRun, carry_out
from tests.support.pretend_gpu import GPU, pretend_gpu
from tests.support.pretend_graphs import PretendedGraph
from tests.support.runs import experiment

CPU = torch.device("cpu")
GIB = 2**30


def test_a_line_through_two_groups_gives_the_memory_of_any_other():
    assert fit_line([1, 8], [110, 180]) == (100, 10)
    assert fit_line([1], [110]) == (110, 0)
    assert fit_line([1, 8], [120, 110]) == (120, 0)  # what the first step alone needs is not taken off larger groups


def test_as_many_actors_share_a_gpu_as_need_nine_tenths_of_its_memory():
    assert actors_on(GpuMeasurement(100, 10), data=0, data_share=0.25, most=99) == 9
    assert actors_on(GpuMeasurement(100, 10), data=0, data_share=0.25, most=4) == 4
    assert actors_on(GpuMeasurement(100, 95), data=0, data_share=0.25, most=99) == 1
    # Each of six has its copy of the data, 24 bytes together; from the seventh on nobody has, and nine fit again.
    assert actors_on(GpuMeasurement(100, 10), data=4, data_share=0.25, most=6) == 6
    assert actors_on(GpuMeasurement(100, 10), data=4, data_share=0.25, most=99) == 9
    assert actors_on(GpuMeasurement(100, 10), data=4, data_share=0.5, most=8) == 6


@given(st.integers(1, 500))
def test_the_share_requested_from_ray_lets_that_many_actors_on_a_gpu(actors: int):
    share = share_of(actors)
    assert share * actors <= 1 and round(share * 10_000) == pytest.approx(share * 10_000)
    assert share > 1 / (actors + 1) or actors > 99


GROUP_SIZES: list[int] = []


class Recording(Ditto):
    """Ditto that records the size of each group; groups whose models are tested count a hundredfold."""

    def train(self, clients, theta):
        GROUP_SIZES.append(len(clients))
        return super().train(clients, theta)

    def personal_model(self, clients, server):
        GROUP_SIZES.append(100 * len(clients))
        return super().personal_model(clients, server)


class Counting:
    """A pretended GPU memory: training takes 100 bytes and 10 a client, evaluation 50 bytes a client."""

    def __init__(self) -> None:
        self.groups: list[list[int]] = []

    def peak(self, work: Callable[[], object]) -> float:
        GROUP_SIZES.clear()
        work()
        self.groups.append(list(GROUP_SIZES))
        (group,) = GROUP_SIZES
        return group // 100 * 50 if group >= 100 else 100 + 10 * group

    def context(self) -> float:
        return 7


def bytes_of_largest_group(tmp_path: Path, memory: Counting, **changes) -> float:
    changes = {"engine__executor": "vectorised", "cohort__size": 10, "partition__clients": 40} | changes
    settings = experiment(tmp_path, method=f"{__name__}:Recording", **changes)
    return bytes_needed(Prepared(settings, load_federated(settings.data, settings.partition, seed=0), CPU), memory)


def test_groups_of_one_and_of_eight_clients_tell_the_memory_of_the_runs_groups(tmp_path: Path):
    memory = Counting()
    assert bytes_of_largest_group(tmp_path, memory, engine__group_size=10) == 7 + 50 * 10  # the evaluation needs more
    assert memory.groups == [[1], [8], [100], [800]]
    assert bytes_of_largest_group(tmp_path, memory, engine__group_size=3) == 7 + 50 * 3
    assert memory.groups[4:] == [[1], [3], [100], [300]]
    assert bytes_of_largest_group(tmp_path, memory, engine__group_size=1) == 7 + 110
    assert memory.groups[8:] == [[1], [100]]
    assert (
        bytes_of_largest_group(tmp_path, memory, engine__group_size=10, privacy__secure_aggregation=True) == 7 + 50 * 10
    )


@pytest.mark.parametrize("method", ["pfedme", "apfl", "fednh", "feddf", "creff", "partial", "fedavg-ft"])
def test_methods_with_further_networks_and_exchanges_can_be_measured(tmp_path: Path, method: str):
    settings = experiment(tmp_path, method=method, engine__executor="vectorised")
    peaks: list[float] = []

    class AlwaysOneByte(Counting):
        def peak(self, work):
            work()
            peaks.append(1.0)
            return 1.0

    data = load_federated(settings.data, settings.partition, seed=0)
    assert bytes_needed(Prepared(settings, data, CPU), AlwaysOneByte()) == 8 and len(peaks) == 4


def test_the_graphs_of_steps_are_measured_with_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    captured: list[int] = []
    end = PretendedGraph.capture_end
    monkeypatch.setattr(PretendedGraph, "capture_end", lambda graph: captured.append(len(memory.groups)) or end(graph))
    method = f"{__name__}:Recording"
    settings = experiment(tmp_path, method=method, engine__executor="vectorised", ray__gpus_per_actor=1)
    memory = Counting()
    with pretend_gpu():
        bytes_needed(Prepared(settings, load_federated(settings.data, settings.partition, seed=0), GPU), memory)
    assert len(memory.groups) == 4 and set(captured) == {0, 1}  # of two trainings and two evaluations


class TooLarge(Ditto):
    """A method that needs more memory than there is."""

    def train(self, clients, theta):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB.")


def test_a_gpu_too_small_for_the_measured_step_gets_one_actor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gpu_share, "CudaMemory", lambda device: Counting())
    settings = experiment(tmp_path, method=f"{__name__}:TooLarge")
    data = load_federated(settings.data, settings.partition, seed=0)
    with pretend_gpu():
        assert gpu_share._probe(Prepared(settings, data, "cuda")) == GpuMeasurement(2**36, 2**36)


# --- on a cluster -----------------------------------------------------------------------------------------------------


def ray_with_nodes(*nodes: dict[str, float]) -> SimpleNamespace:
    """A pretended Ray with these nodes; its tasks run in this process."""
    tasks = {"remote": lambda **options: lambda task: SimpleNamespace(remote=task), "get": lambda result: result}
    alive = [{"Alive": True, "Resources": resources} for resources in nodes]
    return SimpleNamespace(nodes=lambda: alive, exceptions=ray.exceptions, **tasks)


@pytest.fixture(autouse=True)
def _not_shipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is sent over Ray stays as it is."""
    monkeypatch.setattr(Shipment, "pack", lambda *contents: SimpleNamespace(unpack=lambda: contents))


def test_memory_processors_and_groups_limit_the_actors_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gpu_share, "_probe", lambda prepared: GpuMeasurement(80 * GIB, 8.9 * GIB))
    settings = experiment(tmp_path, ray__gpus_per_actor="auto", engine__group_size=1, engine__backend="ray")
    data = load_federated(settings.data, settings.partition, seed=0)
    messages: list[str] = []

    def share(cpus: float, gpus: float, **changes) -> float:
        changed = settings.override([f"{name.replace('__', '.')}={value}" for name, value in changes.items()])
        ray = ray_with_nodes({"CPU": 64.0}, {"CPU": cpus, "GPU": gpus})
        return with_gpu_shares(
            ray, Prepared(changed, data), lambda event: messages.append(event.text)
        ).ray.gpus_per_actor

    assert share(64, 2, cohort__size=12) == share_of(8)  # in 72 GiB
    assert messages[-1] == "8 client actors a GPU: each needs 8.90 of 80 GiB"
    assert share(6, 2, cohort__size=12) == share_of(3)
    assert share(6, 2, cohort__size=12, ray__cpus_per_actor=0.5) == share_of(6)
    assert share(1, 2, cohort__size=12) == 1.0
    assert share(64, 2, cohort__size=5) == share_of(5)

    # A number in the settings stays: nothing is measured, so a cluster without nodes will do.
    with_share = settings.override(["ray.gpus_per_actor=0.3"])
    assert with_gpu_shares(ray_with_nodes(), Prepared(with_share, data), print).ray.gpus_per_actor == 0.3


def test_an_error_in_the_measured_step_is_reported_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(prepared: Prepared) -> None:
        raise ray.exceptions.RayTaskError("f", "trace", ValueError("no such layer."))

    monkeypatch.setattr(gpu_share, "_probe", fail)
    settings = experiment(tmp_path, ray__gpus_per_actor="auto", engine__backend="ray")
    data = load_federated(settings.data, settings.partition, seed=0)
    with pytest.raises(RaypflError, match=r"could not be measured .*no such layer\. Give a number instead"):
        with_gpu_shares(ray_with_nodes({"CPU": 1.0, "GPU": 1.0}), Prepared(settings, data), lambda event: None)


# --- the driver opens no GPU ------------------------------------------------------------------------------------------


class Reached(RaypflError):
    """The driver is about to connect to Ray."""


@pytest.mark.parametrize("start", [raypfl.run, lambda asks: driver.check([asks])])
def test_the_driver_of_a_run_on_gpus_opens_none_before_its_actors_do(tmp_path: Path, monkeypatch, start):
    def fail(*arguments: object) -> None:
        raise AssertionError("The driver opens CUDA, outside of what Ray has reserved.")

    def connect(*arguments: object) -> None:
        raise Reached

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "_lazy_init", fail)
    monkeypatch.setattr(on_ray, "connected", connect)
    asks = experiment(tmp_path, engine__backend="ray", ray__gpus_per_actor=0.5, ray__gpus_for_server=0.5)
    with contextlib.nullcontext() if start is not raypfl.run else pytest.raises(Reached):
        start(asks)


@pytest.fixture
def reserved(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, object]]:
    """A pretended cluster of one GPU; returns what processes on it reserve, one after the other."""
    requests: list[dict[str, object]] = []
    cluster = ray_with_nodes({"CPU": 4.0, "GPU": 1.0})

    def remote(**options: object) -> Callable[..., object]:
        requests.append(options)
        return lambda task: SimpleNamespace(remote=task)

    cluster.remote = remote
    for module in (preparing, pretraining):
        monkeypatch.setattr(module, "connected", lambda settings, emit: contextlib.nullcontext(cluster))
        # The session of all tests may have a server, which is on another cluster.
        monkeypatch.setattr(module, "spare_server", SpareServer())
    return requests


def test_fastest_is_timed_on_the_gpu_that_an_actor_will_have(tmp_path: Path, monkeypatch, reserved):
    devices: list[str] = []

    def choose(prepared: Prepared) -> tuple[Candidate, str]:
        devices.append(prepared.device.type)
        return Candidate("vectorised", False), "timed"

    monkeypatch.setattr(preparing, "choose", choose)
    on_cluster = {"engine__backend": "ray", "engine__executor": "fastest", "ray__cpus_per_actor": 2}
    for gpus, share in ((0.25, 0.25), ("auto", 1.0)):
        asks = experiment(tmp_path, ray__gpus_per_actor=gpus, **on_cluster)
        job, _ = preparing.prepare(asks, tmp_path / "run", lambda event: None, lockstep=False)
        assert (job.experiment.engine.executor, job.why) == ("vectorised", "timed")
        assert (reserved[-1]["num_gpus"], reserved[-1]["num_cpus"], devices[-1]) == (share, 2, "cuda")

    asks = experiment(tmp_path, ray__gpus_per_actor=2, **on_cluster)
    with pytest.raises(ConfigError, match="needs a process with 2 CPUs and 2 GPUs, but no node of this cluster"):
        preparing.prepare(asks, tmp_path / "run", lambda event: None, lockstep=False)


def test_a_network_is_pretrained_on_the_gpu_that_the_server_will_have(tmp_path: Path, reserved):
    pretrains = {"model__pretrain": "body", "model__pretrain_epochs": 1, "data__pools": "{body: 0.2}"}
    on_cluster = {"engine__backend": "ray", "ray__gpus_for_server": 0.5, "data__cache": tmp_path / "cache"}
    asks = experiment(tmp_path, method="fedavg", **pretrains, **on_cluster)
    with pretend_gpu() as faults:
        job, _ = preparing.prepare(asks, tmp_path / "run", lambda event: None, lockstep=False)
    assert [request["num_gpus"] for request in reserved] == [0.5] and not faults
    with safe_open(job.experiment.model.weights, "pt") as file:
        assert json.loads(file.metadata()["pretraining"])["device"] == "cuda"


# --- memory -----------------------------------------------------------------------------------------------------------


@given(st.integers(2, 20))
def test_actors_with_their_contexts_fit_the_gpu_that_they_share(actors: int):
    total = 80 * GIB
    fractions: list[float] = []
    properties = SimpleNamespace(total_memory=total)
    with mock.patch.multiple(
        torch.cuda,
        get_device_properties=lambda device: properties,
        set_per_process_memory_fraction=fractions.append,
    ):
        limit_memory(share_of(actors))
    (fraction,) = fractions
    assert 0.95 * total < actors * (fraction * total + CONTEXT_BYTES) <= total


def test_a_share_that_a_context_alone_fills_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=8 * GIB))
    with pytest.raises(ConfigError, match=r"0\.05 of this GPU is 410 MiB, but CUDA itself takes about 832 MiB"):
        limit_memory(0.05)


# --- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("ray_cluster")
def test_auto_on_a_cluster_without_a_gpu_is_refused_in_a_sentence(tmp_path: Path):
    events: list[object] = []
    with pytest.raises(ConfigError, match=r"ray\.gpus_per_actor is auto, but the cluster has no GPU; leave it out"):
        raypfl.run(experiment(tmp_path, engine__backend="ray", ray__gpus_per_actor="auto"), listeners=[events.append])
    assert Progress("measuring how many client actors share a GPU") not in events


@pytest.mark.parametrize("setting", ["ray.gpus_per_actor=1", "ray.gpus_per_actor=auto", "ray.gpus_for_server=0.5"])
def test_a_run_in_this_process_that_asks_for_a_gpu_is_refused_where_there_is_none(tmp_path: Path, setting: str):
    asks = experiment(tmp_path).override([setting])
    name, value = setting.split("=")
    for refuse in (raypfl.run, lambda asks: driver.check([asks])):
        with pytest.raises(ConfigError, match=rf"^{name} is '?{value}.* finds no GPU .* Set {name}=0"):
            refuse(asks)
    assert not list((tmp_path / "runs").iterdir())


def test_a_cell_of_a_study_whose_gpu_pytorch_does_not_find_fails_with_the_same_sentence(tmp_path: Path):
    (outcome,) = carry_out([PlannedRun(tmp_path / "cell", experiment(tmp_path, ray__gpus_per_actor=1))], [[]])
    assert outcome.status == "failed" and "finds no GPU" in str(outcome.error)


def test_trials_and_cells_that_share_a_cluster_need_a_number():
    with pytest.raises(ConfigError, match="one run at a time; a sweep's trials and a study's cells each"):
        client_resources(RaySettings(gpus_per_actor="auto"))


@pytest.mark.parametrize("value", ["automatic", -0.5, ".inf"])
def test_a_share_is_a_number_or_auto(tmp_path: Path, value: object):
    with pytest.raises(ConfigError, match=r"ray\.gpus_per_actor"):
        experiment(tmp_path, ray__gpus_per_actor=value)


@pytest.mark.skipif(not hasattr(torch.backends, "fp32_precision"), reason="torch has no other name for TF32")
def test_code_that_has_asked_for_tf32_by_its_new_name_does_not_round_convolutions():
    with pretend_gpu(), torch.backends.flags(fp32_precision="tf32"):
        for tf32, name in [(False, "ieee"), (True, "tf32")]:
            same_bits_on_gpus(tf32)
            assert torch.backends.cuda.matmul.allow_tf32 == torch.backends.cudnn.allow_tf32 == tf32
            assert torch.backends.cudnn.conv.fp32_precision == torch.backends.cuda.matmul.fp32_precision == name


def test_a_process_with_a_gpu_uses_full_fp32_and_the_algorithms_that_give_the_same_bits(tmp_path: Path):
    settings = experiment(tmp_path)
    data = load_federated(settings.data, settings.partition, seed=0)
    with pretend_gpu():
        Prepared(settings, data, CPU).build()
        assert not torch.are_deterministic_algorithms_enabled() and torch.backends.cudnn.allow_tf32
        Prepared(settings, data, "cuda").build()
        assert torch.are_deterministic_algorithms_enabled() and torch.is_deterministic_algorithms_warn_only_enabled()
        assert not torch.backends.cudnn.allow_tf32 and not torch.backends.cuda.matmul.allow_tf32
        # Their gradients would be nondeterministic.
        assert not torch.backends.cuda.flash_sdp_enabled() and not torch.backends.cuda.mem_efficient_sdp_enabled()
        assert not torch.backends.cuda.cudnn_sdp_enabled()

        # On a CPU as well, attention has fused kernels, which round differently.
        Prepared(settings, data, CPU).build()
        assert not torch.are_deterministic_algorithms_enabled()
        assert torch.backends.cuda.flash_sdp_enabled() and torch.backends.cuda.mem_efficient_sdp_enabled()

        on_gpus = ["training.precision=tf32", "ray.gpus_per_actor=1"]
        prepared = Prepared(settings.override(on_gpus), data, "cuda").build()
        assert torch.backends.cudnn.allow_tf32 and torch.backends.cuda.matmul.allow_tf32 and prepared.precision.tf32

        turing = mock.patch("torch.cuda.get_device_capability", return_value=(7, 5))
        with turing, pytest.raises(ConfigError, match=r"a pretended GPU has compute capability 7\.5: TF32 needs 8\.0"):
            Prepared(settings.override(on_gpus), data, "cuda").build()
