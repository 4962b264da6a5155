"""What a process of the benchmark does: the rounds of a client actor and of a server that averages, without Ray."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from raypfl.clients.context import Context
from raypfl.clients.worker import Worker
from raypfl.engine.backends.inline import Inline
from raypfl.engine.building.devices import same_bits_on_gpus
from raypfl.evaluation import Measures
from raypfl.federation.cohort import Cohort
from raypfl.federation.exchange.backend import states_of
from raypfl.federation.exchange.group_runner import GroupRunner
from raypfl.federation.exchange.grouping import even_sizes
from raypfl.federation.ledger import Ledger
from raypfl.federation.method import Method
from raypfl.federation.server_training import ServerContext
from raypfl.federation.settings import FailureSettings
from raypfl.federation.task import Task
from raypfl.learning.batches import Samples
from raypfl.learning.executor import DEFAULT_PRECISION, Executor, Precision
from raypfl.learning.objectives import default_objective
from raypfl.learning.optimizers import SGD, LocalOptimizer
from raypfl.learning.recording import CudaGraphs, Recorder, Replays
from raypfl.learning.sample_pools import Pools
from raypfl.learning.settings import TrainingSettings
from raypfl.learning.vectorised import Vectorised
from raypfl.methods import FedAvg
from raypfl.models import MODELS, FlatModel
from raypfl.storage.states import StateTable
from raypfl.storage.tree import flatten

LEARNING_RATE = 0.01

Kind = Literal["classes", "tokens", "numbers"]


@dataclass(frozen=True)
class Job:
    """A network, its data, and how clients train.

    Attributes
    ----------
    network, options : a registered model and its options.
    shape : the shape of a sample.
    kind : the kind of the targets; `classes` is their number.
    executor : ``vectorised`` or ``sequential``.
    group : clients of a group; 0: the whole cohort.
    cohort : clients of a round.
    clients : clients in all, who take turns; 0: a cohort.
    samples, batch : samples of each client, and of a step.
    pool : samples of the pool ``auxiliary``.
    trained : the parts of the network that are trained; None: all.
    """

    network: str
    shape: tuple[int, ...] = (3, 32, 32)
    options: Mapping[str, Any] = field(default_factory=dict)
    kind: Kind = "classes"
    classes: int = 10
    executor: str = "vectorised"
    group: int = 0
    cohort: int = 10
    clients: int = 0
    samples: int = 50
    batch: int = 10
    pool: int = 0
    trained: str | None = None

    @property
    def steps(self) -> int:
        """Steps of a client in a round."""
        return math.ceil(self.samples / self.batch)

    @property
    def population(self) -> int:
        """Clients in all."""
        return self.clients or self.cohort


class Rounds:
    """Rounds of a method in this process.

    Attributes
    ----------
    warnings : what clients and server warned of.
    """

    def __init__(
        self,
        job: Job,
        device: str,
        method: Method | None = None,
        precision: Precision = DEFAULT_PRECISION,
        optimizer: LocalOptimizer | None = None,
        recorder: Recorder | None = None,
    ):
        self.job = job
        self.method = method or FedAvg()
        self.warnings: set[str] = set()
        self.round = 0
        if device == "cuda":
            same_bits_on_gpus(precision.tf32)

        samples = noise(job, device)
        self.model = FlatModel(
            lambda: self.method.network(MODELS.get(job.network)(job.shape, job.classes, **job.options)),
            0,
            torch.float32,
            device,
            trained=job.trained,
        )
        pool = np.arange(job.population * job.samples, job.population * job.samples + job.pool)
        pools = Pools(samples, {"auxiliary": pool} if job.pool else {}, seed=0)

        task = Task(
            self.model,
            seed=0,
            rounds=1000,
            num_clients=job.population,
            num_classes=job.classes,
            input_shape=job.shape,
            num_samples=np.full(job.population, job.samples),
            pools={name: len(indices) for name, indices in pools.indices.items()},
            objective=default_objective(job.kind),
        )
        networks = self.method.networks(task)
        task = Task(**{**task.__dict__, "networks": networks})

        executor = Executor(self.model, precision)
        if job.executor == "vectorised":
            executor = Vectorised(self.model, precision, recorder)
        context = Context(
            model=self.model,
            executor=executor,
            samples=samples,
            split=lambda client, name: np.arange(client * job.samples, (client + 1) * job.samples),
            num_clients=job.population,
            num_classes=job.classes,
            training=TrainingSettings(lr=LEARNING_RATE, batch_size=job.batch, optimizer=optimizer or SGD()),
            seed=0,
            pools=pools,
            measures=Measures(default_objective(job.kind)),
            networks=networks,
            loss_limit=math.inf,
        )
        groups = math.ceil(job.cohort / (job.group or job.cohort))
        self._states = StateTable()
        self._runner = GroupRunner(
            task=task,
            backend=Inline(Worker(context, self.method)),
            states=self._states,
            ledger=Ledger(),
            failures=FailureSettings(),
            context=ServerContext(pools, precision, lambda event: None),
            costs=np.full(job.population, float(job.steps)),
            group_sizes=lambda cohort: even_sizes(cohort, groups),
            executor=job.executor,
            warn=self.warnings.add,
        )
        self.server = self.method.start(task)

    def run(self) -> None:
        """Run a round, and wait for the device."""
        first = self.round * self.job.cohort % self.job.population
        clients = sorted((first + i) % self.job.population for i in range(self.job.cohort))
        self.round += 1
        cohort = Cohort(self._runner, tuple(clients), self.round, LEARNING_RATE)
        self.method.round(self.server, cohort)
        self._states.commit()
        wait(self.model.device.type)

    def kept(self) -> Tensor:
        """Return all numbers of the server's and of the clients' states, ``float64[n]``, on the CPU."""
        _, tensors = flatten(self.server)
        arrays = [tensor.detach().cpu().numpy() for _, tensor in sorted(tensors.items())]
        references = [self._states.refs(client) for client in range(self.job.population)]
        for state in states_of(references, lambda stacks: stacks):
            arrays += [array for _, array in sorted(state.items())]
        return torch.from_numpy(np.concatenate([array.ravel().astype(np.float64) for array in arrays]))

    def hash(self) -> str:
        """Return the first digits of the SHA-256 of the server's model."""
        model = self.method.global_model(self.server)
        assert model is not None
        return hashlib.sha256(model.cpu().numpy().tobytes()).hexdigest()[:16]


def recorders(device: str) -> dict[str, type[Recorder]]:
    """Return the ways to record the steps of clients that train together on a device."""
    ways: dict[str, type[Recorder]] = {"repeated operations": Replays}
    if device == "cuda":
        ways["CUDA graphs"] = CudaGraphs
    return ways


def noise(job: Job, device: str) -> Samples:
    """The samples of all clients and of the pool, on the device."""
    draws = np.random.default_rng(0)
    count = job.population * job.samples + job.pool
    x: np.ndarray
    y = draws.integers(0, job.classes, count)
    if job.kind == "tokens":
        x = draws.integers(0, job.classes, (count, *job.shape))
        y = draws.integers(0, job.classes, (count, *job.shape))
    elif "num_tokens" in job.options:
        x = draws.integers(0, job.options["num_tokens"], (count, *job.shape))
    elif job.kind == "numbers":
        x = draws.normal(size=(count, *job.shape)).astype(np.float32)
        y = draws.normal(size=(count, job.classes)).astype(np.float32)
    else:
        x = draws.integers(0, 256, (count, *job.shape), dtype=np.uint8)
    gain = torch.tensor(1.0 if job.kind == "numbers" else 1 / 64, device=device)
    offset = torch.tensor(0.0 if job.kind == "numbers" else -2.0, device=device)
    return Samples(torch.from_numpy(x).to(device), torch.from_numpy(y).to(device), gain, offset)


def bare_round(job: Job, device: str) -> Callable[[], None]:
    """A round as one writes it in plain PyTorch: one client after the other, on samples that are on the device.

    It has PyTorch's own settings: TF32 in convolutions, and no deterministic algorithms.
    """
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.use_deterministic_algorithms(False)
    samples = noise(job, device)
    torch.manual_seed(0)
    network = MODELS.get(job.network)(job.shape, job.classes, **job.options).to(device).train()
    parameters = list(network.parameters())
    server = [parameter.detach().clone() for parameter in parameters]
    x = torch.as_tensor(samples.inputs)
    y = torch.as_tensor(samples.labels)

    def train(client: int) -> None:
        optimizer = torch.optim.SGD(parameters, lr=LEARNING_RATE)
        order = torch.randperm(job.samples, device=device) + client * job.samples
        for index in order.split(job.batch):
            images = x[index].float() / 64 - 2
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(network(images), y[index]).backward()
            optimizer.step()

    def run() -> None:
        total = [torch.zeros_like(tensor) for tensor in server]
        for client in range(job.cohort):
            with torch.no_grad():
                torch._foreach_copy_(parameters, server)
            train(client)
            with torch.no_grad():
                torch._foreach_add_(total, parameters, alpha=1 / job.cohort)
        for kept, mean in zip(server, total, strict=True):
            kept.copy_(mean)
        wait(device)

    return run


def wait(device: str) -> None:
    """Wait until the device has finished."""
    if device == "cuda":
        torch.cuda.synchronize()


def clients_per_second(run: Callable[[], None], clients: int, seconds: float) -> float:
    """Clients a second of rounds of so many clients, after a round to warm up; at least one round is timed."""
    run()
    start = time.perf_counter()
    rounds = 0
    while rounds == 0 or time.perf_counter() - start < seconds:
        run()
        rounds += 1
    return rounds * clients / (time.perf_counter() - start)


def peak_bytes(run: Callable[[], None], device: str) -> float | None:
    """The most bytes that tensors had at a time in a round; None on a CPU."""
    if device != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats()
    run()
    return float(torch.cuda.max_memory_allocated())


def count_kernels(run: Callable[[], None], device: str) -> int | None:
    """The kernels and copies that a round gives to the card, or PyTorch's operations on a CPU; None: no profiler."""
    from torch.profiler import ProfilerActivity, profile, supported_activities

    activity = ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU
    if activity not in supported_activities():
        return None
    with profile(activities=[activity]) as profiler:
        run()
    kind = torch.autograd.DeviceType.CUDA if device == "cuda" else torch.autograd.DeviceType.CPU
    # None at all: this user may not profile the card.
    return sum(event.device_type == kind for event in profiler.events() or []) or None


def relative_difference(result: Tensor, expected: Tensor) -> float:
    """The length of the difference of two vectors, in lengths of the second."""
    difference = (result.double() - expected.double()).norm()
    return float(difference / expected.double().norm().clamp_min(1e-30))
