"""A small federation in memory, and plain torch code as a reference for the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from raypfl.clients.clients import Clients
from raypfl.clients.compression import Compressor
from raypfl.clients.context import Context
from raypfl.clients.group import ClientGroup
from raypfl.clients.worker import Worker
from raypfl.common import rng
from raypfl.engine.backends.inline import Inline
from raypfl.engine.events import Event
from raypfl.evaluation import Measures
from raypfl.federation.cohort import Cohort
from raypfl.federation.exchange.backend import Backend
from raypfl.federation.exchange.group_runner import GroupRunner
from raypfl.federation.exchange.grouping import even_sizes
from raypfl.federation.ledger import Ledger, LedgerEntry
from raypfl.federation.method import Method
from raypfl.federation.robustness import Wire
from raypfl.federation.server_training import ServerContext
from raypfl.federation.settings import FailureSettings
from raypfl.federation.task import Task
from raypfl.learning.augmentation import Augmentation, augmented
from raypfl.learning.batches import Samples
from raypfl.learning.executor import Executor, Precision
from raypfl.learning.objectives import default_objective, kind_of
from raypfl.learning.privacy import PrivacySettings
from raypfl.learning.sample_order import epoch_order
from raypfl.learning.sample_pools import Pools
from raypfl.learning.settings import TrainingSettings
from raypfl.learning.vectorised import Vectorised
from raypfl.models import FlatModel
from raypfl.storage.stacks import merged
from raypfl.storage.states import StateTable
from tests.support.tiers import with_quick

torch.set_num_threads(1)

FP64 = TrainingSettings(precision="fp64", batch_size=4, lr=0.1)
FP32 = TrainingSettings(batch_size=4, lr=0.1, epochs=2, momentum=0.5)
ONE_STEP = replace(FP64, batch_size=100)
NO_RETRIES = FailureSettings(retries=0)

ROUNDS = ([0, 1, 3], [2, 3], [0, 2], [1, 3])
EXECUTORS = ["vectorised", "sequential"]
both_executors = pytest.mark.parametrize("executor", with_quick(EXECUTORS, {"vectorised"}))
"""Run a test with both executors; `make test` leaves the sequential one to CI."""

CLASSES = 3
SHAPE = (2, 4, 4)
POOLED = 9
MEAN = np.array([3.0, 5.0])
STD = np.array([2.0, 4.0])


def small_mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(32, 5), nn.Tanh(), nn.Linear(5, CLASSES))


class NormalisedConv(nn.Module):
    """A network with a convolution, batch norm and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3)
        self.norm = nn.BatchNorm2d(3)
        self.head = nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.conv(x)).relu().flatten(1))


def without_bias() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(32, 5), nn.Tanh(), nn.Linear(5, CLASSES, bias=False))


def dropping_mlp() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(32, 8), nn.Dropout(0.4), nn.Linear(8, 8), nn.Dropout(0.4), nn.Linear(8, CLASSES)
    )


both_networks = pytest.mark.parametrize("factory", [small_mlp, NormalisedConv])


@dataclass(eq=False)
class Federation:
    """Clients with random samples, their network, and a server that runs a method's rounds in this process.

    Attributes
    ----------
    sizes : training samples of each client.
    group_size : clients a group; None: all in one.
    device : the device of the network; with ``cuda``, within :func:`tests.support.pretend_gpu.pretend_gpu`.
    """

    factory: Callable[[], nn.Module] = small_mlp
    sizes: Sequence[int] = (7, 4, 11, 7)
    executor: str = "vectorised"
    training: TrainingSettings = FP64
    seed: int = 3
    group_size: int | None = None
    device: str = "cpu"
    loss_limit: float = 1e6
    failures: FailureSettings = NO_RETRIES
    augmentation: Sequence[Augmentation] = ()
    privacy: PrivacySettings = field(default_factory=PrivacySettings)
    wire: Wire = field(default_factory=Wire)
    compressor: Compressor | None = None
    method: Method | None = None
    backend: Callable[[Worker], Backend] = Inline
    warnings: list[str] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        draws = np.random.default_rng(self.seed)
        count = sum(self.sizes)
        self.inputs = draws.integers(0, 17, (count + POOLED, *SHAPE), dtype=np.uint8)
        self.labels = draws.integers(0, CLASSES, count + POOLED)

        shuffled = draws.permutation(count)
        self.split = np.split(shuffled, np.cumsum(self.sizes)[:-1])

        self.states = StateTable()
        self.ledger = Ledger()
        self.round = 0
        self.server: dict[str, Any] = {}
        self.cohorts: list[Cohort] = []

    @cached_property
    def model(self) -> FlatModel:
        dtype = torch.float64 if self.training.precision == "fp64" else torch.float32
        method = self.method or Method()
        return FlatModel(lambda: method.network(self.factory()), seed=11, dtype=dtype, device=self.device)

    @cached_property
    def task(self) -> Task:
        sizes = np.array(self.sizes)
        task = Task(self.model, self.seed, 10, len(sizes), CLASSES, SHAPE, sizes, pools={"auxiliary": POOLED})
        if self.method:
            task.networks.update(self.method.networks(task))  # type: ignore[attr-defined]
        return task

    @cached_property
    def all_samples(self) -> Samples:
        gain = torch.from_numpy(1 / STD).to(self.device, self.model.dtype).reshape(-1, 1, 1)
        offset = torch.from_numpy(-MEAN / STD).to(self.device, self.model.dtype).reshape(-1, 1, 1)
        return Samples(self.inputs, self.labels, gain, offset, self.augmentation)

    @cached_property
    def pools(self) -> Pools:
        """The pool ``auxiliary``: the nine samples that no client has."""
        indices = np.arange(len(self.labels) - POOLED, len(self.labels))
        return Pools(self.all_samples, {"auxiliary": indices}, seed=self.seed, room=2**20)

    @cached_property
    def context(self) -> Context:
        precision = Precision.named(self.training.precision, bool(self.training.channels_last))
        executor = {"vectorised": Vectorised, "sequential": Executor}[self.executor]
        return Context(
            model=self.model,
            executor=executor(self.model, precision),
            samples=self.all_samples,
            split=lambda client, name: self.split[client] if name == "train" else np.zeros(0, dtype=np.int64),
            num_clients=len(self.sizes),
            num_classes=CLASSES,
            training=self.training,
            seed=self.seed,
            measures=Measures(default_objective(kind_of(self.labels)), targets=CLASSES),
            networks=self.task.networks,
            pools=self.pools,
            loss_limit=self.loss_limit,
            privacy=self.privacy,
            compressor=self.compressor,
            sends_rows=self.wire.needs_rows,
        )

    @cached_property
    def runner(self) -> GroupRunner:
        return GroupRunner(
            task=self.task,
            backend=self.backend(Worker(self.context, self.method or Method())),
            states=self.states,
            ledger=self.ledger,
            failures=self.failures,
            context=ServerContext(self.pools, Precision(), self.events.append),
            costs=np.array(self.sizes, dtype=float),
            group_sizes=lambda cohort: even_sizes(cohort, -(-cohort // (self.group_size or cohort))),
            executor=self.executor,
            warn=self.warnings.append,
            privacy=self.privacy,
            wire=self.wire,
        )

    def clients(self, ids: Iterable[int] | None = None, round: int = 0, **state: Any) -> Clients:
        """Return a group as a method sees it; ``states[k]``, or the rows ``state[k]``, are its k-th client's state."""
        return Clients(self.group(ids, round, **state))

    def group(
        self,
        ids: Iterable[int] | None = None,
        round: int = 0,
        states: Sequence[Mapping[str, np.ndarray]] | None = None,
        **state: Tensor,
    ) -> ClientGroup:
        """Return a group as the engine sees it."""
        ids = tuple(range(len(self.sizes)) if ids is None else ids)
        if states is None:
            states = [{name: rows[k].numpy() for name, rows in state.items()} for k in range(len(ids))]
        return ClientGroup(self.context, ids, round, self.training.lr, list(states))

    def cohort(self, ids: Iterable[int] | None = None, dropped: tuple[int, ...] = ()) -> Cohort:
        """Return a cohort of these clients, or of all."""
        ids = tuple(range(len(self.sizes)) if ids is None else ids)
        return Cohort(self.runner, ids, self.round, self.training.lr, lost=dropped)

    def run_rounds(self, *cohorts: Iterable[int] | None) -> dict[str, Any]:
        """Run a round of the method with each of these cohorts (None: all clients); returns the server's state."""
        assert self.method is not None
        if not self.server:
            self.server = self.method.start(self.task)

        for ids in cohorts:
            self.cohorts.append(self.cohort(ids))
            self.method.round(self.server, self.cohorts[-1])
            self.states.commit()
            self.round += 1
        return self.server

    def state_of(self, client: int) -> dict[str, np.ndarray]:
        """Return a client's state; empty if it has none."""
        return merged(ref.stack.state_of(ref.slot) for ref in self.states.refs(client))

    def samples(self, client: int, index: np.ndarray | None = None) -> tuple[Tensor, Tensor]:
        """Return a client's samples, normalised by NumPy in float64."""
        where = self.split[client] if index is None else self.split[client][index]
        return self.normalised(where).to(self.model.dtype), torch.from_numpy(self.labels[where])

    def normalised(self, index: Any) -> Tensor:
        """Inputs of samples by their numbers, normalised by NumPy in float64: ``[..., 2, 4, 4]``."""
        inputs = self.inputs[index].astype(np.float64)
        return torch.from_numpy((inputs - MEAN.reshape(-1, 1, 1)) / STD.reshape(-1, 1, 1))

    def visits(self, client: int, round: int = 0, stream: str = "") -> list[tuple[Tensor, Tensor]]:
        """Return the batches of a client's training, in their order."""
        t = self.training
        keys = rng.keys(self.seed, "batches" + stream, round, [client])
        visits = epoch_order(keys, np.array([self.sizes[client]]), t.batch_size, t.epochs, t.steps)
        pairs = zip(visits.index[0], visits.counts[0], strict=True)
        batches = [self.samples(client, index[:count]) for index, count in pairs]
        if not self.augmentation:
            return batches

        keys = rng.keys(self.seed, "augmentation" + stream, round, [client])
        draws_per_image = sum(augmentation.draws for augmentation in self.augmentation)
        draws = torch.from_numpy(visits.with_draws(keys, draws_per_image).draws[0])
        black = torch.from_numpy(-MEAN / STD).to(self.model.dtype).reshape(-1, 1, 1)

        augmented_batches = []
        for (x, y), u in zip(batches, draws, strict=True):
            augmented_batches.append((augmented(x, self.augmentation, u[: len(x)], black), y))
        return augmented_batches


def sent_per_client(ledger: Ledger, round: int) -> dict[tuple[str, str], float]:
    """Return how many numbers a client sent or received in a round's training, by direction and name.

    Each exchange counts with its mean over the clients that took part.
    """
    entries: dict[tuple[str, str], dict[int, list[LedgerEntry]]] = {}
    for entry in ledger.entries:
        if (entry.round, entry.phase) == (round, "training"):
            exchanges = entries.setdefault((entry.direction, entry.name), {})
            exchanges.setdefault(entry.exchange, []).append(entry)

    numbers = {}
    for message, exchanges in entries.items():
        numbers[message] = 0.0
        for exchange in exchanges.values():
            total = sum(entry.clients * entry.numbers for entry in exchange)
            numbers[message] += total / sum(entry.clients for entry in exchange)
    return numbers


def state_tensors(net: nn.Module) -> list[Tensor]:
    """Return the tensors of a model vector in their order: trained parameters, then floating-point buffers."""
    parameters = [p for p in net.parameters() if p.requires_grad]
    return parameters + [b for b in net.buffers() if b.is_floating_point()]


def as_module(factory: Callable[[], nn.Module], theta: Tensor) -> nn.Module:
    """Return the network at a model vector, filled in by torch alone."""
    net = factory().to(theta.dtype)
    tensors = state_tensors(net)
    with torch.no_grad():
        for tensor, part in zip(tensors, theta.split([t.numel() for t in tensors]), strict=True):
            tensor.copy_(part.reshape(tensor.shape))
    return net


def as_vector(net: nn.Module) -> Tensor:
    """Return the model vector of a network."""
    return torch.cat([t.detach().reshape(-1) for t in state_tensors(net)])


def torch_sgd(
    net: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    *,
    lr: float,
    clip_norm: float | None = None,
    trained: str = "",
    kind: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
    penalty: Callable[[Tensor], Tensor] = lambda p: torch.zeros(()),
    **options: Any,
) -> list[float]:
    """Train `net` in place by the bare loop of PyTorch's tutorials; returns the losses."""
    parameters = [p for name, p in net.named_parameters() if name.startswith(trained)]
    optimizer = kind(parameters, lr=lr, **options)
    losses = []

    net.train()
    for x, y in batches:
        value = loss(net(x), y) + penalty(nn.utils.parameters_to_vector(net.parameters()))
        optimizer.zero_grad()
        value.backward()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(parameters, clip_norm)
        optimizer.step()
        losses.append(value.item())

    return losses


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = 1e-10) -> None:
    """Assert that tensors are equal within `tolerance`, relative and absolute."""
    torch.testing.assert_close(actual.as_subclass(Tensor), expected, rtol=tolerance, atol=tolerance)


def run_method(method: Method, *rounds: Iterable[int] | None, **options: Any) -> Federation:
    """Run rounds of a method with these cohorts, or with four of two or three clients; returns the federation."""
    fed = Federation(method=method, **{"group_size": 2, "training": FP32, **options})
    fed.run_rounds(*(rounds or ROUNDS))
    return fed


def client_states(fed: Federation, name: str = "personal") -> Tensor:
    """Return the array of this name in each client's state, ``[clients, ...]``."""
    return torch.from_numpy(np.stack([fed.state_of(client)[name] for client in range(len(fed.sizes))]))


def gradient(fed: Federation, theta: Tensor, client: int, samples: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """Return the gradient of a client's mean loss over all its samples, or over these, by torch alone."""
    net = as_module(fed.factory, theta).train()
    x, y = samples or fed.samples(client)
    F.cross_entropy(net(x), y).backward()
    return torch.cat([p.grad.reshape(-1) for p in net.parameters()])


def step_by_hand(fed: Federation, theta: Tensor, x: Tensor, direction: Tensor, lr: float) -> Tensor:
    """Return a model after a step of its parameters along `direction`, with the statistics after a batch `x`."""
    size = fed.model.num_parameters
    net = as_module(fed.factory, theta).train()
    net(x)
    return torch.cat([theta[:size] - lr * direction, as_vector(net)[size:]])


def starts_of(fed: Federation) -> Tensor:
    """Return a different model for each client."""
    return torch.stack([fed.model.init(100 + k) for k in range(len(fed.sizes))])


def bare_loop(fed: Federation, starts: Tensor, **options) -> tuple[Tensor, Tensor]:
    """Train each client by torch's own optimizer; returns models ``[K, P+B]`` and mean losses ``[K]``."""
    t = fed.training
    options = {"lr": t.lr, "clip_norm": t.clip_norm} | options
    options |= {"momentum": t.momentum, "nesterov": t.nesterov, "weight_decay": t.weight_decay}

    models = []
    losses = []
    for client, start in enumerate(starts):
        net = as_module(fed.factory, start)
        client_losses = torch_sgd(net, fed.visits(client), **options)
        losses.append(float(np.mean(client_losses)))
        models.append(as_vector(net))
    return torch.stack(models), torch.tensor(losses, dtype=starts.dtype)
