"""The models that a run ended with, as ordinary networks."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from raypfl.backends.inline import Inline
from raypfl.clients.clients import Clients
from raypfl.clients.group import ClientGroup
from raypfl.clients.worker import Worker
from raypfl.common.errors import ConfigError
from raypfl.common.messages import unmarked
from raypfl.config import Experiment
from raypfl.data import load_federated
from raypfl.federation.group_runner import GroupRunner
from raypfl.federation.ledger import Ledger
from raypfl.federation.server_training import ServerContext
from raypfl.federation.task import Task
from raypfl.models.predictor import Predictor
from raypfl.models.trained_model import TrainedModel
from raypfl.runs.result import refuse_stranger
from raypfl.server.evaluator import EvaluationCohort, maker, personalize
from raypfl.server.outline import DataOutline
from raypfl.server.setup import client_costs, make_context, make_task, normalisation, precision_of
from raypfl.storage import checkpoint
from raypfl.storage.checkpoint import Snapshot
from raypfl.storage.states import StateShard, StateTable, merged

if TYPE_CHECKING:
    from raypfl.clients.context import Context

_OUTLINE = ("input_shape", "num_classes", "kind", "discrete", "scale", "mean", "std", "unseen")


class TrainedModels:
    """A run's global model and its clients' personal models, as they were evaluated after the last round.

    A method that fine-tunes its models for evaluation, or has exchanges with its clients
    (:meth:`raypfl.Method.personalize`), does so here too and needs the clients' data; others need no data.

    `outline` : of the run's data.
    """

    def __init__(self, experiment: Experiment, outline: DataOutline, snapshot: Snapshot):
        self.experiment, self.outline, self._snapshot = experiment, outline, snapshot
        self.server, self.round = dict(snapshot.server), snapshot.round

    @classmethod
    def of_snapshot(cls, experiment: Experiment, snapshot: Snapshot) -> TrainedModels:
        """The models of a loaded checkpoint."""
        data = load_federated(experiment.data, experiment.partition, seed=experiment.seed)
        return cls(experiment, DataOutline.of(data), snapshot)

    def export(self, folder: str | Path) -> None:
        """Write a checkpoint of all that the models are made of: it needs neither the run's folder nor its data.

        Of the clients' states, one file at a time is in memory.
        """
        values = {name: getattr(self.outline, name) for name in _OUTLINE} | dict(self.outline.counts)
        arrays = {name: torch.from_numpy(np.array(one)) for name, one in values.items() if isinstance(one, np.ndarray)}
        content = {"server": self.server, "data": values | arrays}
        meta = {"experiment": self.experiment.to_yaml()}
        checkpoint.save(str(folder), Snapshot(self.round, content, self._snapshot.states, {}, meta), keep=1)

    @classmethod
    def of_export(cls, folder: str | Path) -> TrainedModels:
        """The models that :meth:`export` wrote.

        Raises
        ------
        CheckpointError : if the folder has none, or they are damaged.
        """
        snapshot = checkpoint.newest(str(folder))
        experiment = Experiment.from_yaml(snapshot.meta["experiment"])
        stored = snapshot.server["data"].items()
        values: dict[str, Any] = {n: one.numpy() if isinstance(one, torch.Tensor) else one for n, one in stored}
        counts = {split: values.pop(split) for split in ("train", "test")}
        load = partial(load_federated, experiment.data, experiment.partition, seed=experiment.seed)
        outline = DataOutline(known=values, counts=counts, load=load)
        return cls(experiment, outline, replace(snapshot, server=snapshot.server["server"]))

    @property
    def num_clients(self) -> int:
        """Clients are numbered from 0."""
        return self.outline.num_clients

    def global_model(self) -> TrainedModel:
        """The global model, in evaluation mode.

        Raises
        ------
        ConfigError : if the method has none.
        """
        theta = self.experiment.method.global_model(self.server)
        if theta is None:
            raise ConfigError(f"{type(self.experiment.method).__name__} has no global model.")
        return self._trained(self._context.model.as_module(theta))

    def personal_model(self, client: int) -> TrainedModel:
        """A client's own model, in evaluation mode; for a client that was never trained, what the method gives those.

        Raises
        ------
        ConfigError : if there is no such client, or the method makes no personal models.
        DataError : if the model is made from the client's data, which is not on this machine.
        """
        refuse_stranger(client, self.num_clients)
        method, unseen = self.experiment.method, client in self.outline.unseen
        state = self._state_to_judge(client, unseen)
        clients = Clients(ClientGroup(self._context, (client,), self.round, self._lr, [state]))
        made = getattr(method, maker(unseen))(clients, self.server)
        if made is None and unseen:
            return self.global_model()
        if made is None:
            raise ConfigError(f"{type(method).__name__} makes no personal models; its clients share the global one.")
        if isinstance(made, Predictor):
            return self._trained(made.as_module(0, self._context.evaluating))
        return self._trained(self._context.model.as_module(unmarked(made).reshape(-1)))

    def _state_to_judge(self, client: int, unseen: bool) -> Mapping[str, np.ndarray]:
        """A client's state after the method has personalized it, as a cohort of one in this process."""
        method, state = self.experiment.method, self._snapshot.state_of(client)
        if not method.has("personalize"):
            return state
        states = StateTable()
        if state:
            own = {name: np.asarray(value)[None] for name, value in state.items()}
            states.stage((client,), StateShard(np.array([client]), own).stack())
        runner = GroupRunner(
            task=self._task,
            backend=Inline(Worker(self._context, method)),
            states=states,
            context=ServerContext(self._context.pools, precision_of(self.experiment), lambda event: None),
            ledger=Ledger(),
            failures=self.experiment.failures,
            costs=client_costs(self.experiment, self._task.num_samples),
            cut_for=lambda clients: ([clients], self.experiment.engine.executor),
            warn=warnings.warn,
        )
        personalize(method, self.server, EvaluationCohort(runner, [client], self.round, self._lr, unseen))
        return merged(ref.stack.of(ref.slot) for ref in states.refs(client))

    @property
    def _lr(self) -> float:
        return self.experiment.training.learning_rate(max(self.round - 1, 0), self.experiment.rounds)

    @cached_property
    def _task(self) -> Task:
        return make_task(self.experiment, self.outline, torch.device("cpu"))

    @cached_property
    def _context(self) -> Context:
        return make_context(self.experiment, self.outline, self._task)

    def _trained(self, network: nn.Module) -> TrainedModel:
        gain, offset = normalisation(self.outline, self._context.model)
        return TrainedModel(network, gain, offset, self.outline.discrete)
