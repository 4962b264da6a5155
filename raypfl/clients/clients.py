"""A group of clients at work: what a method's client functions are given."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from raypfl.clients.context import Context
from raypfl.clients.fallback import executor_for, run_or_fall_back
from raypfl.clients.state import ClientState
from raypfl.common import rng
from raypfl.common.errors import ClientError, MethodError
from raypfl.common.messages import PerClient, Weighting, inside_a_loss, per_client, unmarked
from raypfl.evaluation.metric_sums import MetricSums
from raypfl.models.extras import Other
from raypfl.models.flat import FlatModel
from raypfl.models.predictor import Predictor
from raypfl.objectives.batch import Batch
from raypfl.optimizers import LocalOptimizer, Update
from raypfl.storage.tree import taken_apart
from raypfl.training.batches import GroupSamples, Order, num_steps, order
from raypfl.training.executor import Executor
from raypfl.training.inference import Answers, Change, for_owners, on_common, on_own
from raypfl.training.loss import LocalLoss, Loss, Report
from raypfl.training.minibatches import MiniBatch, MiniBatches
from raypfl.training.pool import Pool
from raypfl.training.settings import TrainingSettings
from raypfl.training.vectorised import Vectorised


class Clients:
    """A group of K clients in one round. Tensors about the group have a leading client axis.

    Attributes
    ----------
    ids : the clients' numbers.
    round : the round's number, from 1.
    lr : the learning rate that the schedule gives this round.
    objective : what is learned: ``clients.objective.loss(outputs, batch)``.
    model : the clients' network as a function of a flat vector.
    networks : the method's further networks.
    input_shape : of one sample, such as ``(C, H, W)``.
    seed : of the run.
    state : what stays on the clients between rounds.
    """

    def __init__(
        self,
        context: Context,
        ids: tuple[int, ...],
        round: int,
        lr: float,
        states: list[Mapping[str, np.ndarray]] | None = None,
        read_only: bool = False,
    ):
        self.ids = ids
        self.round = round
        self.lr = lr
        self.model = context.model
        self.networks = context.networks
        self.objective = context.objective
        self.num_classes = context.num_classes
        self.input_shape = context.samples.input_shape
        self.seed = context.seed
        self.training = context.training
        self.state = ClientState(states or [{} for _ in ids], context.model.device, read_only)
        self.losses: Tensor | None = None
        self.logged: dict[str, Tensor] = {}
        self._context = context
        self._gathered: dict[str, GroupSamples] = {}
        self._shared: set[int] = set()

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def device(self) -> torch.device:
        """Where the group computes."""
        return self.model.device

    @property
    def context(self) -> Context:
        """What the groups of this process share."""
        return self._context

    @property
    def initial(self) -> Tensor:
        """The model that every client and the server begin with, ``[P+B]``."""
        return self._context.initial

    @property
    def num_samples(self) -> PerClient:
        """``[K]`` training samples of each client, in floating point."""
        return per_client(torch.from_numpy(self._samples("train").sizes).to(self.device, self.model.dtype))

    def weights(self, weighting: Weighting) -> PerClient | None:
        """Weights for :class:`raypfl.Mean`: ``[K]`` training samples, or None, which is the same for all."""
        return self.num_samples if weighting == "samples" else None

    def num_steps(
        self, *, epochs: int | None = None, steps: int | None = None, batch_size: int | None = None
    ) -> PerClient:
        """``[K]`` steps that :meth:`sgd` takes on each client, in floating point; given what it is given."""
        counts = num_steps(self._samples("train").sizes, *self._pace(epochs, steps, batch_size))
        return per_client(torch.from_numpy(counts).to(self.device, self.model.dtype))

    def label_counts(self, split: str = "train") -> PerClient:
        """``[K, num_classes]`` samples of each class; of several labels a sample: how often each is 1.

        Raises
        ------
        MethodError : if targets are numbers or tokens.
        """
        self._refuse_without_classes("label_counts")
        labels = [self._context.samples.labels_of(self._context.split(client, split)) for client in self.ids]
        rows = [y.sum(0) if y.dim() > 1 else torch.bincount(y, minlength=self.num_classes) for y in labels]
        return per_client(torch.stack(rows).to(self.model.dtype))

    def loss(self, p: Tensor, batch: Batch) -> Tensor:
        """One client's objective on a batch, at parameters `p`."""
        return self.objective.loss(self.model(p, batch.x), batch)

    def other(self, theta: Tensor, model: FlatModel | None = None) -> Other:
        """Another model as it is, for a loss beside the one that is trained: a teacher, an earlier model.

        ``clients.sgd(loss, start, teacher=clients.other(theta))`` with ``loss(p, batch, teacher)``: there
        ``teacher(batch.x)`` gives outputs and ``teacher.features(batch.x)`` what goes into the output layer, in
        evaluation mode, with the model's own statistics. Nothing of it moves.

        Parameters
        ----------
        theta : ``[P+B]``, the same for all, or ``[K, P+B]``.
        model : the network; None: the clients'.
        """
        model = model or self.model
        if inside_a_loss():
            raise MethodError(
                "clients.other was called inside a loss, where no gradient would reach what it is given. Call it "
                "before, and pass what it gives by name: clients.sgd(loss, start, teacher=clients.other(theta)). "
                "Outputs and features of the model that is trained are clients.model(p, batch.x) and "
                "clients.model.features(p, batch.x)."
            )
        if theta.shape[-1] != model.size or (theta.dim() > 1 and len(theta) != len(self)):
            raise MethodError(
                f"clients.other needs a whole model vector [{model.size}], or one for each of the group's {len(self)} "
                f"clients; this has shape {list(theta.shape)}."
            )
        vector = unmarked(theta).detach()
        return Other(model, vector if vector.dim() == 1 else per_client(vector))

    def generators(self, stream: str = "") -> list[torch.Generator]:
        """A generator of each client's own draws, the same for the same stream in a round, whatever the group.

        They draw on the CPU, so that any device has the same numbers: ``torch.randn(3, generator=g).to(device)``.
        """
        return [torch.Generator().manual_seed(int(key)) for key in self._keys("generator" + stream)]

    def randn(self, *shape: int, stream: str = "") -> PerClient:
        """``[K, *shape]`` standard normal draws, the same for the same stream in a round, whatever the group."""
        rows = [torch.randn(shape, generator=g, dtype=self.model.dtype) for g in self.generators(stream)]
        return per_client(torch.stack(rows).to(self.device))

    def sgd(
        self,
        loss: Loss,
        start: Tensor,
        *,
        epochs: int | None = None,
        steps: int | None = None,
        batch_size: int | None = None,
        lr: float | None = None,
        optimizer: LocalOptimizer | None = None,
        train: str | Tensor | None = None,
        decay: str | Tensor | None = None,
        stream: str = "",
        penalty: Loss | None = None,
        correction: Tensor | None = None,
        report: Report = "loss",
        **extras: Any,
    ) -> PerClient:
        """Train each client from its start by steps down the gradient on its own training samples.

        Reported as the round's training loss is the mean of `loss` over the mini-batches of all local steps, each at
        the model as it is by then.

        Two calls in one round visit the same batches, so that their results can be compared, unless they name different
        streams.

        Parameters
        ----------
        loss : ``loss(p, batch, **extras) -> scalar`` of one client's parameters ``p[P]``. It may return a pair, the
            loss and what is added to it as by `penalty`, where both come from one forward pass.
        start : ``[P+B]``, the same for all, or ``[K, P+B]``.
        epochs, steps, batch_size, lr, optimizer : instead of the experiment's.
        train : the segments that move (see :meth:`FlatModel.names`), or ``bool[P+B]``; the rest stays bit for bit.
            Batch norm that stays still normalises by the batch.
        decay : the segments, or ``bool[P+B]``, that the experiment's weight decay acts on, if they move; None: all.
        stream : another name, other batches.
        penalty : ``penalty(p, batch, **extras) -> scalar``, added to the loss that is descended, but not reported.
        correction : ``[P]`` or ``[P+B]`` for all, or such a row a client: added to the gradient of every step, before
            clipping and weight decay.
        report : another function of the same form to report, where `loss` is but a surrogate; None: nothing, and the
            round has no training loss.
        extras : passed by name to the loss; with a penalty or a report, to those of them that name it. What came up
            per client (a state, a scattered row, a result) is passed row by row; a model vector among them is cut to
            its parameters, another model (:meth:`other`) stays whole.

        Returns
        -------
        ``[K, P+B]`` trained models.

        Raises
        ------
        ClientError : for clients whose reported loss or model is not finite, or whose loss is above the limit.
        """
        samples, visits = self._visits(epochs, steps, batch_size, stream)
        moving = self.model.mask(train) if isinstance(train, str) else train
        decayed = self.model.mask(decay) if isinstance(decay, str) else decay
        update = self._update(optimizer, lr, moving, decayed)
        rows, keys, local_loss = self._models(start), self._draws(stream), LocalLoss(self.model, loss, penalty, report)
        added, extras = self._corrections(correction), self._checked(extras)
        executor = self._minimiser(local_loss, rows, samples, visits, extras)
        trained, reported = self._or_plainer(
            executor, lambda e: e.sgd(local_loss, rows, samples, visits, update, keys, extras, added)
        )
        self._report(trained, reported if report is not None and visits.index.shape[1] else None)
        return per_client(trained if moving is None else torch.where(moving, trained, rows))

    def minibatches(
        self, *, epochs: int | None = None, steps: int | None = None, batch_size: int | None = None, stream: str = ""
    ) -> Iterator[MiniBatch]:
        """The mini-batches that :meth:`sgd` would visit, for a local step that is more than one of SGD on one model.

        ``for batch in clients.minibatches(): theta = batch.step(loss, theta)`` is ``sgd``; see :meth:`MiniBatch.step`.
        """

        def prepare(local_loss: LocalLoss, rows: Tensor, extras: Mapping[str, Any]) -> Callable[..., Any]:
            executor = self._minimiser(local_loss, rows, samples, visits, self._checked(extras))

            def run(work: Callable[[Executor], Any]) -> Any:
                nonlocal executor
                result, executor = run_or_fall_back(self._context, executor, work)
                return result

            return run

        samples, visits = self._visits(epochs, steps, batch_size, stream)
        keys, vectors = self._draws(stream), (self._models, self._corrections)
        visited = MiniBatches(samples, visits, keys, self.model, *vectors, self._update, prepare)
        yield from visited
        for of, trained in visited.trained.items():
            self._report(trained, visited.mean_loss(of))

    def grad(self, loss: Loss, at: Tensor, batches: list[Batch] | None = None, **extras: Any) -> PerClient:
        """Gradient of each client's mean loss, ``[K, P]``, at ``at`` (``[P+B]`` or ``[K, P+B]``).

        `batches` is what :meth:`batches` gave; None: all training samples of each client.
        """
        keys = self._draws()
        chosen, rows, extras = batches or self._whole("train"), self._rows(at), self._checked(extras)
        local_loss = LocalLoss(self.model, loss)
        executor = self._executor(local_loss, rows[0], chosen[0].some, _unequal(chosen), extras, train=True)
        return per_client(self._or_plainer(executor, lambda e: e.grad(local_loss, rows, chosen, keys, extras)[0]))

    def map(self, function: Loss, at: Tensor, batches: list[Batch] | None = None, **extras: Any) -> PerClient:
        """``function(at[k], batch, **extras)`` of each client, stacked to ``[K, ...]``; networks in evaluation mode.

        `at` is any flat vector, one for all or one a client: the clients' network's, or another's. A function with a
        row for each sample, ``[b, ...]``, gives ``[K, b, ...]`` with the b of the client that has most; zeros stand
        behind the rows of the others.
        """
        keys = self._draws()
        chosen, rows, extras = batches or self._whole("train"), self._rows(at), self._checked(extras)
        with contextlib.ExitStack() as modes:
            for network in self.networks.values():
                modes.enter_context(network.mode(train=False))
            executor = self._executor(function, rows[0], chosen[0].some, _unequal(chosen), extras, train=False)
            values = self._or_plainer(executor, lambda e: e.map(function, rows, chosen, keys, extras))
        return per_client(values.to(self.model.dtype) if values.is_floating_point() else values)

    def vjp(
        self, function: Loss, at: Tensor, cotangent: Tensor, batches: list[Batch] | None = None, **extras: Any
    ) -> PerClient:
        """Pull ``cotangent[K, ...]`` back through what :meth:`map` computes: ``[K, Q]`` for ``at[Q]`` or ``[K, Q]``."""
        p = self._rows(at).detach().clone().requires_grad_()
        with torch.enable_grad():
            rows = self.map(function, p, batches, **extras)
        return per_client(torch.autograd.grad(unmarked(rows), p, unmarked(cotangent))[0])

    def batches(self, size: int, stream: str, split: str = "train") -> list[Batch]:
        """A batch of `size` samples of each client (all it has, if fewer), the same for the same stream in a round."""
        samples = self._samples(split)
        visits = order(self._keys("batch" + stream), samples.sizes, min(size, samples.width), steps=1)
        positions = [torch.from_numpy(visits.index[k, 0, : visits.counts[k, 0]]) for k in range(len(self))]
        return [samples.client(k, p.to(self.device)) for k, p in enumerate(positions)]

    def class_means(
        self, features: Callable[[Tensor, Tensor], Tensor], at: Tensor, split: str = "train"
    ) -> tuple[PerClient, PerClient]:
        """Mean feature of each class on each client; of several labels a sample: of the samples where each is 1.

        Parameters
        ----------
        features : ``features(theta, x[b, ...]) -> [b, d]``.

        Returns
        -------
        ``[K, num_classes, d]``, zero for a class that a client lacks, and counts ``[K, num_classes]``.
        """
        self._refuse_without_classes("class_means")
        classes = self.num_classes

        def one(theta: Tensor, batch: Batch) -> Tensor:
            z = features(theta, batch.x)
            member = batch.y if batch.y.dim() > 1 else F.one_hot(batch.y, classes)
            member = member.to(self.model.dtype) * batch.weight[:, None]
            with torch.autocast(z.device.type, enabled=False):
                return member.T @ z.to(self.model.dtype) / member.sum(0).clamp_min(1)[:, None]

        return self.map(one, at, self._whole(split)), self.label_counts(split)

    def logits(self, theta: Tensor, x: Tensor) -> PerClient:
        """Each client's model on the same inputs ``x[n, ...]``: ``[K, n, classes]``, without gradients."""
        rows, parts = self._rows(theta), x.split(self._context.evaluation_batch)
        with self.model.mode(train=False):
            outputs = self._or_plainer(
                self._context.executor, lambda e: [e.predict(rows, part, own=False) for part in parts]
            )
        return per_client(torch.cat(outputs, dim=1).to(self.model.dtype))

    def pool(self, name: str) -> Pool:
        """Samples that belong to no client (``data.pools``): its mini-batches are those of ``cohort.pool(name)``."""
        return self._context.pools.pool(name, self.round)

    def evaluate(self, theta: Tensor | Predictor, split: str = "test") -> dict[str, PerClient]:
        """Each client's model on its own split: ``samples`` and every metric by name, ``[K]`` each; NaN without any."""
        models, measures = theta if isinstance(theta, Predictor) else self._rows(theta), self._context.measures
        metric_sums = MetricSums(measures)
        rows = metric_sums.values(metric_sums.of(self.answers(models, self.own(split)), len(self))).to(self.device)
        columns = dict(zip(measures.columns, rows.unbind(1), strict=True))
        return {name: per_client(columns[name]) for name in ("samples", *measures.metrics)}

    def own(self, split: str) -> list[np.ndarray]:
        """Numbers of the samples in each client's split, ``int64[n]`` for each client."""
        return [self._context.split(client, split) for client in self.ids]

    def answers(
        self, models: Tensor | Predictor, where: np.ndarray | Sequence[np.ndarray], change: Change | None = None
    ) -> Iterator[Answers]:
        """The outputs of M models, ``[M, P+B]`` or a predictor's, on the samples of these numbers, batch by batch.

        Parameters
        ----------
        where : ``int64[n]``, the same for all models, or a list of one such array a model.
        change : of the inputs of samples that are the same for all.
        """
        context = self._context
        models = models if isinstance(models, Predictor) else unmarked(models)

        def begun(executor: Executor) -> tuple[Answers | None, Iterator[Answers]]:
            size = context.evaluation_batch
            if isinstance(where, np.ndarray):
                parts = on_common(executor, context.samples, models, where, size, change)
            else:
                parts = on_own(executor, context.samples, models, where, size)
            return next(parts, None), parts

        with context.evaluating():
            first, rest = self._or_plainer(context.executor, begun)
            if first is not None:
                yield first
                yield from rest

    def answers_for_owners(self, model: Tensor, where: Sequence[np.ndarray]) -> Iterator[Answers]:
        """The outputs of one model ``[1, P+B]`` on each client's samples ``where[k]``, all in the same batches."""
        return for_owners(self.answers(model, np.concatenate(where)), [len(mine) for mine in where])

    def log(self, **rows: Tensor) -> None:
        """Log numbers ``[K]``, one a client; the run keeps their mean over the cohort, by round.

        They are reduced on the way up, and not charged. What is logged while models are judged is not kept.
        """
        for name, values in rows.items():
            if values.shape != (len(self),):
                raise MethodError(
                    f"clients.log takes one number for each of the group's {len(self)} clients for {name!r}, not "
                    f"{list(values.shape)}."
                )
            self.logged[name] = unmarked(values).detach()

    def portions(self) -> Iterator[Clients]:
        """The group whole, if its clients are taken together; else groups of one, whose states are read-only."""
        if isinstance(self._context.executor, Vectorised) and len(self) > 1:
            yield self
        else:
            for k in range(len(self)):
                yield self.alone(k, read_only=True)

    def alone(self, k: int, read_only: bool = False) -> Clients:
        """The k-th client as a group of one; see :class:`ClientState` for `read_only`."""
        return Clients(self._context, (self.ids[k],), self.round, self.lr, [self.state._rows[k]], read_only)

    def received(self, arguments: Mapping[str, Any]) -> None:
        """Note tensors from the server: as extras, their first axis does not run over clients."""
        self._shared |= {id(a) for a in taken_apart(dict(arguments))[1].values() if not isinstance(a, PerClient)}

    def _samples(self, split: str) -> GroupSamples:
        if split not in self._gathered:
            indices = [self._context.split(c, split) for c in self.ids]
            empty = [c for c, where in zip(self.ids, indices, strict=True) if not len(where)]
            if empty and split == "train":
                raise ClientError(
                    f"There is nothing to train on: client {empty[0]} has no samples in its train split. Give every "
                    "client some, by another partition or fewer clients.",
                    clients=empty,
                    repeatable=True,
                )
            self._gathered[split] = GroupSamples(self._context.samples, indices)
        return self._gathered[split]

    def _whole(self, split: str) -> list[Batch]:
        samples = self._samples(split)
        return [samples.client(k) for k in range(len(self))]

    def _keys(self, purpose: str) -> np.ndarray:
        return rng.keys(self._context.seed, purpose, self.round, self.ids)

    def _draws(self, stream: str = "") -> Tensor:
        return torch.from_numpy(self._keys("draws" + stream).astype(np.int64)).to(self.device)

    def _visits(
        self, epochs: int | None, steps: int | None, batch_size: int | None, stream: str
    ) -> tuple[GroupSamples, Order]:
        samples, (size, epochs, steps) = self._samples("train"), self._pace(epochs, steps, batch_size)
        keys = self._keys("batches" + stream)
        visits = order(keys, samples.sizes, min(size, samples.width), epochs, steps)
        self._refuse_lone_samples(visits.counts)
        if augmentation := self._context.samples.augmentation:
            drawn = self._keys("augmentation" + stream)
            visits = visits.drawn(drawn, sum(one.draws for one in augmentation))
        return samples, visits

    def _pace(self, epochs: int | None, steps: int | None, batch_size: int | None) -> tuple[int, int, int | None]:
        """Batch size, epochs and steps of a call that gives some of them."""
        t = self.training
        if epochs is None and steps is None:
            epochs, steps = t.epochs, t.steps
        return batch_size or t.batch_size, 1 if epochs is None else epochs, steps

    def _update(
        self,
        optimizer: LocalOptimizer | None = None,
        lr: float | None = None,
        moving: Tensor | None = None,
        decayed: Tensor | None = None,
    ) -> Update:
        t, optimizer = self.training, optimizer or self.training.local_optimizer
        if optimizer.per_sample and self.model.mixes_rows:
            raise MethodError(
                f"{type(optimizer).__name__} asks for the gradient of each sample, but batch norm mixes the samples of "
                "a batch; choose a network with group norm."
            )
        if moving is not None and decayed is not None:
            decayed = decayed & moving
        trained, decayed = (mask if mask is None else self.model.parameters(mask) for mask in (moving, decayed))
        return Update(optimizer, self.lr if lr is None else lr, t.weight_decay, t.clip_norm, trained, decayed)

    def _models(self, theta: Tensor) -> Tensor:
        """``[K, P+B]``, of a model vector or of one a client."""
        return self._vectors("A model to train", theta, self.model.size)

    def _corrections(self, correction: Tensor | None) -> Tensor | None:
        """``[K, P]``, of what is added to gradients."""
        if correction is None:
            return None
        return self.model.parameters(
            self._vectors("A correction", correction, self.model.num_parameters, self.model.size)
        )

    def _vectors(self, what: str, given: Tensor, *lengths: int) -> Tensor:
        rows = unmarked(given)
        if rows.shape[-1:] and rows.shape[-1] in lengths and rows.shape[:-1] in ((), (len(self),)):
            return self._rows(rows)
        of = " or ".join(map(str, sorted(set(lengths))))
        raise MethodError(
            f"{what} has the shape {list(rows.shape)}; it must be a vector of {of} numbers for all clients, or "
            f"[{len(self)}, {of}], a row for each client of the group."
        )

    def _rows(self, theta: Tensor) -> Tensor:
        theta = unmarked(theta)
        return theta.expand(len(self), -1) if theta.dim() == 1 else theta

    def _checked(self, extras: Mapping[str, Any]) -> dict[str, Any]:
        for name, extra in extras.items():
            doubtful = isinstance(extra, Tensor) and not isinstance(extra, PerClient) and id(extra) not in self._shared
            if doubtful and len(self) > 1 and extra.dim() and len(extra) == len(self):
                raise MethodError(
                    f"{name!r} has {len(extra)} rows, as many as the group has clients: one for each? Then "
                    f"pass raypfl.per_client({name}); if all clients share it, send it with cohort.run."
                )
        return dict(extras)

    def _minimiser(
        self, local_loss: LocalLoss, rows: Tensor, samples: GroupSamples, visits: Order, extras: Mapping[str, Any]
    ) -> Executor:
        """The executor that trains on these visits."""
        local_loss.refuse_unknown(extras)
        return self._executor(local_loss, rows[0], partial(samples.some, 0), visits.unequal, extras, train=True)

    def _executor(
        self,
        function: Loss,
        at: Tensor,
        some: Callable[[int], Batch],
        unequal: bool,
        extras: Mapping[str, Any],
        train: bool,
    ) -> Executor:
        """The group's executor, unless batches are padded and that would change what this function computes."""
        weighs = self.objective.weighs and function in (self.loss, LocalLoss(self.model, self.loss))
        if weighs or not unequal:
            return self._context.executor
        return executor_for(self._context, function, at, some, extras, train)

    def _or_plainer(self, executor: Executor, work: Callable[[Executor], Any]) -> Any:
        return run_or_fall_back(self._context, executor, work)[0]

    def _refuse_without_classes(self, called: str) -> None:
        if self.objective.targets in ("numbers", "tokens"):
            raise MethodError(
                f"clients.{called} counts classes, but the targets here are {self.objective.targets}. A method that "
                "needs classes says `objectives: ClassVar = (Classification,)`, and is then refused such data."
            )

    def _refuse_lone_samples(self, counts: np.ndarray) -> None:
        lone = np.flatnonzero((counts == 1).any(1))
        if len(lone) and self.model.normalises_vectors:
            raise ClientError(
                f"Client {self.ids[lone[0]]} has a batch of one sample, over which the network's batch norm is "
                "undefined. Choose another training.batch_size, or a network with group norm.",
                clients=[self.ids[k] for k in lone],
                repeatable=True,
            )

    def _report(self, trained: Tensor, losses: Tensor | None) -> None:
        """Take ``losses[K]``, if there are any, as the round's, once neither they nor the models have diverged."""
        # A sum is finite only if all its terms are, and takes a fraction of the time that looking at each would.
        good = torch.isfinite(trained.sum(1))
        if losses is not None:
            good &= torch.isfinite(losses) & (losses <= self._context.loss_limit)
        if not bool(good.all()):
            self._refuse_divergence((~good).nonzero().flatten().tolist(), losses)
        self.losses = self.losses if losses is None else losses

    def _refuse_divergence(self, bad: list[int], losses: Tensor | None) -> None:
        limit, k = self._context.loss_limit, bad[0]
        how = "its model is not finite" if losses is None else f"mean loss {float(losses[k]):.3g}, limit {limit:.3g}"
        raise ClientError(
            f"Training diverged on client {self.ids[k]} in round {self.round}: {how}. "
            f"Lower training.lr ({self.lr:.3g} now) or set training.clip_norm.",
            clients=[self.ids[i] for i in bad],
            repeatable=True,
        )


def _unequal(batches: list[Batch]) -> bool:
    return len({len(batch.y) for batch in batches}) > 1


def learning_rate(settings: TrainingSettings, round: int, rounds: int) -> float:
    """The learning rate under the settings' schedule once `round` rounds are done."""
    lr = settings.lr
    if settings.schedule == "exponential":
        lr *= settings.decay**round
    elif settings.schedule == "cosine":
        lr *= 0.5 * (1 + float(np.cos(np.pi * round / rounds)))
    elif settings.schedule == "step":
        lr *= settings.gamma ** sum(round >= milestone for milestone in settings.milestones)
    if round < settings.warmup_rounds:
        lr *= (round + 1) / settings.warmup_rounds
    return lr
