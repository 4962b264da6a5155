"""The models that a run ended with, as ordinary networks."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
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
from raypfl.data.client_names import ClientNames, number_of
from raypfl.engine.backends.inline import Inline
from raypfl.engine.building.data_outline import DataOutline
from raypfl.engine.building.groups import client_costs
from raypfl.engine.evaluator import EXCHANGE, EvaluationCohort, model_hook, personalize
from raypfl.engine.prepared import Prepared
from raypfl.evaluation.metric_sums import MetricSums
from raypfl.evaluation.run_metrics import Measures
from raypfl.experiment import Experiment
from raypfl.federation.exchange.group_runner import GroupRunner
from raypfl.federation.ledger import Ledger
from raypfl.federation.server_training import ServerContext
from raypfl.federation.task import Task
from raypfl.learning.privacy import Spending
from raypfl.learning.privacy.accounting import epsilons_of, refuse_without_accountant
from raypfl.models.predictor import Predictor
from raypfl.runs.records import SUMMARY, WITHOUT_RESULT, newest, recorded_end
from raypfl.storage import checkpoints
from raypfl.storage.checkpoints import Snapshot
from raypfl.storage.stacks import merged
from raypfl.storage.states import StateShard, StateTable
from raypfl.storage.tree import Copies
from raypfl.trained.new_clients import NewClient, checked_samples, context_of, require_new_client_models
from raypfl.trained.saved_model import NAMES, Origin, names_of
from raypfl.trained.trained_model import TrainedModel

if TYPE_CHECKING:
    from raypfl.clients.context import Context

_OUTLINE = ("input_shape", "num_classes", "kind", "discrete", "scale", "mean", "std", "unseen")


class TrainedModels:
    """A run's global model and its clients' personal models, as they were evaluated after the last round.

    A method that fine-tunes its models for evaluation, or has exchanges with its clients
    (:meth:`raypfl.Method.personalize`), does so here too and needs the clients' data; others need no data.

    Parameters
    ----------
    outline : the outline of the run's data.
    """

    def __init__(self, experiment: Experiment, outline: DataOutline, snapshot: Snapshot):
        self.experiment = experiment
        self.outline = outline
        self.server = dict(snapshot.server)
        self.round = snapshot.round
        self._snapshot = snapshot
        self._prepared = Prepared(experiment, outline)

    @classmethod
    def of_run(cls, run_dir: str | Path, whole: bool = True) -> TrainedModels:
        """Return the models of a run's newest checkpoint; warns if the run has failed.

        Parameters
        ----------
        whole : as in :func:`raypfl.storage.checkpoints.load`.
        """
        experiment, snapshot = newest(run_dir, whole)
        if (Path(run_dir) / SUMMARY).exists() and recorded_end(Path(run_dir))["status"] in WITHOUT_RESULT:
            warnings.warn(
                f"The run in {run_dir} failed: its models are those after round {snapshot.round} of "
                f"{experiment.rounds}.",
                stacklevel=2,
            )
        return cls.of_snapshot(experiment, snapshot)

    @classmethod
    def of_snapshot(cls, experiment: Experiment, snapshot: Snapshot) -> TrainedModels:
        """Return the models of a loaded checkpoint.

        Raises
        ------
        DataError : if the run's data are not on this machine, or not as they were in training.
        """
        data = experiment.load_data()
        if data.fingerprint != snapshot.meta["data"]:
            # Inputs would be normalised by other means and deviations than in training.
            raise DataError(
                f"The data {experiment.data.name!r} or their partition have changed since the run was trained on them, "
                f"so its models do not fit them. Restore the files, and keep new ones outside of data.root."
            )
        return cls(experiment, DataOutline.of(data), snapshot)

    def export(self, folder: str | Path) -> None:
        """Write a checkpoint of all that the models are made of, which needs neither the run's folder nor its data.

        One file of the clients' states at a time is in memory.
        """
        values: dict[str, Any] = {name: getattr(self.outline, name) for name in _OUTLINE} | dict(self.outline.counts)
        for name, value in values.items():
            if isinstance(value, np.ndarray):
                values[name] = torch.from_numpy(np.array(value))
        content = {"server": self.server, "data": values}
        meta: dict[str, Any] = {"experiment": self.experiment.to_yaml(), "names": names_of(self.outline)}
        if self.client_names is not None:
            meta["client_names"] = [self.client_names.clients.tolist(), list(self.client_names.names)]
        with checkpoints.explain_write_errors(self.round, str(folder)):
            states = self._snapshot.states.copied_to(str(folder))
        checkpoints.save(str(folder), Snapshot(self.round, content, states, {}, meta), keep=1)

    @classmethod
    def of_export(cls, folder: str | Path) -> TrainedModels:
        """Return the models that :meth:`export` wrote.

        Raises
        ------
        CheckpointError : if the folder has none, or they are damaged.
        """
        snapshot = checkpoints.newest(str(folder))
        experiment = Experiment.from_record(snapshot.meta["experiment"])

        values: dict[str, Any] = {}
        for name, value in snapshot.server["data"].items():
            values[name] = value.numpy() if isinstance(value, torch.Tensor) else value
        counts = {split: values.pop(split) for split in ("train", "test")}
        values |= dict.fromkeys(NAMES) | snapshot.meta.get("names", {})
        values["client_names"] = None
        if "client_names" in snapshot.meta:
            clients, names = snapshot.meta["client_names"]
            values["client_names"] = ClientNames(np.array(clients), names)
        outline = DataOutline(attributes=values, counts=counts, load=experiment.load_data)
        return cls(experiment, outline, replace(snapshot, server=snapshot.server["server"]))

    @property
    def num_clients(self) -> int:
        """The number of clients, which are numbered from 0."""
        return self.outline.num_clients

    @property
    def client_names(self) -> ClientNames | None:
        """The clients' names by number; None where they have numbers only."""
        names: ClientNames | None = self.outline.client_names
        return names

    def global_model(self) -> TrainedModel:
        """Return the global model, in evaluation mode.

        Raises
        ------
        ConfigError : if the method has none.
        """
        theta = self.experiment.global_model(self.server)
        if theta is None:
            raise ConfigError(f"{type(self.experiment.method).__name__} has no global model.")
        return self._trained(self._context.model.as_module(theta))

    def personal_model(self, client: int | str) -> TrainedModel:
        """Return a client's own model, in evaluation mode; for an unseen client, the one that the method makes for it.

        Parameters
        ----------
        client : the client's number or, where clients have names, its name.

        Raises
        ------
        ConfigError : if there is no such client, several share the name, or the method makes no personal models.
        DataError : if the model is made from the client's data, which is not on this machine.
        """
        client = number_of(client, self.client_names, self.num_clients)
        unseen = client in self.outline.unseen
        context = self._context.of([client])
        models, _ = self._make_models(context, [client], [self._snapshot.state_of(client)], unseen)
        if models is None and unseen:
            return self.global_model()
        if models is None:
            name = type(self.experiment.method).__name__
            raise ConfigError(f"{name} makes no personal models; its clients share the global one.")
        return self._networks(context, models, 1)[0]

    def personalize(self, x: Any, y: Any, held_out: float = 0.25) -> NewClient:
        """Make a model for a client that was not in the run, as the method does for clients that were never trained.

        Parameters
        ----------
        x : ``[n, ...]``, labelled samples of the client, as the run's data set has them: pixels, not normalised.
        y : the targets of the samples.
        held_out : the share of the samples that the model is tested on, class by class, and not made from; 0: none.

        Raises
        ------
        ConfigError : if the method makes no models for new clients.
        DataError : if the samples do not fit, or no model can be made from them.

        Examples
        --------
        ``raypfl.trained_models(result).personalize(x, y).model(images)`` gives logits.
        """
        return self.personalize_all([(x, y)], held_out)[0]

    def personalize_all(self, clients: Sequence[tuple[Any, Any]], held_out: float = 0.25) -> list[NewClient]:
        """Do :meth:`personalize` for several clients at once, each given by its samples ``(x, y)``."""
        privacy = self.experiment.privacy
        require_new_client_models(self.experiment)
        refuse_without_accountant(privacy)
        if not 0 <= held_out < 1:
            raise ConfigError(f"held_out is {held_out}, but must be at least 0 and below 1.")

        samples = [checked_samples(x, y, self.outline) for x, y in clients]
        val_fraction = self.experiment.data.val_fraction if self.experiment.method.needs_validation else 0.0
        context = context_of(self._context, self.outline, samples, (held_out, val_fraction))
        numbers = list(range(len(samples)))
        start = time.perf_counter()
        try:
            models, spent = self._make_models(context, numbers, [{}] * len(samples), unseen=True)
            if models is None:
                raise ConfigError(f"{type(self.experiment.method).__name__} made none.")
            seconds = time.perf_counter() - start
            metrics = _test_metrics(context, models, numbers)
        except (RaypflError, IndexError, RuntimeError) as error:  # such as a token that the network does not know
            raise DataError(f"No model could be made for the new client. {error}") from error

        epsilons = epsilons_of(spent, privacy)
        new_clients = []
        for client, network in enumerate(self._networks(context, models, len(samples))):
            new_client = NewClient(
                model=network,
                samples=len(samples[client][1]) - len(context.split(client, "test")),
                held_out=len(context.split(client, "test")),
                metrics=metrics[client],
                seconds=seconds,
                epsilon=epsilons.get(client, 0.0) if privacy.protects_samples else None,
                origin=self.origin,
            )
            new_clients.append(new_client)
        return new_clients

    def groups(self, size: int = 50) -> Iterator[Clients]:
        """Yield all clients of the run, in the order of their numbers, as a method's functions get them.

        Their states are empty, and their samples are read when a function uses them.
        """
        for first in range(0, self.num_clients, size):
            ids = tuple(range(first, min(first + size, self.num_clients)))
            yield Clients(ClientGroup(self._context, ids, self.round, self._lr))

    def at_start(self) -> dict[str, Any]:
        """Return the server's state before the first round."""
        return self.experiment.method.start(self.task)

    def as_networks(self, rows: Tensor) -> list[TrainedModel]:
        """Return model vectors ``[n, P+B]`` as networks, in evaluation mode."""
        return [self._trained(self.task.model.as_module(row)) for row in rows]

    @cached_property
    def normalisation(self) -> tuple[Tensor, Tensor]:
        """The normalisation ``gain, offset``: networks see ``x * gain + offset``."""
        return self._prepared.normalisation

    def _make_models(
        self, context: Context, clients: Sequence[int], states: list[Mapping[str, np.ndarray]], unseen: bool
    ) -> tuple[Tensor | Predictor | None, list[Spending]]:
        """Return the method's models for clients with these states, and the privacy that making them spent."""
        method = self.experiment.method
        spent: list[Spending] = []
        with threads(self.experiment.engine.threads):
            if method.has("personalize"):
                states, spent = self._after_exchanges(context, clients, states, unseen)
            group = ClientGroup(context, tuple(clients), self.round, self._lr, states, exchange=("", EXCHANGE))
            models = getattr(method, model_hook(unseen))(Clients(group), self.server)
        return models, [*spent, *group.spent]

    def _networks(self, context: Context, models: Tensor | Predictor, count: int) -> list[TrainedModel]:
        if isinstance(models, Predictor):
            return [self._trained(models.as_module(k, context.evaluating)) for k in range(count)]
        return [self._trained(context.model.as_module(row)) for row in unmarked(models).expand(count, -1)]

    def _after_exchanges(
        self, context: Context, clients: Sequence[int], states: list[Mapping[str, np.ndarray]], unseen: bool
    ) -> tuple[list[Mapping[str, np.ndarray]], list[Spending]]:
        """Personalize the clients as a cohort in this process; return their states, and what that spent."""
        table = StateTable()
        for client, state in zip(clients, states, strict=True):
            if state:
                rows = {name: np.asarray(value)[None] for name, value in state.items()}
                table.stage((client,), StateShard(np.array([client]), rows).stack())

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
            group_sizes=lambda cohort: [cohort],
            executor=self.experiment.engine.executor,
            warn=warnings.warn,
        )
        cohort = EvaluationCohort(runner, clients, self.round, self._lr, unseen)
        personalize(self.experiment.method, self.server, cohort, Copies())

        new_states: list[Mapping[str, np.ndarray]] = []
        for client in clients:
            new_states.append(merged(ref.stack.state_of(ref.slot) for ref in table.refs(client)))
        return new_states, cohort.spent

    @cached_property
    def origin(self) -> Origin:
        """The description of the run in files of its models."""
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
        outline = self.outline
        return TrainedModel(
            network,
            gain.clone(),
            offset.clone(),
            outline.input_shape,
            outline.discrete,
            self.measures.objective,
            **names_of(outline),
        )


def _test_metrics(context: Context, models: Tensor | Predictor, clients: Sequence[int]) -> list[dict[str, float]]:
    """Return the metrics of each client's model on its test split, those that have a value."""
    measures = context.measures
    sums = MetricSums(measures)
    if not isinstance(models, Predictor):
        models = unmarked(models).expand(len(clients), -1)
    outputs = context.model_outputs(models, [context.split(client, "test") for client in clients])

    metrics_by_client = []
    for row in sums.values(sums.accumulate(outputs, len(clients))).tolist():
        values = dict(zip(measures.columns, row, strict=True))
        metrics = {}
        for name, value in values.items():
            if name in measures.metrics and values["samples"] and not math.isnan(value):
                metrics[name] = value
        metrics_by_client.append(metrics)
    return metrics_by_client
