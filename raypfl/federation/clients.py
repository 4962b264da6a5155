"""A group of clients at work: what a method's client functions are given."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from raypfl import rng
from raypfl.errors import ClientError, MethodError
from raypfl.evaluation.tally import tally
from raypfl.federation.batches import Batch, GroupSamples, Order, order
from raypfl.federation.bench import Bench
from raypfl.federation.client_state import ClientState
from raypfl.federation.executor import Executor, Loss, Sequential, SGDRule, Vectorised
from raypfl.federation.minibatches import MiniBatch, Walk
from raypfl.federation.testing import Answers, Change, for_owners, on_common, on_own
from raypfl.messages import PerClient, per_client, plain
from raypfl.models.flat import FlatModel
from raypfl.models.other import Other
from raypfl.settings import TrainingSettings


class FallenBack(UserWarning):
    """Clients run in a plainer way than the executor that was chosen, for torch cannot run a function so."""

    BECAUSE = " torch says: "


class Clients:
    """A group of K clients in one round. Tensors about the group have a leading client axis.

    Attributes
    ----------
    ids : the clients' numbers.
    round : the round's number, from 1.
    lr : the learning rate that the schedule gives this round.
    model : the clients' network as a function of a flat vector.
    networks : the method's further networks.
    state : what stays on the clients between rounds.
    """

    def __init__(
        self,
        bench: Bench,
        ids: tuple[int, ...],
        round: int,
        lr: float,
        states: list[Mapping[str, np.ndarray]] | None = None,
        lent: bool = False,
    ):
        self.ids = ids
        self.round = round
        self.lr = lr
        self.model = bench.model
        self.networks = bench.networks
        self.num_classes = bench.num_classes
        self.training = bench.training
        self.state = ClientState(states or [{} for _ in ids], bench.model.device, lent)
        self.losses: Tensor | None = None
        self.logged: dict[str, Tensor] = {}
        self._bench = bench
        self._gathered: dict[str, GroupSamples] = {}
        self._shared: set[int] = set()

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def device(self) -> torch.device:
        """Where the group computes."""
        return self.model.device

    @property
    def bench(self) -> Bench:
        """What the groups of this process share."""
        return self._bench

    @property
    def initial(self) -> Tensor:
        """The model that every client and the server begin with, ``[P+B]``."""
        return self._bench.initial

    @property
    def num_samples(self) -> PerClient:
        """``[K]`` training samples of each client, in floating point."""
        return per_client(torch.from_numpy(self._samples("train").sizes).to(self.device, self.model.dtype))

    def label_counts(self, split: str = "train") -> PerClient:
        """``[K, num_classes]`` samples of each class; of several labels a sample: how often each is 1."""
        labels = [self._bench.samples.labels_of(self._bench.split(client, split)) for client in self.ids]
        rows = [y.sum(0) if y.dim() > 1 else torch.bincount(y, minlength=self.num_classes) for y in labels]
        return per_client(torch.stack(rows).to(self.model.dtype))

    def loss(self, p: Tensor, batch: Batch) -> Tensor:
        """One client's mean cross-entropy on a batch, at parameters `p`."""
        return self.cross_entropy(self.model(p, batch.x), batch)

    def cross_entropy(self, logits: Tensor, batch: Batch) -> Tensor:
        """Mean cross-entropy of ``logits[b, classes]`` on a batch; of several labels a sample: the binary one, over
        samples and labels."""
        logits = logits.float() if self._half else logits
        if batch.y.dim() > 1:
            return batch.mean((F.softplus(logits) - batch.y.to(logits.dtype) * logits).mean(1))
        # F.cross_entropy is no single operation under vmap, which takes it to pieces in Python.
        log_probabilities = F.log_softmax(logits, dim=-1)
        return -batch.mean(log_probabilities.gather(1, batch.y[:, None]).squeeze(1))

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
        if theta.shape[-1] != model.size or (theta.dim() > 1 and len(theta) != len(self)):
            raise MethodError(
                f"clients.other needs a whole model vector [{model.size}], or one for each of the group's {len(self)} "
                f"clients; this has shape {list(theta.shape)}."
            )
        vector = plain(theta).detach()
        return Other(model, vector if vector.dim() == 1 else per_client(vector))

    def sgd(
        self,
        loss: Loss,
        start: Tensor,
        *,
        epochs: int | None = None,
        steps: int | None = None,
        batch_size: int | None = None,
        lr: float | None = None,
        train: str | Tensor | None = None,
        decay: str | Tensor | None = None,
        stream: str = "",
        **extras: Any,
    ) -> PerClient:
        """Train each client from its start by SGD on its own training samples.

        Two calls in one round visit the same batches, so that their results can be compared, unless they name different
        streams.

        Parameters
        ----------
        loss : ``loss(p, batch, **extras) -> scalar`` of one client's parameters ``p[P]``.
        start : ``[P+B]``, the same for all, or ``[K, P+B]``.
        epochs, steps, batch_size, lr : instead of the experiment's.
        train : the segments that move (see :meth:`FlatModel.names`), or ``bool[P+B]``; the rest stays bit for bit.
            Batch norm that stays still normalises by the batch.
        decay : the segments, or ``bool[P+B]``, that the experiment's weight decay acts on, if they move; None: all.
        stream : another name, other batches.
        extras : passed to the loss by name. What came up per client (a state, a scattered row, a result) is passed row
            by row; a model vector among them is cut to its parameters, another model (:meth:`other`) stays whole.

        Returns
        -------
        ``[K, P+B]`` trained models.

        Raises
        ------
        ClientError : for clients whose loss or model is not finite, or whose loss is above the limit.
        """
        samples, visits = self._visits(epochs, steps, batch_size, stream)
        moving = self.model.mask(train) if isinstance(train, str) else train
        rule = self._rule(lr, moving, self.model.mask(decay) if isinstance(decay, str) else decay)
        rows, keys, extras = self._rows(start), self._draws(stream), self._checked(extras)
        executor = self._executor(loss, rows[0], partial(samples.some, 0), visits.unequal, extras, train=True)
        trained, losses = self._or_plainer(executor, lambda e: e.sgd(loss, rows, samples, visits, rule, keys, extras))
        self._refuse_divergence(trained, losses)
        self.losses = losses
        return per_client(trained if moving is None else torch.where(moving, trained, rows))

    def walk(
        self, *, epochs: int | None = None, steps: int | None = None, batch_size: int | None = None, stream: str = ""
    ) -> Iterator[MiniBatch]:
        """The mini-batches that :meth:`sgd` would visit, for a local step that is more than one of SGD on one model.

        ``for batch in clients.walk(): theta = batch.step(loss, theta)`` is ``sgd``; see :meth:`MiniBatch.step`.
        """

        def prepare(loss: Loss, rows: Tensor, extras: Mapping[str, Any]) -> Callable[..., Any]:
            extras, some = self._checked(extras), partial(samples.some, 0)
            executor = self._executor(loss, rows[0], some, visits.unequal, extras, train=True)
            return lambda work: self._or_plainer(executor, work)

        samples, visits = self._visits(epochs, steps, batch_size, stream)
        walk = Walk(samples, visits, self._rule(), self._draws(stream), prepare)
        yield from walk
        for of, losses in walk.losses.items():
            self._refuse_divergence(walk.trained[of], losses)
            self.losses = losses

    def grad(self, loss: Loss, at: Tensor, batches: list[Batch] | None = None, **extras: Any) -> PerClient:
        """Gradient of each client's mean loss, ``[K, P]``, at ``at`` (``[P+B]`` or ``[K, P+B]``).

        `batches` is what :meth:`batches` gave; None: all training samples of each client.
        """
        keys = self._draws()
        chosen, rows, extras = batches or self._whole("train"), self._rows(at), self._checked(extras)
        executor = self._executor(loss, rows[0], chosen[0].some, _unequal(chosen), extras, train=True)
        return per_client(self._or_plainer(executor, lambda e: e.grad(loss, rows, chosen, keys, extras)[0]))

    def map(self, function: Loss, at: Tensor, batches: list[Batch] | None = None, **extras: Any) -> PerClient:
        """``function(at[k], batch, **extras)`` of each client, stacked to ``[K, ...]``; networks in evaluation mode.

        `at` is any flat vector, one for all or one a client: the clients' network's, or another's.
        """
        chosen, rows, extras = batches or self._whole("train"), self._rows(at), self._checked(extras)
        with contextlib.ExitStack() as modes:
            for network in self.networks.values():
                modes.enter_context(network.mode(train=False))
            executor = self._executor(function, rows[0], chosen[0].some, _unequal(chosen), extras, train=False)
            values = self._or_plainer(executor, lambda e: e.map(function, rows, chosen, extras))
        return per_client(values.to(self.model.dtype) if values.is_floating_point() else values)

    def vjp(
        self, function: Loss, at: Tensor, cotangent: Tensor, batches: list[Batch] | None = None, **extras: Any
    ) -> PerClient:
        """Pull ``cotangent[K, ...]`` back through what :meth:`map` computes: ``[K, Q]`` for ``at[Q]`` or ``[K, Q]``."""
        p = self._rows(at).detach().clone().requires_grad_()
        with torch.enable_grad():
            rows = self.map(function, p, batches, **extras)
        return per_client(torch.autograd.grad(plain(rows), p, plain(cotangent))[0])

    def batches(self, size: int, stream: str, split: str = "train") -> list[Batch]:
        """A batch of `size` samples of each client (all it has, if fewer), the same for the same stream in a round."""
        samples = self._samples(split)
        visits = order(self._keys("batch" + stream), samples.sizes, size, steps=1)
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
        rows, parts = self._rows(theta), x.split(self._bench.evaluation_batch)
        with self.model.mode(train=False):
            outputs = self._or_plainer(
                self._bench.executor, lambda e: [e.predict(rows, part, own=False) for part in parts]
            )
        return per_client(torch.cat(outputs, dim=1).to(self.model.dtype))

    def pool(self, name: str) -> tuple[Tensor, Tensor]:
        """Samples that belong to no client: normalised inputs ``[n, C, H, W]`` and labels ``[n]``."""
        x, y = self._bench.samples.take(self._bench.pools[name])
        return self._bench.samples.normalise(x), y

    def evaluate(self, theta: Tensor, split: str = "test") -> tuple[PerClient, PerClient, PerClient]:
        """Each client's model on its own split: correct answers, summed loss and samples, each ``[K]``."""
        sums = tally(self.answers(self._rows(theta), self.own(split)), len(self)).to(self.device)
        return per_client(sums[:, 1]), per_client(sums[:, 2]), per_client(sums[:, 0])

    def own(self, split: str) -> list[np.ndarray]:
        """Numbers of the samples in each client's split, ``int64[n]`` for each client."""
        return [self._bench.split(client, split) for client in self.ids]

    def answers(
        self, models: Tensor, where: np.ndarray | Sequence[np.ndarray], change: Change | None = None
    ) -> Iterator[Answers]:
        """The outputs of models ``[M, P+B]`` on the samples of these numbers, batch by batch.

        Parameters
        ----------
        where : ``int64[n]``, the same for all models, or a list of one such array a model.
        change : of the inputs of samples that are the same for all.
        """
        bench, models = self._bench, plain(models)

        def begun(executor: Executor) -> tuple[Answers | None, Iterator[Answers]]:
            size = bench.evaluation_batch
            if isinstance(where, np.ndarray):
                parts = on_common(executor, bench.samples, models, where, size, change)
            else:
                parts = on_own(executor, bench.samples, models, where, size)
            return next(parts, None), parts

        with self.model.mode(train=False):
            first, rest = self._or_plainer(bench.executor, begun)
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
            self.logged[name] = plain(values).detach()

    def portions(self) -> Iterator[Clients]:
        """The group whole, if its clients are taken together; else in groups of one, whose states are lent."""
        if isinstance(self._bench.executor, Vectorised) and len(self) > 1:
            yield self
        else:
            for k in range(len(self)):
                yield self.alone(k, lent=True)

    def alone(self, k: int, lent: bool = False) -> Clients:
        """The k-th client as a group of one; see :class:`ClientState` for `lent`."""
        return Clients(self._bench, (self.ids[k],), self.round, self.lr, [self.state._rows[k]], lent)

    def received(self, arguments: Mapping[str, Any]) -> None:
        """Note the round's broadcasts, which an extra may be without a doubt about its first axis."""
        self._shared = {id(a) for a in arguments.values() if isinstance(a, Tensor) and not isinstance(a, PerClient)}

    @property
    def _half(self) -> bool:
        return self.training.precision == "bf16"

    def _samples(self, split: str) -> GroupSamples:
        if split not in self._gathered:
            indices = [self._bench.split(c, split) for c in self.ids]
            empty = [c for c, where in zip(self.ids, indices, strict=True) if not len(where)]
            if empty and split == "train":
                raise ClientError(
                    f"There is nothing to train on: client {empty[0]} has no samples in its train split. Give every "
                    "client some, by another partition or fewer clients.",
                    clients=empty,
                    repeatable=True,
                )
            self._gathered[split] = GroupSamples(self._bench.samples, indices)
        return self._gathered[split]

    def _whole(self, split: str) -> list[Batch]:
        samples = self._samples(split)
        return [samples.client(k) for k in range(len(self))]

    def _keys(self, purpose: str) -> np.ndarray:
        return rng.keys(self._bench.seed, purpose, self.round, self.ids)

    def _draws(self, stream: str = "") -> Tensor:
        return torch.from_numpy(self._keys("draws" + stream).astype(np.int64)).to(self.device)

    def _visits(
        self, epochs: int | None, steps: int | None, batch_size: int | None, stream: str
    ) -> tuple[GroupSamples, Order]:
        t, samples = self.training, self._samples("train")
        if epochs is None and steps is None:
            epochs, steps = t.epochs, t.steps
        keys, size = self._keys("batches" + stream), batch_size or t.batch_size
        visits = order(keys, samples.sizes, size, 1 if epochs is None else epochs, steps)
        self._refuse_lone_samples(visits.counts)
        if augmentation := self._bench.samples.augmentation:
            drawn = self._keys("augmentation" + stream)
            visits = visits.drawn(drawn, sum(one.draws for one in augmentation))
        return samples, visits

    def _rule(self, lr: float | None = None, moving: Tensor | None = None, decayed: Tensor | None = None) -> SGDRule:
        t = self.training
        if moving is not None and decayed is not None:
            decayed = decayed & moving
        trained, decayed = (mask if mask is None else self.model.parameters(mask) for mask in (moving, decayed))
        lr = self.lr if lr is None else lr
        return SGDRule(lr, t.momentum, t.nesterov, t.weight_decay, t.clip_norm, trained, decayed)

    def _rows(self, theta: Tensor) -> Tensor:
        theta = plain(theta)
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

    def _executor(
        self,
        function: Loss,
        at: Tensor,
        some: Callable[[int], Batch],
        unequal: bool,
        extras: Mapping[str, Any],
        train: bool,
    ) -> Executor:
        """The group's executor, unless batches are padded and that would change what this function computes.

        ``some(n)`` gives at most n samples of the first client.
        """
        executor = self._bench.executor
        if not unequal or not isinstance(executor, Vectorised) or function == self.loss:
            return executor
        if executor.respects_padding(function, at, some(self.training.batch_size), extras, train):
            return executor
        warnings.warn(
            f"The function {getattr(function, '__qualname__', function)} does not weigh its samples with batch.weight, "
            "so its clients run one by one; use batch.mean(values) to run them together.",
            stacklevel=3,
        )
        return self._bench.one_by_one

    def _or_plainer(self, executor: Executor, work: Callable[[Executor], Any]) -> Any:
        """The result of `work`; where torch cannot do it so, in the next plainer way, with a warning."""
        try:
            return work(executor)
        except RuntimeError as error:
            said = str(error)
            if isinstance(executor, Vectorised) and any(sign in said for sign in ("vmap", "have storage")):
                plainer, what = self._bench.one_by_one, "cannot be vectorised, so clients run one by one"
            elif isinstance(executor, Sequential) and executor.precision.channels_last and "view size is not" in said:
                plainer, what = self._bench.unlaid, "does not work on images channels last, so they stay as they are"
            else:
                raise
            because = FallenBack.BECAUSE + said.splitlines()[0]
            warnings.warn(f"A function of this method {what}.{because}", FallenBack, stacklevel=3)
        return self._or_plainer(plainer, work)

    def _refuse_lone_samples(self, counts: np.ndarray) -> None:
        lone = np.flatnonzero((counts == 1).any(1))
        if len(lone) and self.model.normalises_vectors:
            raise ClientError(
                f"Client {self.ids[lone[0]]} has a batch of one sample, over which the network's batch norm is "
                "undefined. Choose another training.batch_size, or a network with group norm.",
                clients=[self.ids[k] for k in lone],
                repeatable=True,
            )

    def _refuse_divergence(self, trained: Tensor, losses: Tensor) -> None:
        # A sum is finite only if all its terms are, and takes a fraction of the time that looking at each would.
        good = torch.isfinite(losses) & (losses <= self._bench.loss_limit) & torch.isfinite(trained.sum(1))
        if not bool(good.all()):
            k = int((~good).nonzero()[0])
            bad = [self.ids[i] for i in (~good).nonzero().flatten().tolist()]
            raise ClientError(
                f"Training diverged on client {self.ids[k]} in round {self.round}: mean loss {float(losses[k]):.3g}, "
                f"limit {self._bench.loss_limit:.3g}. Lower training.lr ({self.lr:.3g} now) or set training.clip_norm.",
                clients=bad,
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
