"""A group of clients in one round: samples, keyed draws, steps, and checks of a method's arguments."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from raypfl.clients.context import Context
from raypfl.clients.observation import Observer
from raypfl.clients.state import ClientState
from raypfl.common.errors import ClientError, Diverged, MethodError, PrivacyError
from raypfl.common.messages import PerClient, unmarked
from raypfl.learning.batches import GroupSamples
from raypfl.learning.executor import Executor
from raypfl.learning.loss import LocalLoss, LossFunction
from raypfl.learning.objectives.batch import Batch
from raypfl.learning.optimizers import LocalOptimizer, Perturb, SampleRule, Update, refuse_unusable_rule
from raypfl.learning.privacy import PrivateTraining, Spending
from raypfl.learning.sample_order import SampleOrder
from raypfl.learning.vectorised import Vectorised


class ClientGroup:
    """K clients in one round, as the engine sees them; a method's function gets :class:`Clients`.

    Attributes
    ----------
    model, measures, objective : the network, the metrics and the objective of training.
    rounds : the number of each client's round, from 1, ``int64[K]``; they differ in an asynchronous run.
    losses : the losses that the last training reported, ``[K]``; None before any.
    logged : the numbers that the clients logged, name -> ``[K]``.
    observer : the observer that shows local steps to analyses; None: no analysis is due.
    exchange : the client function, and the part of the exchange's name that is unique in the round.
    work : the share of its local steps that each client does, ``float64[K]``; None: all do all of them.
    """

    # Attributes that runs with different seeds share: a loss that reads no others can train clients of several runs.
    _shared_by_runs: ClassVar = frozenset({"model", "measures", "objective"})

    def __init__(
        self,
        context: Context,
        ids: tuple[int, ...],
        round: int,
        lr: float,
        states: list[Mapping[str, np.ndarray]] | None = None,
        read_only: bool = False,
        exchange: tuple[str, str] = ("", ""),
        reads_test: bool = True,
        work: np.ndarray | None = None,
        rounds: np.ndarray | None = None,
    ):
        self.context = context
        self.model = context.model
        self.measures = context.measures
        self.objective = context.measures.objective
        self.ids = ids
        self.rounds = np.full(len(ids), round) if rounds is None else rounds
        self.lr = lr
        self.state = ClientState(states or [{} for _ in ids], context.model.device, read_only)
        self.losses: Tensor | None = None
        self.logged: dict[str, Tensor] = {}
        self.observer: Observer | None = None
        self.exchange = exchange
        self.reads_test = reads_test
        self.work = work
        self.private_trainings: list[PrivateTraining] = []
        self._samples: dict[str, GroupSamples] = {}
        self.shared: dict[str, tuple[Tensor, int]] = {}

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def round(self) -> int:
        """The round's number.

        Raises
        ------
        MethodError : if the clients are in several rounds.
        """
        first = int(self.rounds[0])
        if len(self.rounds) > 1 and (self.rounds != first).any():
            raise MethodError(
                "clients.round is not one number: in this asynchronous run, clients that were sent the models of "
                "several rounds train together."
            )
        return first

    @property
    def _lasting(self) -> dict[str, tuple[Any, ...]]:
        """Functions that a recorded step may call, each with all that it depends on besides its arguments."""
        return {"loss": (self.model, self.context.measures)}

    @property
    def spent(self) -> list[Spending]:
        """What the private trainings so far spent of each client's privacy."""
        return [row for training in self.private_trainings for row in training.rows()]

    def portions(self) -> Iterator[ClientGroup]:
        """Yield the whole group if its clients run together, else groups of one, whose states are read-only."""
        if isinstance(self.context.executor, Vectorised) and len(self) > 1:
            yield self
        else:
            for k in range(len(self)):
                yield self.alone(k, read_only=True)

    def alone(self, k: int, read_only: bool = False) -> ClientGroup:
        """Return the k-th client as a group of one; see :class:`ClientState` for `read_only`."""
        states = [self.state._rows[k]]
        work = None if self.work is None else self.work[k : k + 1]
        client = ClientGroup(
            self.context,
            (self.ids[k],),
            int(self.rounds[k]),
            self.lr,
            states,
            read_only,
            self.exchange,
            self.reads_test,
            work,
        )
        client.private_trainings = self.private_trainings
        client.shared = self.shared
        return client

    def share(self, tensors: Mapping[str, Tensor]) -> None:
        """Note tensors that all clients share: their first axis does not run over clients, and they must not change."""
        for name, tensor in tensors.items():
            self.shared.setdefault(name, (tensor, tensor._version))

    def loss(self, p: Tensor, batch: Batch) -> Tensor:
        """Return one client's objective on a batch, at parameters `p`."""
        outputs = self.model(p, batch.x)
        if isinstance(outputs, Tensor):
            mismatch = self.measures.output_mismatch(outputs)
            if mismatch:
                raise MethodError(f"clients.loss does not take this network's outputs: it {mismatch}")
        return self.objective.loss(outputs, batch)

    def split(self, name: str) -> list[np.ndarray]:
        """Return the numbers of the samples in each client's split, ``int64[n]`` per client.

        Raises
        ------
        MethodError : if these are test samples, and training must not read them.
        """
        if name == "test" and not self.reads_test:
            raise MethodError(
                f"The client function {self.exchange[0]!r} asks for clients' test samples in training, so "
                "evaluating on them would test nothing. Use split='train', or split='val' with data.val_fraction. A "
                "method that is meant to train on test samples declares `test_data_in_training: ClassVar[bool] = True`."
            )
        return [self.context.split(client, name) for client in self.ids]

    def samples(self, split: str) -> GroupSamples:
        """Return the samples of a split, which are read once.

        Raises
        ------
        ClientError : if a client has nothing to train on.
        """
        if split not in self._samples:
            samples = GroupSamples(self.context.samples, self.split(split))
            if split == "train" and not samples.sizes.all():
                self.refuse_empty(split)
            self._samples[split] = samples
        return self._samples[split]

    def refuse_empty(self, split: str) -> None:
        """Raise a ClientError for clients without samples in a split."""
        empty = [client for client, samples in zip(self.ids, self.split(split), strict=True) if not len(samples)]
        if not empty:
            return
        advice = "by another partition or fewer clients"
        if split == "val":
            advice = "by data.val_fraction, such as 0.2"
        raise ClientError(
            f"Client {empty[0]} has no samples in its {split} split. Give every client some, {advice}.",
            clients=empty,
            repeatable=True,
        )

    def label_counts(self, split: str) -> Tensor:
        """Count the samples of each class, ``int64[K, C]``; with several labels per sample, how often each is 1."""
        rows = []
        for indices in self.split(split):
            labels = self.context.samples.labels_of(indices)
            counts = labels.sum(0) if labels.dim() > 1 else torch.bincount(labels, minlength=self.context.num_classes)
            rows.append(counts)
        return torch.stack(rows)

    def full_batches(self, split: str) -> list[Batch]:
        """Return all samples of each client's split as one batch."""
        samples = self.samples(split)
        return [samples.client(k) for k in range(len(self))]

    def keys(self, purpose: str) -> np.ndarray:
        """Return the keys ``uint64[K]`` of random draws for this purpose in this round."""
        return self.context.keys(purpose, self.rounds, self.ids)

    def draws(self, stream: str = "") -> Tensor:
        """Return the keys ``int64[K]`` of the draws of networks and losses, in the host's memory."""
        return torch.from_numpy(self.keys("draws" + stream).astype(np.int64))

    def update(
        self,
        optimizer: LocalOptimizer | None = None,
        lr: float | None = None,
        trainable: Tensor | None = None,
        decayed: Tensor | None = None,
        rule: SampleRule | None = None,
        perturb: Perturb | None = None,
    ) -> Update:
        """Describe a local step.

        Parameters
        ----------
        optimizer, lr : the optimizer and its rate; None: the experiment's and the round's.
        trainable, decayed : the entries that are trained, and those with weight decay, ``bool[P+B]``; None: all.
        rule : the rule that combines per-sample gradients; None: the optimizer's, if it needs them.
        perturb : where gradients are taken; None: at the model.
        """
        training = self.context.training
        refuse_unusable_rule(optimizer, lr)
        optimizer = optimizer or training.local_optimizer
        if optimizer.per_sample and rule is not None:
            raise PrivacyError(
                f"{type(optimizer).__name__} and privacy.noise each have a rule for per-sample gradients; "
                "choose another optimizer, or no privacy."
            )
        if optimizer.per_sample and self.model.mixes_rows:
            raise MethodError(
                f"{type(optimizer).__name__} needs the gradient of each sample, but batch norm mixes the samples of "
                "a batch; choose a network with group norm."
            )

        if perturb is not None and (optimizer.per_sample or rule is not None):
            raise MethodError(
                "perturb takes two gradients of each batch, but per-sample gradients (of the optimizer, or of "
                "privacy.noise) are taken once; choose another method or optimizer, or no privacy.noise."
            )

        if trainable is not None and decayed is not None:
            decayed = decayed & trainable
        return Update(
            optimizer,
            self.lr if lr is None else lr,
            training.weight_decay,
            training.clip_norm,
            trained=None if trainable is None else self.model.parameters(trainable),
            decayed=None if decayed is None else self.model.parameters(decayed),
            rule=rule,
            perturb=perturb,
        )

    def rows(self, vector: Tensor) -> Tensor:
        """Return a vector for all clients, or one per client, as ``[K, ...]``."""
        vector = unmarked(vector)
        return vector.expand(len(self), -1) if vector.dim() == 1 else vector

    def models(self, theta: Tensor) -> Tensor:
        """Return a model vector for all clients, or one per client, as ``[K, P+B]``."""
        return self._vectors("A model to train", theta, self.model.size)

    def corrections(self, correction: Tensor | None) -> Tensor | None:
        """Return a correction of gradients for all clients, or one per client, as ``[K, P]``."""
        if correction is None:
            return None
        return self.model.parameters(
            self._vectors("A correction", correction, self.model.num_parameters, self.model.size)
        )

    def _vectors(self, what: str, vectors: Tensor, *lengths: int) -> Tensor:
        rows = unmarked(vectors)
        if rows.shape[-1:] and rows.shape[-1] in lengths and rows.shape[:-1] in ((), (len(self),)):
            return self.rows(rows)
        allowed = " or ".join(map(str, sorted(set(lengths))))
        raise MethodError(
            f"{what} has the shape {list(rows.shape)}; it must be a vector of {allowed} numbers for all clients, or "
            f"[{len(self)}, {allowed}], a row for each client of the group."
        )

    def extras(self, extras: Mapping[str, Any]) -> dict[str, Any]:
        """Check and return the extras of a call.

        Raises
        ------
        MethodError : if it is unclear whether an extra has a row for each client.
        """
        shared = {id(tensor) for tensor, _ in self.shared.values()}
        for name, extra in extras.items():
            unclear = isinstance(extra, Tensor) and not isinstance(extra, PerClient) and id(extra) not in shared
            if unclear and len(self) > 1 and extra.dim() and len(extra) == len(self):
                raise MethodError(
                    f"{name!r} has {len(extra)} rows, as many as the group has clients. If each client has its own "
                    f"row, pass raypfl.per_client({name}); if all clients share it, send it with cohort.run."
                )
        return dict(extras)

    def trainer(self, loss: LocalLoss, rows: Tensor, order: SampleOrder, extras: Mapping[str, Any]) -> Executor:
        """Return the executor that trains models ``rows[K, P+B]`` on these mini-batches."""
        loss.refuse_unknown(extras)
        subset = partial(self.samples("train").subset, 0)
        return self.executor_for(loss, rows[0], subset, order.sizes_differ, extras, train=True)

    def executor_for(
        self,
        function: LossFunction,
        at: Tensor,
        subset: Callable[[int], Batch],
        sizes_differ: bool,
        extras: Mapping[str, Any],
        train: bool,
    ) -> Executor:
        """Return the executor of `function`: the group's, unless padded batches would change the function's result."""
        if not sizes_differ:
            return self.context.executor
        local_loss = function if isinstance(function, LocalLoss) else LocalLoss(self.model, function)
        if self.objective.weighs and local_loss.loss == self.loss and not callable(local_loss.report):
            penalty = local_loss.penalty
            if penalty is None:
                return self.context.executor
            # The objective weighs its samples, so the penalty is tried alone, without passes through the network.
            extras = local_loss.extras_for(penalty, dict(extras))
            function = LocalLoss(self.model, penalty)
        return self.context.executor_for_padding(function, at, subset, extras, train)

    def run(self, executor: Executor, work: Callable[[Executor], Any]) -> Any:
        """Return ``work(executor)``, or a simpler executor's result; see :meth:`Context.run`."""
        return self.context.run(executor, work)[0]

    def report(self, trained: Tensor, losses: Tensor | None, start: Tensor | None = None) -> None:
        """Record ``losses[K]``, if any, as the round's.

        `start` : the models ``[K, P+B]`` that training began with, for a message.

        Raises
        ------
        ClientError : for clients whose loss or trained model is not finite, or whose loss is above the limit.
        """
        limit = self.context.loss_limit
        # A sum is finite only if all its terms are, and takes a fraction of the time of a check of each.
        columns = [trained.sum(1)]
        if losses is not None:
            columns.append(losses)
            self.losses = losses

        failed = []
        # One transfer from a GPU; a few numbers are compared faster in Python.
        for k, numbers in enumerate(torch.stack(columns, dim=1).tolist()):
            is_good = all(map(math.isfinite, numbers)) and (losses is None or numbers[1] <= limit)
            if not is_good:
                failed.append(k)
        if failed:
            raise self._training_error(failed, losses, start)

    def _training_error(self, failed: list[int], losses: Tensor | None, start: Tensor | None) -> ClientError:
        """Return the error of a training that failed for clients, given by position; its text is of the first."""
        k = failed[0]
        clients = [self.ids[i] for i in failed]
        if start is not None and not start[k].isfinite().all():
            return ClientError(
                f"Client {self.ids[k]} was to train in round {self.rounds[k]} from a model with nan or infinity. "
                "Training did not diverge here: the cause is an earlier reply, the server's code or the client's state."
                f"{self._suspected_attack}",
                clients=clients,
                repeatable=True,
            )

        limit = self.context.loss_limit
        reason = "its model is not finite"
        # No loss is taken after the last step, so a model may be infinite although its loss was not.
        if losses is not None and not float(losses[k]) <= limit:
            reason = f"mean loss {float(losses[k]):.3g}, limit {limit:.3g}"
        return Diverged(
            f"Training diverged on client {self.ids[k]} in round {self.rounds[k]}: {reason}.{self._suspected_attack} "
            f"{self._advice_if_diverged(self.ids[k])}",
            clients=clients,
            repeatable=True,
        )

    @property
    def _suspected_attack(self) -> str:
        """A sentence, after a space, for a run with an attack; else empty."""
        if not self.context.attack:
            return ""
        return (
            f" The attack {self.context.attack!r} may be the cause: try a robust aggregation, such as "
            "aggregation=median or aggregation=clipping."
        )

    def _advice_if_diverged(self, client: int) -> str:
        samples = self.context.samples
        # A population has no targets until its clients work: here, those of the client.
        is_stored = len(samples.labels) > 0
        indices = self.context.union("train") if is_stored else self.context.split(client, "train")
        targets_advice = self.objective.advice_if_diverged(samples.labels_of(indices))
        return f"Lower training.lr ({self.lr:.3g} now) or set training.clip_norm. {targets_advice}".rstrip()
