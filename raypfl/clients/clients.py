"""The group of clients that a method's client function gets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from raypfl.clients.group import ClientGroup
from raypfl.clients.steps.local_training import prepare_training, refuse_moved_statistics, training_length
from raypfl.clients.steps.minibatches import MiniBatch, MiniBatches
from raypfl.common.errors import MethodError, PrivacyError, did_you_mean
from raypfl.common.messages import PerClient, Weighting, inside_a_loss, per_client, unmarked
from raypfl.common.transfer import to_device
from raypfl.learning.executor import Executor, GroupTraining
from raypfl.learning.loss import LocalLoss, LossFunction, ReportedLoss
from raypfl.learning.objectives.batch import Batch
from raypfl.learning.optimizers import LocalOptimizer, Perturb
from raypfl.learning.sample_order import epoch_order, num_steps, share_of_steps
from raypfl.learning.sample_pools import Pool
from raypfl.learning.vectorised import Vectorised
from raypfl.models.extras import Other
from raypfl.models.flat import FlatModel
from raypfl.models.predictor import Predictor

WITHOUT_CONTENTS = frozenset(
    {
        *("device", "ids", "initial", "input_shape", "lr", "model", "networks", "num_classes", "num_samples"),
        *("complete", "objective", "round", "seed", "state", "training"),
        *("compute", "generators", "log", "logits", "loss", "num_steps", "other", "pool", "randn", "weights"),
    }
)
"""Names of `Clients` that depend on the number of a client's samples, but not on their contents."""

WITH_NOISE = frozenset({"minibatches", "sgd"})
"""Names of `Clients` that read protected training samples by DP-SGD."""


_AS_A_GROUP = (
    "clients.sgd(clients.loss, theta) trains each client on its own samples, and `for batch in clients.minibatches(): "
    "theta = batch.step(clients.loss, theta)` does the same step by step; results have a row for each client."
)


class Clients:
    """A group of K clients in one round. Tensors about the group have a leading client axis.

    Attributes
    ----------
    ids : the clients' numbers.
    lr : the learning rate that the schedule gives this round.
    state : the clients' state, which persists between rounds.
    model : the clients' network as a function of a flat vector.
    networks : the method's further networks.
    loss : the objective on one client's batch at the network's parameters ``p[P]``: ``loss(p, batch) -> scalar``.
    objective : the objective of training: ``clients.objective.loss(outputs, batch)``.
    training : the experiment's settings of local training.
    num_classes : the number of classes, or of the network's outputs.
    input_shape : the shape of one sample, such as ``(C, H, W)``.
    seed : the run's seed.
    device : the device on which the group computes.

    If ``privacy.noise`` protects samples, only the names in `WITHOUT_CONTENTS` and `WITH_NOISE` can be used.
    """

    _shared_by_runs: ClassVar = frozenset({"loss", "model", "num_classes", "objective", "training"})

    def __new__(cls, group: ClientGroup) -> Clients:
        # Unprotected clients skip ProtectedClients' check, which takes time with every name that a method uses.
        return object.__new__(ProtectedClients if group.context.privacy.protects_samples else cls)

    def __init__(self, group: ClientGroup):
        context = group.context
        self._group = group
        self._context = context
        self.ids = group.ids
        self.lr = group.lr
        self.state = group.state
        self.model = context.model
        self.networks = context.networks
        self.loss = group.loss
        self.objective = group.objective
        self.training = context.training
        self.num_classes = context.num_classes
        self.input_shape = context.samples.input_shape
        self.seed = context.seed
        self.device = context.model.device

    def __len__(self) -> int:
        return len(self.ids)

    def __iter__(self) -> NoReturn:
        raise MethodError(f"clients is a group that computes together, so no loop goes over it. {_AS_A_GROUP}")

    def __getitem__(self, index: object) -> NoReturn:
        raise MethodError(
            f"clients is a group that computes together, so there is no clients[{index!r}]. {_AS_A_GROUP} "
            "Their numbers are clients.ids."
        )

    def __getattr__(self, name: str) -> NoReturn:
        names = [member for member in (*dir(type(self)), *vars(self)) if not member.startswith("_")]
        raise AttributeError(f"clients has no {name!r}; {did_you_mean(name, names)} {_AS_A_GROUP}")

    @property
    def round(self) -> int:
        """The round's number, from 1. In an asynchronous run, clients in different rounds have none in common."""
        return self._group.round

    @property
    def _lasting(self) -> dict[str, tuple[Any, ...]]:
        """See :meth:`ClientGroup._lasting`. Empty: functions of `Clients` may give other results in another round."""
        return {}

    @property
    def initial(self) -> Tensor:
        """The model that every client and the server begin with, ``[P+B]``."""
        self._group.share({"clients.initial": self._context.initial})
        return self._context.initial

    def complete(self, theta: Tensor) -> Tensor:
        """Return the server's model ``[P+B]`` as one of these clients' network.

        It is `theta` itself, unless clients have different architectures. The server then has only the output layer,
        and all else has its initial values.
        """
        if self._context.architecture_of is None:
            return theta
        return self.initial.masked_scatter(self.model.mask("output layer"), theta)

    @property
    def losses(self) -> Tensor | None:
        """``[K]``: the losses that the last training reported; None if it reported none."""
        return self._group.losses

    @property
    def num_samples(self) -> PerClient:
        """``[K]``: each client's number of training samples, in floating point."""
        return self._numbers(self._group.samples("train").sizes)

    def weights(self, weighting: Weighting) -> PerClient | None:
        """Return weights for :class:`raypfl.Mean`: the training samples ``[K]``, or None for equal weights."""
        return self.num_samples if weighting == "samples" else None

    def num_steps(
        self, *, epochs: int | None = None, steps: int | None = None, batch_size: int | None = None
    ) -> PerClient:
        """Return the steps ``[K]`` that :meth:`sgd` takes on each client with the same arguments, in floating point."""
        sizes = self._group.samples("train").sizes
        batch_size, epochs, steps = training_length(self.training, epochs, steps, batch_size)
        all_steps = num_steps(sizes, batch_size, epochs, steps, self.training.smallest_batch)
        work = self._group.work
        return self._numbers(all_steps if work is None else share_of_steps(all_steps, work))

    def label_counts(self, split: str = "train") -> PerClient:
        """Count the samples of each class, ``[K, num_classes]``; with several labels per sample, how often each is 1.

        Raises
        ------
        MethodError : if targets are numbers or tokens.
        """
        self._refuse_without_classes("label_counts")
        return per_client(self._group.label_counts(split).to(self.model.dtype))

    def other(self, theta: Tensor, model: FlatModel | None = None) -> Other:
        """Freeze a model for use in a loss: a teacher, an earlier model.

        With ``clients.sgd(loss, start, teacher=clients.other(theta))`` and ``loss(p, batch, teacher)``,
        ``teacher(batch.x)`` returns outputs and ``teacher.features(batch.x)`` the input of the output layer, in
        evaluation mode, with the model's own statistics.

        Parameters
        ----------
        theta : the model vector, ``[P+B]`` for all clients, or ``[K, P+B]``.
        model : the network; None: the clients'.
        """
        model = model or self.model

        if inside_a_loss():
            raise MethodError(
                "clients.other was called inside a loss, where no gradient would reach its argument. Call it "
                "before, and pass the result by name: clients.sgd(loss, start, teacher=clients.other(theta)). "
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
        """Return a random generator for each client, keyed by seed, round, client and stream, not by the group.

        They draw on the CPU, so that all devices get the same numbers: ``torch.randn(3, generator=g).to(device)``.
        """
        return [torch.Generator().manual_seed(int(key)) for key in self._group.keys("generator" + stream)]

    def randn(self, *shape: int, stream: str = "") -> PerClient:
        """Return standard normal draws ``[K, *shape]`` from :meth:`generators`."""
        rows = []
        for generator in self.generators(stream):
            rows.append(torch.randn(shape, generator=generator, dtype=self.model.dtype))
        return per_client(to_device(torch.stack(rows).numpy(), self.device))

    def sgd(
        self,
        loss: LossFunction,
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
        penalty: LossFunction | None = None,
        correction: Tensor | None = None,
        perturb: Perturb | None = None,
        report: ReportedLoss = "loss",
        **extras: Any,
    ) -> PerClient:
        """Train each client by gradient steps on its own training samples.

        The round's training loss is the mean of `loss` over the mini-batches of all local steps, each at the model
        before the step. Two calls in one round visit the same batches unless they name different streams.

        Parameters
        ----------
        loss : the loss of one client's parameters ``p[P]``: ``loss(p, batch, **extras) -> scalar``. It may return a
            pair, the loss and a penalty, if both come from one forward pass.
        start : the initial models, ``[P+B]`` for all clients, or ``[K, P+B]``.
        epochs, steps, batch_size, lr, optimizer : the length and the rule of the training; None: the experiment's.
        train : the segments to train (see :meth:`FlatModel.names`), or ``bool[P+B]``; the rest keeps its
            bits. Batch norm that is not trained still normalises by the batch.
        decay : the trained segments, or ``bool[P+B]``, that the experiment's weight decay acts on; None: all.
        stream : the name of a stream of batches; another name gives other batches.
        penalty : a term that is added to the loss and not reported: ``penalty(p, batch, **extras) -> scalar``.
        correction : a vector that is added to the gradient of every step, before clipping and weight decay: ``[P]`` or
            ``[P+B]`` for all clients, or a row per client.
        perturb : ``perturb(p, gradient) -> [..., P]``, of parameters and gradients ``[..., P]``: every step follows the
            gradient at ``p + perturb(p, gradient)`` of the same batch, with the same draws. Reported losses and
            statistics (of batch norm, or of ``model.running_mean``) are those at `p`, as is the gradient of a penalty
            that does not depend on the batch.
        report : another function of the same form to report instead of `loss`; None: report nothing, so that the round
            has no training loss.
        extras : further arguments of the loss, by name; with a penalty or a report, of each function that names them.
            Tensors with a row per client (a state, a scattered row, a result) are passed row by row. A model vector is
            cut to its parameters; a frozen model (:meth:`other`) is not.

        Returns
        -------
        ``[K, P+B]`` trained models.

        Raises
        ------
        ClientError : if a client's reported loss or model is not finite, or its loss is above the limit.
        """
        group = self._group
        prepared = prepare_training(group, epochs, steps, batch_size, stream)
        order = prepared.order
        trainable = self._mask(train)
        update = group.update(optimizer, lr, trainable, self._mask(decay), prepared.rule, perturb)

        rows = group.models(start)
        training = GroupTraining(
            loss=LocalLoss(self.model, loss, penalty, report),
            start=rows,
            samples=group.samples("train"),
            order=order,
            update=update,
            keys=prepared.keys,
            extras=group.extras(extras),
            correction=group.corrections(correction),
        )
        observe = None if group.observer is None else group.observer.training(rows, order, update.lr)

        executor = group.trainer(training.loss, rows, order, training.extras)
        trained, losses = group.run(executor, lambda executor: executor.sgd(training, observe))

        if prepared.rule is not None:
            refuse_moved_statistics(self.model.buffers(rows), self.model.buffers(trained))
        has_steps = order.index.shape[1] > 0
        group.report(trained, losses if report is not None and has_steps else None, rows)
        if trainable is not None:
            trained = torch.where(trainable, trained, rows)
        if observe is not None:
            observe.finish(trained)
        return per_client(trained)

    def minibatches(
        self, *, epochs: int | None = None, steps: int | None = None, batch_size: int | None = None, stream: str = ""
    ) -> Iterator[MiniBatch]:
        """Yield the mini-batches that :meth:`sgd` would visit, for local steps other than SGD on one model.

        ``for batch in clients.minibatches(): theta = batch.step(loss, theta)`` is ``sgd``; see :meth:`MiniBatch.step`.
        """
        batches = MiniBatches(self._group, prepare_training(self._group, epochs, steps, batch_size, stream))
        yield from batches
        batches.report()

    def grad(self, loss: LossFunction, at: Tensor, batches: list[Batch] | None = None, **extras: Any) -> PerClient:
        """Return the gradient ``[K, P]`` of each client's mean loss, at ``at`` (``[P+B]`` or ``[K, P+B]``).

        `batches` come from :meth:`batches`; None: all training samples of each client. The gradient in something other
        than a model is :meth:`vjp`'s.
        """
        group = self._group
        local_loss = LocalLoss(self.model, loss)
        keys = group.draws()
        chosen = batches or group.full_batches("train")
        rows = group.rows(at)
        extras = group.extras(extras)

        preferred = group.executor_for(local_loss, rows[0], chosen[0].subset, _sizes_differ(chosen), extras, train=True)
        gradients = group.run(preferred, lambda executor: executor.grad(local_loss, rows, chosen, keys, extras)[0])
        return per_client(gradients)

    def map(self, function: LossFunction, at: Tensor, batches: list[Batch] | None = None, **extras: Any) -> PerClient:
        """Return ``function(at[k], batch, **extras)`` of each client, ``[K, ...]``; networks are in evaluation mode.

        `at` is any flat vector, for all clients or one per client, of any network. If the function returns a row for
        each sample, ``[b, ...]``, the result is ``[K, b, ...]`` for the largest b, padded with zeros.
        """
        group = self._group
        keys = group.draws()
        chosen = batches or group.full_batches("train")
        rows = group.rows(at)
        extras = group.extras(extras)

        with self._context.evaluating():
            sizes_differ = _sizes_differ(chosen)
            preferred = group.executor_for(function, rows[0], chosen[0].subset, sizes_differ, extras, train=False)
            values = group.run(preferred, lambda executor: executor.map(function, rows, chosen, keys, extras))
        return per_client(values.to(self.model.dtype) if values.is_floating_point() else values)

    def compute(self, function: Callable[..., Sequence[Tensor]], *rows: Tensor) -> list[PerClient]:
        """Return ``function(*rows)``, from and to tensors ``[n, ...]`` with a row for each of n clients.

        The function is called once if clients run together, else with one client's rows at a time.
        """
        tensors = [unmarked(tensor) for tensor in rows]

        def apply(executor: Executor) -> list[Tensor]:
            size = len(tensors[0]) if isinstance(executor, Vectorised) else 1
            pieces = [tensor.split(size) for tensor in tensors]
            results = [function(*arguments) for arguments in zip(*pieces, strict=True)]
            return [torch.cat(parts) for parts in zip(*results, strict=True)]

        return [per_client(result) for result in self._group.run(self._context.executor, apply)]

    def vjp(
        self, function: LossFunction, at: Tensor, cotangent: Tensor, batches: list[Batch] | None = None, **extras: Any
    ) -> PerClient:
        """Pull ``cotangent[K, ...]`` back through the result of :meth:`map`: ``[K, Q]`` for ``at[Q]`` or ``[K, Q]``."""
        p = self._group.rows(at).detach().clone().requires_grad_()
        with torch.enable_grad():
            rows = self.map(function, p, batches, **extras)
        return per_client(torch.autograd.grad(unmarked(rows), p, unmarked(cotangent))[0])

    def batches(self, size: int, stream: str, split: str = "train") -> list[Batch]:
        """Draw a random batch of `size` samples of each client (all it has, if fewer), keyed by round and stream.

        Raises
        ------
        ClientError : if a client has no samples in the split.
        """
        self._group.refuse_empty(split)
        samples = self._group.samples(split)
        order = epoch_order(self._group.keys("batch" + stream), samples.sizes, min(size, samples.width), steps=1)

        return [samples.steps(k, order, normalise_once=False)(0) for k in range(len(self))]

    def class_means(
        self, features: Callable[[Tensor, Tensor], Tensor], at: Tensor, split: str = "train"
    ) -> tuple[PerClient, PerClient]:
        """Return each client's mean feature of each class, or of each label if samples have several.

        Parameters
        ----------
        features : the function ``features(theta, x[b, ...]) -> [b, d]``.

        Returns
        -------
        ``[K, num_classes, d]``, zero for classes that a client lacks, and counts ``[K, num_classes]``.
        """
        self._refuse_without_classes("class_means")
        classes = self.num_classes

        def means_of_client(theta: Tensor, batch: Batch) -> Tensor:
            z = features(theta, batch.x)
            member = batch.y if batch.y.dim() > 1 else F.one_hot(batch.y, classes)
            member = member.to(self.model.dtype) * batch.weight[:, None]
            with torch.autocast(z.device.type, enabled=False):
                return member.T @ z.to(self.model.dtype) / member.sum(0).clamp_min(1)[:, None]

        return self.map(means_of_client, at, self._group.full_batches(split)), self.label_counts(split)

    def logits(self, theta: Tensor, x: Tensor) -> PerClient:
        """Return each client's logits ``[K, n, classes]`` on the same inputs ``x[n, ...]``, without gradients."""
        rows = self._group.rows(theta)
        parts = x.split(self._context.evaluation_batch)
        with self.model.mode(train=False):
            outputs = self._group.run(
                self._context.executor,
                lambda executor: [executor.predict(rows, part, own_inputs=False) for part in parts],
            )
        return per_client(torch.cat(outputs, dim=1).to(self.model.dtype))

    def pool(self, name: str) -> Pool:
        """Return samples that belong to no client (``data.pools``), in the mini-batches of ``cohort.pool(name)``."""
        return self._context.pools.pool(name, self.round)

    def evaluate(self, theta: Tensor | Predictor, split: str) -> dict[str, PerClient]:
        """Evaluate each client's model on its own split: ``samples`` and metrics, ``[K]`` each; NaN without samples.

        Parameters
        ----------
        theta : the models, ``[P+B]`` for all clients, or ``[K, P+B]``; or a predictor.
        split : the split: ``train``, ``val`` or ``test``. Training may not read test samples (:class:`raypfl.Method`).
        """
        context = self._context
        models = theta if isinstance(theta, Predictor) else self._group.rows(theta)
        metric_sums = context.metric_sums()
        sums = metric_sums.accumulate(context.model_outputs(models, self._group.split(split)), len(self))

        rows = to_device(metric_sums.values(sums).numpy(), self.device)
        columns = dict(zip(context.measures.columns, rows.unbind(1), strict=True))
        return {name: per_client(columns[name]) for name in ("samples", *context.measures.metrics)}

    def log(self, **rows: Tensor) -> None:
        """Log numbers ``[K]``, one per client; the run keeps their mean over the cohort, by round.

        NaN stands for a client that has nothing to log, and is left out of the mean. The numbers are reduced on the
        actors and not charged. Numbers logged during evaluation are not kept.
        """
        for name, values in rows.items():
            # A single number is refused: it might be a statistic of the group, and so depend on the group's size.
            if not isinstance(values, Tensor) or values.shape != (len(self),):
                given = list(values.shape) if isinstance(values, Tensor) else f"a {type(values).__name__}"
                raise MethodError(
                    f"clients.log takes one number for each of the group's {len(self)} clients for {name!r}, a tensor "
                    f"of shape [{len(self)}], not {given}. To log one number of the round, call "
                    f"cohort.log({name}=...) in round()."
                )
            self._group.logged[name] = unmarked(values).detach()

    def _mask(self, segments: str | Tensor | None) -> Tensor | None:
        return self.model.mask(segments) if isinstance(segments, str) else segments

    def _numbers(self, counts: np.ndarray) -> PerClient:
        return per_client(to_device(counts, self.device).to(self.model.dtype))

    def _refuse_without_classes(self, method_name: str) -> None:
        if self.objective.targets in ("numbers", "tokens"):
            raise MethodError(
                f"clients.{method_name} counts classes, but the targets here are {self.objective.targets}. A method "
                "that needs classes declares `objectives: ClassVar = (Classification,)`; such data are then refused."
            )


class ProtectedClients(Clients):
    """Clients whose training samples are protected: names that could leak them are refused."""

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if name.startswith("_") or name in WITHOUT_CONTENTS or name in WITH_NOISE:
            return value
        raise PrivacyError(
            f"clients.{name} reads clients' data without noise, so privacy.noise would not hold. Choose a method "
            "(or an option) that reads data only by clients.sgd and clients.minibatches, or set privacy.unit=client, "
            "or leave privacy out."
        )


def _sizes_differ(batches: list[Batch]) -> bool:
    return len({len(batch.y) for batch in batches}) > 1
