"""An experiment made ready to run: with its data, and all that is built from both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial
from operator import methodcaller
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import nn

from raypfl.clients.context import CORRUPTED_BYTES, Context
from raypfl.devices import ClientTurns, Turn
from raypfl.engine.building.data_outline import DataOutline
from raypfl.engine.building.groups import client_costs, groups_for
from raypfl.engine.building.network import build_model
from raypfl.engine.building.poison import Poison, poison_for
from raypfl.engine.building.samples import normalisation, pool_indices, pools_for, samples_for
from raypfl.engine.building.stamped_samples import StampedSamples
from raypfl.engine.building.turns import turns_for
from raypfl.evaluation import Measures
from raypfl.federation.cohort_draw import cohort_size
from raypfl.federation.exchange.backend import Backend
from raypfl.federation.exchange.group_runner import GroupRunner
from raypfl.federation.ledger import Ledger
from raypfl.federation.robustness import ATTACKS, Wire
from raypfl.federation.server_training import ServerContext, ServerProgress
from raypfl.federation.task import Task
from raypfl.learning.batches import GroupSamples, device_data_budget
from raypfl.learning.executor import Executor, Precision
from raypfl.learning.objectives import Objective, default_objective
from raypfl.learning.objectives.batch import Batch
from raypfl.learning.recording import CudaGraphs, Recorder, Replays, may_keep_state
from raypfl.learning.sample_pools import Pools
from raypfl.learning.vectorised import Vectorised
from raypfl.models import FlatModel
from raypfl.models.architectures.heterogeneous import NETWORKS, architectures_of
from raypfl.storage.states import StateTable

if TYPE_CHECKING:
    from raypfl.data import ClientData, FederatedData
    from raypfl.experiment import Experiment


class Prepared:
    """An experiment with its data, and the parts that are built from both, each once, on first use.

    The driver, the server and every actor each build their own, from the experiment and the data that reach them.

    Parameters
    ----------
    data : the federated data, or their outline where no samples are needed.
    gpus : the GPUs, or the fraction of one, that this process has for its clients, which limit the data kept on the
        device; None: those in the settings, or 0 if they have yet to be measured.
    """

    def __init__(
        self,
        experiment: Experiment,
        data: ClientData | DataOutline,
        device: torch.device | str = "cpu",
        gpus: float | None = None,
    ):
        self.experiment = experiment
        # An outline has all attributes of the data, which it opens when samples are needed.
        self.data = cast("ClientData", data)
        self.device = torch.device(device)
        self._gpus = experiment.ray.gpus if gpus is None else gpus

    def on(self, device: torch.device) -> Prepared:
        """Return the same experiment and data on a device; this object if it is already there."""
        return self if device == self.device else Prepared(self.experiment, self.data, device)

    def with_settings(self, experiment: Experiment, gpus: float | None = None) -> Prepared:
        """Return the same data, network and task under other settings of training, evaluation and engine.

        `experiment` : it must describe the same network, method and objective, which are not built again.
        """
        prepared = Prepared(experiment, self.data, self.device, gpus)
        for part in ("measures", "model", "architectures", "task"):
            if part in self.__dict__:
                prepared.__dict__[part] = self.__dict__[part]
        return prepared

    def build(self) -> Prepared:
        """Build network and task now, so that their errors are raised here; return this object."""
        _ = self.task
        return self

    def free(self) -> None:
        """Forget all parts, which frees their memory; they are built again when they are needed."""
        for part in ("model", "architectures", "task", "context", "server_pools"):
            self.__dict__.pop(part, None)

    @cached_property
    def measures(self) -> Measures:
        """The objective and the metrics."""
        objective = self.experiment.objective or default_objective(self.data.kind)
        return Measures(objective, self.experiment.extra_metrics, self.data.num_classes)

    @property
    def objective(self) -> Objective:
        """What is learned: the objective in the settings or, if they name none, the default for the data's targets."""
        return self.measures.objective

    @cached_property
    def model(self) -> FlatModel:
        """The clients' network; of several architectures the one with most parameters, after which a run is planned."""
        if self.experiment.model.is_heterogeneous:
            return max(self.architectures, key=lambda model: model.num_parameters)
        return self._build_model()

    @cached_property
    def architectures(self) -> tuple[FlatModel, ...]:
        """The networks that clients have: one, or one of each architecture."""
        settings = self.experiment.model
        if not settings.is_heterogeneous:
            return (self.model,)
        count = len(settings.options.get("networks", NETWORKS))
        return tuple(self._build_model(methodcaller("network", number)) for number in range(count))

    @cached_property
    def architecture_of(self) -> np.ndarray | None:
        """The number of each client's architecture, ``int64[num_clients]``; None: all have the same."""
        settings = self.experiment.model
        return architectures_of(settings.options, self.data.num_clients) if settings.is_heterogeneous else None

    def by_architecture(self) -> list[Prepared]:
        """Return the same experiment and data for each architecture, as if clients had that one alone."""
        parts = []
        for model in self.architectures:
            prepared = self.with_settings(self.experiment)
            prepared.__dict__["model"] = model
            parts.append(prepared)
        return parts

    def _build_model(self, part: Callable[[Any], nn.Module] | None = None) -> FlatModel:
        outputs = self.objective.outputs(self.data.num_classes)
        vocabulary = getattr(self.data, "vocabulary", None)  # a population has none
        num_tokens = None if vocabulary is None else len(vocabulary)
        return build_model(self.experiment, self.data.input_shape, outputs, num_tokens, self.device, part)

    @cached_property
    def task(self) -> Task:
        """What the method may know before the first round, with its own networks built."""
        is_heterogeneous = self.experiment.model.is_heterogeneous
        task = Task(
            model=self._build_model(methodcaller("common")) if is_heterogeneous else self.model,
            seed=self.experiment.seed,
            rounds=self.experiment.rounds,
            num_clients=self.data.num_clients,
            num_classes=self.data.num_classes,
            input_shape=self.data.input_shape,
            num_samples=self.data.sizes("train"),
            num_test_samples=self.data.sizes("test"),
            unseen=self.data.unseen,
            pools={name: len(indices) for name, indices in pool_indices(self.data).items()},
            objective=self.objective,
            discrete=self.data.discrete,
            architecture_of=self.architecture_of,
        )
        return replace(task, networks=self.experiment.method.networks(task))

    @cached_property
    def context(self) -> Context:
        """What the clients of this process share."""
        experiment = self.experiment
        data_budget = device_data_budget(self.device, experiment.ray.data_share, self._gpus)
        samples = samples_for(self.data, self.model, experiment.data.augmentation, data_budget, self._poison())
        context = Context(
            model=self.model,
            executor=self._executor(self.model),
            samples=samples,
            split=self.data.indices,
            num_clients=self.data.num_clients,
            num_classes=self.data.num_classes,
            training=experiment.training,
            seed=experiment.seed,
            measures=self.measures,
            pools=pools_for(self.data, samples, experiment.seed),
            privacy=experiment.privacy,
            networks=self.task.networks,
            loss_limit=experiment.failures.loss_limit,
            attack="" if experiment.attack is None else ATTACKS.name_of(type(experiment.attack)),
            evaluation_batch=experiment.evaluation.batch_size,
            scale=self.data.scale,
            with_trigger=samples.all_stamped() if isinstance(samples, StampedSamples) else None,
            corrupted_bytes=min(data_budget - samples.resident, CORRUPTED_BYTES),
            left_out=frozenset([*self.task.unseen.tolist(), *np.flatnonzero(self.is_malicious).tolist()]),
            compressor=experiment.compression,
            sends_rows=self._wire().needs_rows,
        )
        if self.architecture_of is not None:
            context.architecture_of = self.architecture_of
            context.by_architecture = tuple(
                replace(context, model=model, executor=self._executor(model)) for model in self.architectures
            )
        return context

    @cached_property
    def is_malicious(self) -> np.ndarray:
        """Which clients attack, ``bool[num_clients]``."""
        is_malicious = np.zeros(self.task.num_clients, dtype=bool)
        attack = self.experiment.attack
        if attack is not None:
            is_malicious[attack.malicious(self.task.trained, self.experiment.seed)] = True
        return is_malicious

    def _wire(self) -> Wire:
        """Return what happens to clients' messages on their way to the server."""
        attack = self.experiment.attack
        on_messages = None if attack is None else attack.on_messages
        return Wire(on_messages, self.experiment.aggregation, self.is_malicious)

    def _poison(self) -> Poison | None:
        """Return what an attack makes of the samples; None: nothing."""
        # Described data, which have no labels yet, are refused before the run.
        data = cast("FederatedData", self.data)
        return poison_for(self.experiment.attack, data, self.is_malicious, self.experiment.seed)

    def _executor(self, model: FlatModel) -> Executor:
        """Return how the clients of this process train that have this network."""
        engine = self.experiment.engine
        if engine.executor != "vectorised":
            return Executor(model, self.precision)
        return Vectorised(model, self.precision, self._recorder(model))

    def _recorder(self, model: FlatModel) -> Recorder | None:
        """Return the recorder of clients that train together; None if the network or the loss may keep a state."""
        forward_passes = [module.forward for module in model.module.modules()]
        if may_keep_state([*forward_passes, self.objective.loss]):
            return None
        if self.device.type == "cpu":
            return Replays()
        return CudaGraphs() if self.experiment.engine.cuda_graphs else None

    @cached_property
    def server_pools(self) -> Pools:
        """The pools as the server reads them: on its GPU if they fit there, else mapped into memory, batch by batch."""
        experiment = self.experiment
        samples = samples_for(self.data, self.model, experiment.data.augmentation, room=0.0)
        data_budget = device_data_budget(self.device, experiment.ray.data_share, experiment.ray.gpus_for_server)
        return replace(pools_for(self.data, samples, experiment.seed), room=data_budget)

    def turns(self, turn: Turn | None, num_clients: int | None = None) -> ClientTurns:
        """Return the turns of all clients; parameters as in :func:`turns_for`."""
        return turns_for(self.experiment, self.data, turn, num_clients)

    @property
    def precision(self) -> Precision:
        """The precision and layout of the clients' network."""
        training = self.experiment.training
        return Precision.named(training.precision, bool(training.channels_last))

    @property
    def normalisation(self) -> tuple[torch.Tensor, torch.Tensor]:
        """``gain, offset``: the network sees ``inputs * gain + offset``."""
        return normalisation(self.data, self.model)

    @property
    def num_trained(self) -> int:
        """Number of clients that take part in training."""
        return self.data.num_clients - len(self.data.unseen)

    @property
    def cohort_size(self) -> int:
        """Number of clients that are drawn for a round."""
        return cohort_size(self.experiment.cohort, self.num_trained)

    @property
    def num_groups(self) -> int:
        """Number of groups of a cohort; more client actors than that would have nothing to do."""
        num_groups = len(groups_for(self.experiment.engine, self.cohort_size))
        return max(num_groups, len(self.architectures) if self.experiment.model.is_heterogeneous else 1)

    def training_samples(self, client: int) -> Batch:
        """Return all training samples of a client, as the network sees them."""
        samples = samples_for(self.data, self.model, (), room=0.0)
        return GroupSamples(samples, [self.data.indices(client, "train")]).client(0)

    def runner(
        self,
        backend: Backend,
        states: StateTable,
        ledger: Ledger,
        emit: Callable[[ServerProgress], None],
        warn: Callable[[str], None],
    ) -> GroupRunner:
        """Make the runner of a server's exchanges on a backend."""
        experiment = self.experiment
        return GroupRunner(
            task=self.task,
            backend=backend,
            states=states,
            ledger=ledger,
            failures=experiment.failures,
            context=ServerContext(self.server_pools, self.precision, emit),
            costs=client_costs(experiment, self.task.num_samples),
            group_sizes=partial(groups_for, experiment.engine),
            executor=experiment.engine.executor,
            warn=warn,
            privacy=experiment.privacy,
            wire=self._wire(),
        )


def threads_of_server(experiment: Experiment) -> int:
    """Return the number of torch threads for what the server computes itself."""
    return experiment.engine.threads_for_server or experiment.engine.threads
