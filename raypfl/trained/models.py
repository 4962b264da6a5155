"""The models that a run ended with, as ordinary networks."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from raypfl.clients.clients import Clients
from raypfl.clients.group import ClientGroup
from raypfl.clients.worker import Worker
from raypfl.common.errors import ConfigError, DataError, RaypflError
from raypfl.common.messages import unmarked
from raypfl.common.threads import threads
from raypfl.data import load_federated
from raypfl.engine.backends.inline import Inline
from raypfl.engine.evaluator import EvaluationCohort, maker, personalize
from raypfl.engine.groups import client_costs
from raypfl.engine.outline import DataOutline
from raypfl.engine.prepared import Prepared
from raypfl.evaluation.measures import Measures
from raypfl.evaluation.metric_sums import MetricSums
from raypfl.experiment import Experiment
from raypfl.federation.exchange.group_runner import GroupRunner
from raypfl.federation.ledger import Ledger
from raypfl.federation.server_training import ServerContext
from raypfl.federation.task import Task
from raypfl.learning.privacy import Spending
from raypfl.learning.privacy.accounting import epsilons_of, refuse_without_accountant
from raypfl.models.predictor import Predictor
from raypfl.models.trained_model import TrainedModel
from raypfl.runs.result import refuse_stranger
from raypfl.storage import checkpoint
from raypfl.storage.checkpoint import Snapshot
from raypfl.storage.states import StateShard, StateTable, merged
from raypfl.trained.new_clients import NewClient, checked, context_of, refuse_without_way
from raypfl.trained.saved_model import Origin

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
        self._prepared = Prepared(experiment, outline)
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
        experiment = Experiment.from_record(snapshot.meta["experiment"])
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
        unseen = client in self.outline.unseen
        made, _ = self._made(self._context, [client], [self._snapshot.state_of(client)], unseen)
        if made is None and unseen:
            return self.global_model()
        if made is None:
            name = type(self.experiment.method).__name__
            raise ConfigError(f"{name} makes no personal models; its clients share the global one.")
        return self._networks(made, 1)[0]

    def personalize(self, x: Any, y: Any, held_out: float = 0.25) -> NewClient:
        """A model for a client that was not in the run, in the method's way for clients that were never trained.

        Parameters
        ----------
        x : ``[n, ...]``, labelled samples of the client, as the run's data set has them: pixels, not normalised.
        y : their targets.
        held_out : share of them that the model is tested on, class by class, and not made from; 0: none.

        Raises
        ------
        ConfigError : if the method has no way.
        DataError : if the samples do not fit, or no model can be made from them.

        Examples
        --------
        ``raypfl.trained_models(result.run_dir).personalize(x, y).model(images)`` gives logits.
        """
        return self.personalize_all([(x, y)], held_out)[0]

    def personalize_all(self, clients: Sequence[tuple[Any, Any]], held_out: float = 0.25) -> list[NewClient]:
        """:meth:`personalize` for several clients at once, whose samples are ``(x, y)`` each."""
        privacy = self.experiment.privacy
        refuse_without_way(self.experiment.method)
        refuse_without_accountant(privacy)
        if not 0 <= held_out < 1:
            raise ConfigError(f"held_out is {held_out}, but must be at least 0 and below 1.")
        samples = [checked(x, y, self.outline) for x, y in clients]
        context = context_of(self._context, self.outline, samples, held_out)
        numbers, begin = list(range(len(samples))), time.perf_counter()
        try:
            made, spent = self._made(context, numbers, [{}] * len(samples), unseen=True)
        except RaypflError as error:
            raise DataError(f"No model could be made for the new client. {error}") from error
        if made is None:
            raise ConfigError(f"{type(self.experiment.method).__name__} made no model for a new client.")
        seconds = time.perf_counter() - begin
        metrics, epsilons = _tested(context, made, numbers), epsilons_of(spent, privacy)
        return [
            NewClient(
                model=network,
                samples=len(context.split(client, "train")),
                held_out=len(context.split(client, "test")),
                metrics=metrics[client],
                seconds=seconds,
                epsilon=epsilons.get(client, 0.0) if privacy.protects_samples else None,
                origin=self.origin,
            )
            for client, network in enumerate(self._networks(made, len(samples)))
        ]

    def groups(self, size: int = 50) -> Iterator[Clients]:
        """All clients of the run, in the order of their numbers, as a method's functions get them.

        Their states are empty, and their samples are read when they are asked for.
        """
        for first in range(0, self.num_clients, size):
            ids = tuple(range(first, min(first + size, self.num_clients)))
            yield Clients(ClientGroup(self._context, ids, self.round, self._lr))

    def at_start(self) -> dict[str, Any]:
        """The server's state before the first round."""
        return self.experiment.method.start(self.task)

    def as_networks(self, rows: Tensor) -> list[TrainedModel]:
        """Model vectors ``[n, P+B]`` as networks, in evaluation mode."""
        return [self._trained(self.task.model.as_module(row)) for row in rows]

    @cached_property
    def normalisation(self) -> tuple[Tensor, Tensor]:
        """``gain, offset``: networks see ``x * gain + offset``."""
        return self._prepared.normalisation

    def _made(
        self, context: Context, clients: Sequence[int], states: list[Mapping[str, np.ndarray]], unseen: bool
    ) -> tuple[Tensor | Predictor | None, list[Spending]]:
        """The models that the method makes for clients with these states, and what that spent of their privacy."""
        method, spent = self.experiment.method, list[Spending]()
        with threads(self.experiment.engine.threads):
            if method.has("personalize"):
                states, spent = self._after_exchanges(context, clients, states, unseen)
            group = ClientGroup(context, tuple(clients), self.round, self._lr, states)
            made = getattr(method, maker(unseen))(Clients(group), self.server)
        return made, [*spent, *(row for branch in group.private_trainings for row in branch.rows())]

    def _networks(self, made: Tensor | Predictor, count: int) -> list[TrainedModel]:
        if isinstance(made, Predictor):
            return [self._trained(made.as_module(k, self._context.evaluating)) for k in range(count)]
        return self.as_networks(unmarked(made).expand(count, -1))

    def _after_exchanges(
        self, context: Context, clients: Sequence[int], states: list[Mapping[str, np.ndarray]], unseen: bool
    ) -> tuple[list[Mapping[str, np.ndarray]], list[Spending]]:
        """The clients' states after the method has personalized them, as a cohort in this process; what was spent."""
        table = StateTable()
        for client, state in zip(clients, states, strict=True):
            if state:
                own = {name: np.asarray(value)[None] for name, value in state.items()}
                table.stage((client,), StateShard(np.array([client]), own).stack())
        sizes = np.zeros(max(clients) + 1, dtype=np.int64)
        sizes[list(clients)] = [len(context.split(client, "train")) for client in clients]
        runner = GroupRunner(
            task=self.task,
            backend=Inline(Worker(context, self.experiment.method)),
            states=table,
            context=ServerContext(context.pools, self._prepared.precision, lambda event: None),
            ledger=Ledger(),
            failures=self.experiment.failures,
            costs=client_costs(self.experiment, sizes),
            cut_for=lambda cohort: ([cohort], self.experiment.engine.executor),
            warn=warnings.warn,
        )
        cohort = EvaluationCohort(runner, clients, self.round, self._lr, unseen)
        personalize(self.experiment.method, self.server, cohort)
        return [merged(ref.stack.of(ref.slot) for ref in table.refs(client)) for client in clients], cohort.spent

    @cached_property
    def origin(self) -> Origin:
        """What files of the models say about the run."""
        return Origin(self.experiment, self.outline)

    @property
    def _lr(self) -> float:
        return self.experiment.training.learning_rate(max(self.round - 1, 0), self.experiment.rounds)

    @property
    def task(self) -> Task:
        """The method's task, with its own networks."""
        return self._prepared.task

    @property
    def measures(self) -> Measures:
        """The objective and the metrics."""
        return self._prepared.measures

    @property
    def _context(self) -> Context:
        return self._prepared.context

    def _trained(self, network: nn.Module) -> TrainedModel:
        gain, offset = self.normalisation
        return TrainedModel(network, gain.clone(), offset.clone(), self.outline.discrete)


def _tested(context: Context, made: Tensor | Predictor, clients: Sequence[int]) -> list[dict[str, float]]:
    """The metrics of each client's model on its test split, those that have a value."""
    models = made if isinstance(made, Predictor) else unmarked(made).expand(len(clients), -1)
    sums, measures = MetricSums(context.measures), context.measures
    answers = context.model_outputs(models, [context.split(client, "test") for client in clients])
    rows = sums.values(sums.accumulate(answers, len(clients))).tolist()
    named = (dict(zip(measures.columns, row, strict=True)) for row in rows)
    return [{n: v for n, v in one.items() if n in measures.metrics and one["samples"] and v == v} for one in named]
