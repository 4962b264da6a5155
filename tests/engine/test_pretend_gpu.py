"""Runs on a GPU that this machine does not have; see :mod:`tests.support.pretend_gpu`."""

from __future__ import annotations

import contextlib
import copy
import os
import weakref
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import ray
import torch
from torch import nn
from torch.nn import functional as F

import raypfl
from benchmarks.gpu.work import Job, Rounds, bare_round
from raypfl.common import streams
from raypfl.data import load_federated
from raypfl.data.datasets import RawData
from raypfl.engine.backends import client_actor
from raypfl.engine.building.devices import CONTEXT_BYTES
from raypfl.engine.events import Warned
from raypfl.engine.prepared import Prepared
from raypfl.methods import METHODS
from raypfl.methods.partial_models import floco
from raypfl.models import FlatModel
from raypfl.runs.checks.network import refuse_misfit
from tests.support.federated_data import GeneratedClients
from tests.support.federation import dropping_mlp, small_mlp
from tests.support.pretend_gpu import CPU, GPU, pretend_gpu
from tests.support.pretend_graphs import PretendedGraph
from tests.support.runs import experiment
from tests.support.tiers import methods, with_quick


@pytest.fixture
def faults() -> Iterator[list[str]]:
    """Faults of a pretended GPU. PyTorch repeats warnings that an earlier test has had."""
    always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        with pretend_gpu() as faults:
            yield faults
    finally:
        torch.set_warn_always(always)


REFUSED = {
    "an operation on both devices": lambda cpu, gpu: cpu + gpu,
    "a scalar of the GPU": lambda cpu, gpu: cpu + gpu.sum(),
    "a scalar of the GPU, in place": lambda cpu, gpu: cpu.sum().add_(gpu.sum()),
    "a loss": lambda cpu, gpu: F.cross_entropy(gpu[None], cpu[:1].long()),
    "an index of the GPU": lambda cpu, gpu: cpu[gpu.long()],
    "a mask of the GPU": lambda cpu, gpu: cpu[gpu > 0],
    "values of the CPU": lambda cpu, gpu: gpu.index_put_((cpu.long(),), cpu),
    "concatenation": lambda cpu, gpu: torch.cat([cpu, gpu]),
    "scalars in a stack": lambda cpu, gpu: torch.stack([cpu.sum(), gpu.sum()]),
    "vmap": lambda cpu, gpu: torch.vmap(lambda a, b: a * b)(cpu, gpu),
    "a method of a module": lambda cpu, gpu: nn.Linear(3, 1)(gpu),
    "a NumPy array": lambda cpu, gpu: gpu.numpy(),
    "NumPy's view of a list": lambda cpu, gpu: np.array([gpu.sum()]),
    "a generator of the CPU": lambda cpu, gpu: torch.rand(3, device=GPU, generator=torch.Generator()),
    "a generator of the GPU": lambda cpu, gpu: cpu.normal_(generator=torch.Generator("cuda")),
}


@pytest.mark.parametrize("what", REFUSED)
def test_the_pretended_gpu_refuses_and_records_what_a_gpu_refuses(faults, what):
    cpu = torch.ones(3)
    gpu = torch.ones(3, device="cuda")
    with pytest.raises((RuntimeError, TypeError), match=r"same device|can't convert cuda|generator"):
        REFUSED[what](cpu, gpu)
    assert len(faults) == 1 and __file__ in faults[0]


def test_the_pretended_gpu_allows_what_a_gpu_allows(faults):
    cpu = torch.arange(3)
    gpu = torch.ones(3, device="cuda")
    network = nn.BatchNorm1d(3).to("cuda")
    on_gpu = [
        gpu.sum() + 1,
        gpu * torch.tensor(2.0),
        gpu[cpu],
        gpu[None, :2],
        gpu.new_tensor([1]),
        torch.vmap(lambda row: row.sum())(gpu[None]),
        torch.randn(3, device=GPU, generator=torch.Generator("cuda")),
        cpu.to(gpu),
        copy.deepcopy(gpu),
        copy.deepcopy(network).running_mean,
        network(torch.stack([gpu, gpu])),
        gpu.index_fill(0, gpu.long(), 0.0),
        cpu.pin_memory().to("cuda", non_blocking=True),
    ]

    assert all(tensor.device == GPU and tensor.is_cuda for tensor in on_gpu)

    gpu.copy_(cpu)
    cpu.copy_(gpu)
    on_cpu = [gpu.cpu(), torch.as_tensor(gpu.tolist()), torch.tensor([gpu.sum()]), cpu.pin_memory()]
    assert all(tensor.device == CPU and tensor.is_cpu for tensor in on_cpu) and gpu.cpu().numpy().sum() == 3
    assert not faults


def test_a_gradient_goes_back_to_the_device_that_a_tensor_came_from(faults):
    x = torch.ones(3, requires_grad=True)
    (slope,) = torch.autograd.grad((x.to("cuda") ** 2).sum(), x, create_graph=True)
    assert slope.device == CPU and slope.tolist() == [2, 2, 2]
    assert torch.autograd.grad(slope.sum(), x)[0].device == CPU and not faults


def test_the_gpu_has_its_global_generator(faults):
    gpu_state = torch.cuda.get_rng_state()
    cpu_state = torch.get_rng_state()
    first = torch.rand(3, device="cuda")
    assert not torch.equal(torch.cuda.get_rng_state(), gpu_state) and torch.equal(torch.get_rng_state(), cpu_state)

    with torch.random.fork_rng(devices=[GPU]):
        torch.manual_seed(1)
        dropped = F.dropout(torch.ones(100, device="cuda"))
        assert dropped.device == GPU

    torch.cuda.set_rng_state(gpu_state)
    assert torch.equal(torch.rand(3, device="cuda"), first)

    torch.manual_seed(1)
    assert not torch.equal(torch.cuda.get_rng_state(), gpu_state)


def test_a_pretended_gpu_leaves_torch_as_it_was():
    available = torch.cuda.is_available()
    generator = torch.Generator
    autocast = torch.autocast

    with pretend_gpu():
        torch.use_deterministic_algorithms(True, warn_only=True)
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        survivor = torch.ones(3, device="cuda")

    assert torch.cuda.is_available() == available and torch.Generator is generator and torch.autocast is autocast
    assert not torch.are_deterministic_algorithms_enabled() and "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    assert (survivor + torch.ones(3)).device == CPU

    with pretend_gpu():
        assert survivor.device == GPU and torch.ones(3).device == CPU


@pytest.mark.parametrize("factory", [small_mlp, dropping_mlp])
def test_a_network_starts_with_the_same_weights_on_a_gpu_and_leaves_its_streams_alone(faults, factory):
    before = streams.state(GPU)
    expected = FlatModel(factory).init(7)
    theta = FlatModel(factory, device="cuda").init(7)
    assert theta.device == GPU and torch.equal(theta.cpu(), expected)
    assert torch.equal(streams.state(GPU), before)


def tiny(config) -> RawData:
    """120 colour images, of three classes."""
    draws = np.random.default_rng(0)
    return RawData(draws.integers(0, 256, (120, 3, 6, 6), dtype=np.uint8), draws.integers(0, 3, 120), [*"abc"])


class Normalised(nn.Sequential):
    """A small network with batch norm."""

    def __init__(self, input_shape, num_classes):
        super().__init__(nn.Flatten(), nn.Linear(108, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, num_classes))


class Dropping(nn.Sequential):
    """A small network with dropout."""

    def __init__(self, input_shape, num_classes):
        super().__init__(nn.Flatten(), nn.Linear(108, 4), nn.Dropout(0.4), nn.Linear(4, num_classes))


IMAGES = {"window": 1, "outer_steps": 1, "inner_steps": 1, "per_class": 1, "pictures": 1}
CHANGES = {
    "creff": {"method__feature_steps": 2, "method__head_steps": 2},
    "fedala": {"method__max_epochs": 2},
    "fedavg-ft": {"method__finetune_epochs": 1},
    "fedbabu": {"method__finetune_epochs": 1},
    "fedbn": {"model": f"{__name__}:Normalised"},
    "feddf": {"method__steps": 2},
    "fedrep": {"method__personal_epochs": 1},
    "perada": {"method__steps": 2},
} | {name: {f"method__{n}": v for n, v in IMAGES.items()} for name in ("extra-images", "fedptr", "fedptr-s")}
"""With these a method is quick, does all that it does within two rounds, and has nothing to warn of."""


def run(tmp_path, faults: list[str], **changes) -> raypfl.Result:
    """A run on the GPU, without faults and warnings."""
    described = experiment(
        tmp_path,
        **{
            "data__name": f"{__name__}:tiny",
            "data__unseen_fraction": 0.25,
            "rounds": 2,
            "partition": "{name: iid, clients: 4}",
            "cohort__size": 2,
            "model": "{name: mlp, hidden: [4]}",
            "training__steps": 2,
            "training__batch_size": 4,
            "evaluation__every": 1,
            "evaluation__protocols": "[local, global, pm_v, unseen, train]",
            "checkpoint__every": 1,
            "ray__gpus_per_actor": 1,
        }
        | changes,
    )
    events: list = []
    result = raypfl.run(described, listeners=[events.append])

    warnings = [event.text for event in events if isinstance(event, Warned)]
    assert not faults
    assert not [text for text in warnings if not text.startswith("No client is left in the cohort")]
    assert result.metadata["device"] == ("cuda" if described.ray.on_gpu else "cpu")

    return result


def run_method(tmp_path, faults, monkeypatch, method: str, executor: str, client_gpus: int, server_gpus: int) -> None:
    monkeypatch.setattr(floco, "SIZES", 10)
    devices = {"engine__executor": executor, "ray__gpus_per_actor": client_gpus, "ray__gpus_for_server": server_gpus}
    # The other protocols score the same models, as in the tests below.
    evaluation = {"evaluation__every": 2, "evaluation__protocols": "[local, unseen]"}
    changes = CHANGES.get(method, {})
    if method == "fedas" and executor == "vectorised" and client_gpus:
        # The pretended GPU takes what `one_hot` makes in a recorded step for a tensor of the CPU.
        changes = {"engine__cuda_graphs": False}
    run(tmp_path, faults, method=method, **evaluation, **devices, **changes)


@pytest.mark.parametrize("method", methods(METHODS))
def test_every_method_runs_on_a_gpu(tmp_path, faults, monkeypatch, method):
    run_method(tmp_path, faults, monkeypatch, method, "vectorised", client_gpus=1, server_gpus=1)


def _server_computes(method: str) -> pytest.MarkDecorator:
    """CI runs methods whose server makes tensors of its own: it trains, draws, or sends several messages a round."""
    return pytest.mark.thorough if method in ("feddf", "fednh", "pefll") else pytest.mark.slow


@pytest.mark.parametrize("method", [pytest.param(name, marks=_server_computes(name)) for name in sorted(METHODS)])
@pytest.mark.parametrize(("executor", "client_gpus", "server_gpus"), [("sequential", 1, 0), ("vectorised", 0, 1)])
def test_every_method_runs_with_a_gpu_for_its_clients_or_its_server_alone(
    tmp_path, faults, monkeypatch, method, executor, client_gpus, server_gpus
):
    run_method(tmp_path, faults, monkeypatch, method, executor, client_gpus, server_gpus)


def test_steps_of_clients_that_train_together_are_captured_unless_asked_not_to_with_the_same_bits(
    tmp_path, faults, monkeypatch
):
    captured = []
    end = PretendedGraph.capture_end
    monkeypatch.setattr(PretendedGraph, "capture_end", lambda graph: captured.append(graph) or end(graph))
    trains = {"method": "fedavg", "engine__executor": "vectorised", "training__steps": 6, "evaluation__every": 2}
    with_graphs = run(tmp_path, faults, **trains)
    assert captured
    captured.clear()
    without = run(tmp_path, faults, engine__cuda_graphs=False, **trains)
    assert not captured
    assert with_graphs.weights_hash == without.weights_hash


def test_a_client_without_test_samples_is_evaluated_on_a_gpu(tmp_path, faults):
    sparse = {"partition": "{name: dirichlet, clients: 20, min_samples: 1}", "engine__group_size": 20}
    sparse["evaluation__protocols"] = "[local]"
    result = run(tmp_path, faults, method="local", engine__executor="sequential", **sparse, rounds=1)
    tested = result.evaluations.to_pandas().query("protocol == 'local'").client
    assert 0 < len(set(tested)) < 15


def test_checking_a_network_leaves_the_gpus_stream_alone(tmp_path, faults):
    described = experiment(tmp_path, data__name=f"{__name__}:tiny", model=f"{__name__}:Dropping")
    data = load_federated(described.data, described.partition, seed=0)
    prepared = Prepared(described, data, GPU)
    prepared.build()
    before = streams.state(GPU)
    refuse_misfit(prepared)
    assert torch.equal(streams.state(GPU), before) and not faults


class Seeding(GeneratedClients):
    """Seeds torch for what it makes."""

    def samples(self, client, split):
        torch.manual_seed(client)
        return super().samples(client, split)


def test_a_population_may_seed_torch_on_a_gpu(tmp_path, faults):
    (tmp_path / "clients").write_text("6")
    described = {"data__name": f"{__name__}:Seeding", "data__root": tmp_path, "data__unseen_fraction": 0}
    protocols = {"evaluation__protocols": "[local]"}
    described["partition"] = "{}"  # which is the population's own
    run(tmp_path, faults, method="fedavg", engine__executor="vectorised", **described, **protocols)


def actor_with(gpus, monkeypatch):
    """A client actor of this process, for which Ray has reserved so much of a GPU."""
    context = SimpleNamespace(get_assigned_resources=lambda: {"GPU": gpus}, get_node_id=lambda: "node")
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(ray, "get_gpu_ids", lambda: [0])
    monkeypatch.setattr(client_actor, "importing", contextlib.nullcontext)
    return client_actor.ClientActor()


@pytest.fixture
def fractions(monkeypatch):
    """The fractions of a GPU's memory to which this process was limited, the earliest first; `faults` comes before."""
    limits = []
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", limits.append)
    return limits


LIMITED = 0.25 - CONTEXT_BYTES / 2**36


def test_an_actor_with_a_share_of_a_gpu_is_limited_to_it_and_says_whether_it_takes_turns(
    tmp_path, faults, fractions, monkeypatch
):
    described = experiment(tmp_path, data__name=f"{__name__}:tiny")
    shipment = SimpleNamespace(
        unpack=lambda: (
            SimpleNamespace(experiment=described),
            load_federated(described.data, described.partition, seed=0),
        )
    )
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    assert not actor_with(1.0, monkeypatch).prepare(shipment).is_time_sliced and not fractions

    assert actor_with(0.25, monkeypatch).prepare(shipment).is_time_sliced
    (tmp_path / "control").touch()
    assert not actor_with(0.25, monkeypatch).prepare(shipment).is_time_sliced
    assert fractions == [LIMITED, LIMITED]


@pytest.mark.parametrize("share", [(0.25, 0), (0, 0.25), (0.1, 0.25)])
def test_a_run_in_one_process_such_as_a_trial_is_limited_to_its_share_until_it_ends(tmp_path, faults, fractions, share):
    client, server = share
    run(tmp_path, faults, rounds=1, method="fedavg", ray__gpus_per_actor=client, ray__gpus_for_server=server)
    assert fractions == [LIMITED, 1.0]


def test_an_actor_frees_the_last_jobs_data_before_it_opens_the_next(tmp_path, faults, monkeypatch):
    described = experiment(tmp_path, data__name=f"{__name__}:tiny", engine__executor="sequential")
    data = load_federated(described.data, described.partition, seed=0)
    inputs_of_last_job = []

    def opened():
        assert not inputs_of_last_job or inputs_of_last_job[0]() is None
        return SimpleNamespace(experiment=described), data

    actor = actor_with(1.0, monkeypatch)
    for _ in range(2):
        assert actor.prepare(SimpleNamespace(unpack=opened)).device == "a pretended GPU"
        assert actor._worker.context.samples.resident
        inputs_of_last_job[:] = [weakref.ref(actor._worker.context.samples.inputs)]


@pytest.mark.parametrize("executor", ["vectorised", "sequential"])
def test_the_benchmark_of_a_gpu_trains_on_it_as_a_client_actor_does(faults, executor):
    rounds = Rounds(Job("mlp", (1, 4, 4), executor=executor, cohort=2), "cuda")
    rounds.run()
    assert rounds.server["theta"].device == GPU and torch.are_deterministic_algorithms_enabled()
    bare_round(rounds.job, "cuda")()
    assert not faults


def tiny_grey(config) -> RawData:
    """60 smaller grey images, of the same classes."""
    draws = np.random.default_rng(1)
    return RawData(draws.integers(0, 99, (60, 1, 5, 5), dtype=np.uint8), draws.integers(0, 3, 60), [*"abc"])


CNN = {"model": "cnn", "data__augmentation": "[crop, flip, cutout]", "training__precision": "bf16"}
OTHER_POOL = {"data__pools": f"{{auxiliary: {{name: '{__name__}:tiny_grey', normalise: own}}}}"}
VARIANTS = {
    "a cnn": {"method": "fedavg", "engine__executor": "vectorised"} | CNN,
    "a cnn, channels last": {"method": "ditto", "engine__executor": "sequential", "training__channels_last": True}
    | CNN,
    "noise on samples": {"method": "fedavg", "privacy__noise": 1.0, "engine__executor": "vectorised"},
    "noise on samples, one by one": {"method": "fedprox", "privacy__noise": 1.0, "engine__executor": "sequential"},
    "noise on clients, masks": {
        "method": {"name": "fedavg", "weighting": "uniform"},
        "privacy": {"noise": 1.0, "unit": "client", "secure_aggregation": True},
    },
    "fp64": {"method": "scaffold", "training__precision": "fp64", "training__optimizer": "sgd"},
    "adam, dropout": {"method": "fedavg", "training__optimizer": "adam", "model": f"{__name__}:Dropping"},
    "data off the gpu": {"method": "fedavg", "ray__data_share": 0},
    "a pool of other images": {"method": "feddf", "method__steps": 2} | OTHER_POOL,
    "a cohort that is gone": {"method": "fednh", "cohort__size": 1, "devices__dropout": 0.9},
    "protocols": {
        "method": "ditto",
        "evaluation__protocols": "[local, global, pm_v, pm_l, ood/corrupt/brightness/3]",
    },
    "labels": {
        "method": "fedavg",
        "data__name": "tests.learning.test_multi_label:marked",
        "evaluation__protocols": "[global]",
    },
    "numbers": {"method": "ditto", "data__name": "diabetes", "evaluation__protocols": "[local]", "training__lr": 1e-4},
    "adapters, trained before": {
        "method": "fedper",
        "model": "{name: vit_s_16, size: 6, patch: 3, width: 8, depth: 1, heads: 2, lora: 2, pretrain: body}",
        "model__pretrain_epochs": 1,
        "data__pools": "{body: 0.2}",
    },
    "ntk": {"method": "fedavg", "analyses": "[{name: ntk, probe: 8, every: 1}]"},
    "ntk, sketched": {"method": "fedavg", "analyses": "[{name: ntk, probe: 8, sketch: 8, every: 1}]"},
    "flntk": {
        "method": {"name": "fedavg", "weighting": "uniform"},
        "analyses": "[flntk]",
        "data__name": "digits",
        "data__signs": True,
        "data__test_fraction": 0.8,
        "data__unseen_fraction": 0,
        "partition": "{name: label_sorted, clients: 20}",
        "cohort__size": 20,
        "model": "{name: two_layer, width: 32}",
        "objective": "{name: regression, reduction: sum}",
        "training__batch_size": 1000,
        "training__precision": "fp64",
        "evaluation__protocols": "[global]",
    },
    "distillation": {
        "method": "perada",
        "method__steps": 2,
        "data__pools": "{auxiliary: 0.2, validation: 0.2}",
        "analyses": "[{name: distillation, samples: 10}]",
    },
}


QUICK = {"a cnn, channels last", "adam, dropout", "data off the gpu", "protocols"}


@pytest.mark.parametrize("what", with_quick(VARIANTS, QUICK))
def test_other_settings_run_on_a_gpu(tmp_path, faults, what):
    run(tmp_path, faults, **{"ray__gpus_for_server": 1, "engine__executor": "vectorised"} | VARIANTS[what])


@pytest.mark.parametrize("method", ["ditto", "fedptr"])
def test_a_run_on_a_gpu_continues_from_its_checkpoint(tmp_path, faults, method):
    devices = {"engine__executor": "vectorised", "ray__gpus_for_server": 1}
    half = run(tmp_path, faults, method=method, **devices, **CHANGES.get(method, {}))
    whole = raypfl.resume(half.run_dir, overrides=["rounds=3"])
    assert whole.status == "finished" and whole.rounds.num_rows == 3 and not faults
