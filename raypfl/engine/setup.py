"""From an experiment to its model, task and context: the same in the server and in every actor."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from raypfl.clients.context import ROOM, Context
from raypfl.common import rng, streams
from raypfl.common.errors import ConfigError, RaypflError
from raypfl.common.user_code import where_defined, with_location
from raypfl.data import ClientData, FederatedData
from raypfl.data.datasets import DescribedData
from raypfl.engine.outline import DataOutline
from raypfl.evaluation import Measures
from raypfl.federation.backend import Backend
from raypfl.federation.group_runner import GroupRunner
from raypfl.federation.ledger import Ledger
from raypfl.federation.method import Method
from raypfl.federation.schedule import cohort_size, evaluation_group_sizes, even, group_sizes
from raypfl.federation.server_training import ServerContext, ServerProgress
from raypfl.federation.task import Task
from raypfl.learning.augmentation import Augmentation
from raypfl.learning.batches import GroupSamples, Samples, device_data_budget, to_device
from raypfl.learning.executor import Executor, Precision
from raypfl.learning.objectives import fitting
from raypfl.learning.objectives.batch import Batch
from raypfl.learning.pool import Pools
from raypfl.learning.vectorised import Vectorised
from raypfl.models import MODELS, FlatModel, lora
from raypfl.models.weights import Pretrained
from raypfl.storage.states import StateTable

if TYPE_CHECKING:
    from raypfl.experiment import Experiment


def make_measures(experiment: Experiment, data: ClientData | DataOutline) -> Measures:
    """The objective and the metrics of an experiment on this data."""
    objective = experiment.objective or fitting(data.kind)
    return Measures(objective, experiment.evaluation.metrics, data.num_classes)


def device_for(gpus: float) -> torch.device:
    """The device of work that would reserve so many GPUs on Ray (or some: True): the same for both backends."""
    return torch.device("cuda" if gpus > 0 and torch.cuda.is_available() else "cpu")


def refuse_missing_gpu(experiment: Experiment) -> None:
    """Raise a ConfigError if a run in this process asks for a GPU that PyTorch does not find here."""
    if experiment.engine.backend != "inline" or torch.cuda.is_available():
        return
    ray = experiment.ray
    for name, asked in (("gpus_per_actor", ray.gpus_per_actor), ("gpus_for_server", ray.gpus_for_server)):
        if asked != 0:
            raise ConfigError(
                f"ray.{name} is {asked}, but PyTorch {torch.__version__} finds no GPU in this process. Set "
                f"ray.{name}=0 to compute on the CPU; or check nvidia-smi, CUDA_VISIBLE_DEVICES, and that this PyTorch "
                "was built for CUDA."
            )


def make_model(experiment: Experiment, data: ClientData | DataOutline, device: torch.device) -> FlatModel:
    """The clients' network for this data."""
    if device.type == "cuda":
        same_bits_on_gpus()
    settings = experiment.model
    entry, outputs = MODELS.get(settings.name), make_measures(experiment, data).objective.outputs(data.num_classes)
    given = {"input_shape": data.input_shape, "num_classes": outputs, **settings.options}
    factory: Callable[[], nn.Module] = partial(_built, settings.name, entry, given)
    trained = settings.trained
    if settings.lora:
        factory = partial(lora.with_lora, factory, settings.lora)
        trained = lora.TRAINED if trained is None and settings.frozen is None else trained
    if settings.weights is not None:
        factory = Pretrained(factory, settings.name, settings.weights)
    factory = partial(_as_the_method_needs_it, experiment.method, factory)
    dtype = torch.float64 if experiment.training.precision == "fp64" else torch.float32
    seed = rng.key(experiment.seed, "network") % 2**31
    return FlatModel(factory, seed, dtype, device, frozen=settings.frozen, trained=trained)


def same_bits_on_gpus() -> None:
    """Let this process compute on GPUs in full fp32 and with algorithms that give the same bits each time.

    PyTorch warns where there is no such algorithm.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.backends.cudnn.allow_tf32 = False  # convolutions would round to 10 bits; matrix products do not
    torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # costs time only


def _built(name: str, entry: Callable[..., nn.Module], given: Mapping[str, Any]) -> nn.Module:
    if isinstance(entry, nn.Module):
        raise ConfigError(f"model is {name!r}, which is a network; name its class, or a function that makes one.")
    try:
        network = entry(**given)
    except RaypflError:
        raise
    except Exception as error:  # a class of the user's own may raise anything
        called = ", ".join(f"{key}={value!r}" for key, value in given.items())
        raise ConfigError(
            f"model is {name!r}, which cannot be built with {called}: {type(error).__name__}: {with_location(error)}"
        ) from error
    return _module(network, f"model is {name!r}, which")


def _module(network: Any, who: str) -> nn.Module:
    """The network, if it is one; else raises a ConfigError about `who` returned it."""
    if not isinstance(network, nn.Module):
        raise ConfigError(f"{who} returns a {type(network).__name__}; it must return a torch.nn.Module.")
    return network


def _as_the_method_needs_it(method: Method, factory: Callable[[], nn.Module]) -> nn.Module:
    return _module(method.network(factory()), where_defined(method.network))


def make_task(experiment: Experiment, data: ClientData | DataOutline, device: torch.device) -> Task:
    """The method's task, with its own networks built."""
    model, measures = make_model(experiment, data, device), make_measures(experiment, data)
    task = Task(
        model=model,
        seed=experiment.seed,
        rounds=experiment.rounds,
        num_clients=data.num_clients,
        num_classes=data.num_classes,
        input_shape=data.input_shape,
        num_samples=data.sizes("train"),
        num_test_samples=data.sizes("test"),
        unseen=data.unseen,
        pools={name: len(where) for name, where in _pools(data).items()},
        objective=measures.objective,
    )
    return replace(task, networks=experiment.method.networks(task))


def precision_of(experiment: Experiment) -> Precision:
    """The precision and layout of the clients' network."""
    return Precision(experiment.training.precision == "bf16", bool(experiment.training.channels_last))


def make_context(
    experiment: Experiment, data: ClientData | DataOutline, task: Task, gpus: float | None = None
) -> Context:
    """What the clients of one process share.

    Parameters
    ----------
    gpus : that this process has; None: as the settings say, and 0 as long as that is to be measured.
    """
    precision = precision_of(experiment)
    room = device_data_budget(
        task.model.device, experiment.ray.data_share, experiment.ray.gpus if gpus is None else gpus
    )
    samples = samples_for(data, task.model, experiment.data.augmentation, room)
    together = experiment.engine.executor == "vectorised"
    executor: Executor = Vectorised(task.model, precision) if together else Executor(task.model, precision)
    return Context(
        model=task.model,
        executor=executor,
        samples=samples,
        split=data.indices,
        num_clients=data.num_clients,
        num_classes=data.num_classes,
        training=experiment.training,
        seed=experiment.seed,
        measures=make_measures(experiment, data),
        pools=_read(experiment, data, samples),
        privacy=experiment.privacy,
        networks=task.networks,
        loss_limit=experiment.failures.loss_limit,
        evaluation_batch=experiment.evaluation.batch_size,
        scale=data.scale,
        room=min(room - samples.resident, ROOM),
        unseen=frozenset(task.unseen.tolist()),
    )


def pools_of_server(experiment: Experiment, data: ClientData, task: Task) -> Pools:
    """The pools as the server reads them: mapped into memory, batch by batch."""
    return _read(experiment, data, samples_for(data, task.model, experiment.data.augmentation, room=0.0))


def samples_of_client(experiment: Experiment, data: ClientData, task: Task, client: int) -> Batch:
    """All training samples of a client, as the network sees them."""
    samples = samples_for(data, task.model, (), room=0.0)
    return GroupSamples(samples, [data.indices(client, "train")]).client(0)


def _read(experiment: Experiment, data: ClientData | DataOutline, samples: Samples) -> Pools:
    moments = data.pool_moments if isinstance(data, FederatedData) else {}
    apart = {}
    for name, (mean, std) in moments.items():
        gain, offset = _affine(data, mean, std, samples.gain)
        apart[name] = replace(samples, gain=gain, offset=offset)
    return Pools(samples, _pools(data), apart, experiment.seed)


def _pools(data: ClientData | DataOutline) -> dict[str, np.ndarray]:
    return {} if isinstance(data, DataOutline) else {name: data.pool(name) for name in data.pools}


def threads_of_server(experiment: Experiment) -> int:
    """Torch threads for what the server computes itself."""
    return experiment.engine.threads_for_server or experiment.engine.threads


def client_costs(experiment: Experiment, sizes: np.ndarray) -> np.ndarray:
    """``float[num_clients]``: SGD steps of each client in a round, by which groups are cut and ordered."""
    training = experiment.training
    if training.steps is not None:
        return np.full(len(sizes), float(training.steps))
    return np.ceil(sizes / training.batch_size) * training.epochs


def make_runner(
    experiment: Experiment,
    task: Task,
    pools: Pools,
    backend: Backend,
    states: StateTable,
    ledger: Ledger,
    emit: Callable[[ServerProgress], None],
    warn: Callable[[str], None],
) -> GroupRunner:
    """What carries out a server's exchanges, as the settings say."""
    return GroupRunner(
        task=task,
        backend=backend,
        states=states,
        ledger=ledger,
        failures=experiment.failures,
        context=ServerContext(pools, precision_of(experiment), emit),
        costs=client_costs(experiment, task.num_samples),
        cut_for=lambda cohort: (groups_for(experiment, cohort), experiment.engine.executor),
        warn=warn,
        privacy=experiment.privacy,
    )


def num_groups(experiment: Experiment, data: ClientData) -> int:
    """Groups of a cohort, which is as many client actors as have something to do."""
    return len(groups_for(experiment, cohort_size(experiment.cohort, data.num_clients)))


def groups_for(experiment: Experiment, cohort: int, evaluation: bool = False) -> list[int]:
    """Sizes of the groups of a cohort: as the settings say, or by the executor and the cohort's size.

    `evaluation` : whether the cohort is evaluated, not trained.
    """
    size = experiment.engine.group_size
    suggest = evaluation_group_sizes if evaluation else group_sizes
    return even(cohort, -(-cohort // size)) if size else suggest(cohort, experiment.engine.executor)


def normalisation(data: ClientData | DataOutline, model: FlatModel) -> tuple[torch.Tensor, torch.Tensor]:
    """``gain, offset``, ``[C, 1, 1]`` for images, else ``[features]``: a network sees ``inputs * gain + offset``."""
    return _affine(data, data.mean, data.std, torch.empty(0, dtype=model.dtype, device=model.device))


def _affine(
    data: ClientData | DataOutline, mean: np.ndarray, std: np.ndarray, like: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    gain, offset = 1.0 / (data.scale * std.astype(np.float64)), -mean.astype(np.float64) / std
    axes = (-1, 1, 1) if len(data.input_shape) == 3 else (-1,)
    channels = [torch.from_numpy(values).to(like).reshape(axes) for values in (gain, offset)]
    return channels[0], channels[1]


def samples_for(
    data: ClientData | DataOutline, model: FlatModel, augmentation: Sequence[Augmentation], room: float
) -> Samples:
    """The samples for the model's device, on which they are kept if they take at most `room` bytes."""
    gain, offset = normalisation(data, model)
    if not isinstance(data, FederatedData):
        nothing = np.zeros(0)
        return _Fetched(nothing, nothing, gain, offset, augmentation, data=data)
    inputs, labels = data.inputs, data.labels
    if model.device.type == "cpu" or inputs.nbytes + labels.nbytes > room:
        return Samples(inputs, labels, gain, offset, augmentation)
    resident = torch.from_numpy(np.array(inputs)).to(model.device), torch.from_numpy(np.array(labels)).to(model.device)
    return Samples(*resident, gain, offset, augmentation)


@dataclass(frozen=True)
class _Fetched(Samples):
    """Samples that are fetched client by client; none are kept on the device."""

    data: DescribedData | DataOutline = field(kw_only=True)

    def take(self, where: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        with streams.forked(self.gain.device):  # a population may seed torch for what it makes
            x, y = self.data.take(where)
        return to_device(x, self.gain.device), to_device(y, self.gain.device)

    def labels_of(self, where: np.ndarray) -> torch.Tensor:
        return self.take(where)[1]

    @property
    def input_shape(self) -> tuple[int, ...]:
        return self.data.input_shape
