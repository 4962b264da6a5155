"""What runs a function of one client for a whole group: clients one by one here, all at once in :mod:`.vectorised`.

A *loss* here is a :class:`LocalLoss` of one client's trainable parameters ``p[P]``, a batch and extras; a *function* is
the same with any output. Extras are ``{name: tensor}``; those that are :class:`PerClient` have a row for each client.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from raypfl.common import streams
from raypfl.common.messages import one_client_at_a_time
from raypfl.learning.batches import Batches, GroupSamples, SampleOrder
from raypfl.learning.descent import Descent, assemble, by_samples, gradients_of, sample_keys, segments, still_segments
from raypfl.learning.loss import LocalLoss, LossFunction
from raypfl.learning.objectives.batch import Batch
from raypfl.learning.optimizers import Update
from raypfl.models.extras import Extras, of_client, without_buffers
from raypfl.models.flat import BoundModel, FlatModel, FunctionalCall, LossCall
from raypfl.models.predictor import Predictor
from raypfl.models.rowwise import RowWise


@dataclass(frozen=True)
class Precision:
    """How the forward and backward passes are computed: bf16 autocast or not, and the layout of images."""

    autocast: bool = False
    channels_last: bool = False

    def context(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        """The autocast context for `device`."""
        return torch.autocast(device.type, torch.bfloat16) if self.autocast else contextlib.nullcontext()

    def layout(self, x: Tensor) -> Tensor:
        """A batch of images in the chosen layout."""
        return x.contiguous(memory_format=torch.channels_last) if self.channels_last and x.dim() == 4 else x


StepCallback = Callable[[int, int, Tensor], None]
"""Called with a client's row, the number of a step, and the model vector ``[P+B]`` from which the step starts."""

DEFAULT_PRECISION = Precision()
"""No autocast, and images in the layout that they have."""


class Executor:
    """Runs functions of one client for a group, one client after the other.

    A client trains on an ordinary module whose parameters are views of a flat vector. A subclass may run clients in
    another way; all agree up to floating-point rounding.
    """

    def __init__(self, model: FlatModel, precision: Precision = DEFAULT_PRECISION):
        self.model = model
        self.precision = precision

    @torch.enable_grad()
    def sgd(
        self,
        loss: LocalLoss,
        start: Tensor,
        samples: GroupSamples,
        visits: SampleOrder,
        update: Update,
        keys: Tensor,
        extras: Extras,
        correction: Tensor | None = None,
        observe: StepCallback | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Train from ``start[K, P+B]``; returns ``(trained[K, P+B], mean reported loss[K])``.

        ``correction[K, P]`` is added to all gradients. `observe` is called before each client's steps.
        """
        trained = copied(start)
        losses = torch.zeros(len(start), dtype=start.dtype, device=start.device)
        with self.model.bound() as bound, self.model.mode(train=True), streams.forked(start.device):
            still = still_segments(self.model, update)
            for k, steps in enumerate(visits.steps):
                added = None if correction is None else correction[k]
                descent = self._begun(bound, trained[k], still, update, keys[k], added)
                mine = without_buffers(self.model, of_client(extras, k))
                own, taken = samples.steps(k, visits), loss
                if update.sample_rule is not None:
                    taken = loss.for_samples(descent.theta, mine)
                for s in range(steps):
                    if observe is not None:
                        observe(k, s, trained[k])
                    reported = self._step(taken, bound, descent, self._batch(own(s)), keys[k] + s, mine)
                    losses[k] += reported / int(steps)
        return trained, losses

    @torch.enable_grad()
    def train_one(
        self,
        loss: LocalLoss,
        theta: Tensor,
        batches: Iterable[Batch],
        update: Update,
        rate: Callable[[int], float],
        key: Tensor,
        extras: Extras,
        training: bool = True,
    ) -> Iterator[Tensor]:
        """Train one model ``theta[P+B]`` in place, a step per batch; yields what each step reports.

        Parameters
        ----------
        rate : the learning rate of each step, in place of the update's.
        training : whether the network is in training mode in steps; it never is while batches are made.
        """
        mine, still = without_buffers(self.model, dict(extras)), still_segments(self.model, update)
        with self.model.bound() as bound, streams.forked(theta.device):
            descent = self._begun(bound, theta, still, update, key)
            for s, batch in enumerate(self._drawn(batches)):
                descent.update = replace(update, lr=rate(s))
                with self.model.mode(training):
                    reported = self._step(loss, bound, descent, self._batch(batch), key + s, mine)
                yield reported

    def _drawn(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        waiting = iter(batches)
        while True:
            with self.model.mode(train=False), torch.no_grad():
                batch = next(waiting, None)
            if batch is None:
                return
            yield batch

    def _begun(
        self,
        bound: BoundModel,
        vector: Tensor,
        still: Set[str],
        update: Update,
        key: Tensor,
        correction: Tensor | None = None,
    ) -> Descent:
        """The steps of a model vector ``[P+B]``, which is trained in place."""
        bound.bind(vector, still)
        streams.seed(vector.device, int(key))
        memory = update.init(self.model.parameters(vector))
        return Descent(self.model, update, bound.parameters, bound.tensors, memory, correction)

    def _step(
        self, loss: LocalLoss, bound: BoundModel, descent: Descent, batch: Batch, key: Tensor, extras: dict[str, Any]
    ) -> Tensor:
        """Take a step; returns what is reported."""
        if descent.update.sample_rule is not None:
            slope = partial(self._slope, loss, bound, extras)
            gradient, reported = self._by_samples(descent.update, descent.theta, batch, key, slope)
            self._add_pull(loss, descent.theta, extras, gradient)
            descent.step_whole(gradient)
            return reported
        value, reported = self._value(loss, bound, bound.parameters, extras, batch, key)
        descent.step(*gradients_of(value, bound.tensors, bound.parameters))
        return reported.detach()

    def _add_pull(self, loss: LocalLoss, at: Tensor, extras: dict[str, Any], gradient: Tensor) -> None:
        """Add the gradient of a penalty that is apart from the samples' loss."""
        if loss.apart:
            p = at.detach().requires_grad_()
            with one_client_at_a_time():
                gradient += torch.autograd.grad(loss.pull(p, extras), p)[0]

    def _slope(
        self, loss: LocalLoss, bound: BoundModel, extras: dict[str, Any], batch: Batch, key: Tensor
    ) -> tuple[Tensor, Tensor]:
        value, reported = self._value(loss, bound, bound.parameters, extras, batch, key)
        slope = torch.empty_like(bound.parameters)
        assemble(segments(self.model, slope), *gradients_of(value, bound.tensors, bound.parameters), into=slope)
        return slope, reported.detach()

    def _value(
        self, loss: LocalLoss, call: LossCall, p: Tensor, extras: dict[str, Any], batch: Batch, key: Tensor
    ) -> tuple[Tensor, Tensor]:
        with call, self._inside(key):
            return loss(p, batch, **extras)

    def _by_samples(
        self,
        update: Update,
        at: Tensor,
        batch: Batch,
        key: Tensor,
        slope: Callable[[Batch, Tensor], tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """Gradient and report of a batch, from ``slope(batch, key)`` of its samples one by one."""

        def rows(start: int, stop: int) -> tuple[Tensor, Tensor]:
            keys = sample_keys(key, start, stop)
            found = [slope(Batch(*(part[i : i + 1] for part in batch)), keys[i - start]) for i in range(start, stop)]
            gradients, values = zip(*found, strict=True)
            return torch.stack(gradients), torch.stack(values)

        return by_samples(update, at.detach(), batch.weight, key, rows)

    @torch.enable_grad()
    def grad(
        self, loss: LocalLoss, at: Tensor, batches: Batches, keys: Tensor, extras: Extras, update: Update | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradient of each client's loss on its batch: ``(gradients[K, P], reported[K], statistics[K, B] after it)``.

        If `update` needs per-sample gradients, the gradient is what it makes of them.
        """
        gradients, losses, statistics = [], [], []
        with self.model.mode(train=True), streams.forked(at.device):
            for k, batch in enumerate(batches):
                streams.seed(at.device, int(keys[k]))
                p = self.model.parameters(at[k]).detach().requires_grad_()
                call = FunctionalCall(self.model, self.model.buffers(at[k]))
                mine = without_buffers(self.model, of_client(extras, k))
                if update is None or update.sample_rule is None:
                    gradient, reported = self._slope_at(loss, call, p, mine, self._batch(batch), keys[k])
                else:
                    taken = loss.for_samples(p.detach(), mine)
                    slope = partial(self._slope_at, taken, call, p, mine)
                    gradient, reported = self._by_samples(update, p, self._batch(batch), keys[k], slope)
                    self._add_pull(taken, p, mine, gradient)
                gradients.append(gradient)
                losses.append(reported)
                statistics.append(call.moved().detach())
        return torch.stack(gradients), torch.stack(losses), torch.stack(statistics)

    def _slope_at(
        self, loss: LocalLoss, call: LossCall, p: Tensor, extras: dict[str, Any], batch: Batch, key: Tensor
    ) -> tuple[Tensor, Tensor]:
        value, reported = self._value(loss, call, p, extras, batch, key)
        return torch.autograd.grad(value, p)[0], reported.detach()

    def map(self, function: LossFunction, at: Tensor, batches: list[Batch], keys: Tensor, extras: Extras) -> Tensor:
        """``[K, ...]``: the function of each client's ``at[k]`` and batch; autograd goes through it.

        If it gives a row for each sample, clients with fewer samples than the largest are padded with rows of zeros.
        """
        rows = []
        with self.model.mode(train=False), self._inside(None), streams.forked(at.device):
            for k, batch in enumerate(batches):
                streams.seed(at.device, int(keys[k]))
                rows.append(function(at[k], self._batch(batch), **of_client(extras, k)))
        sizes = [len(batch.y) for batch in batches]
        if len(set(sizes)) > 1 and [len(row) if row.dim() else 0 for row in rows] == sizes:
            return nn.utils.rnn.pad_sequence(rows, batch_first=True)
        return torch.stack(rows)

    def predict(self, at: Tensor | Predictor, x: Tensor, own: bool) -> Tensor:
        """Outputs ``[K, b, ...]`` of K models, ``[K, P+B]`` or a predictor's, without gradients.

        The caller sets evaluation mode. `x` is ``[K, b, ...]``, inputs for each model, or ``[b, ...]``, for all models.
        """
        with torch.no_grad(), self.precision.context(self.model.device):
            xs = map(self.precision.layout, x) if own else itertools.repeat(self.precision.layout(x), len(at))
            if isinstance(at, Predictor):
                rows = [at.outputs_of(k, part) for k, part in enumerate(xs)]
            else:
                rows = [self.model(theta, part) for theta, part in zip(at, xs, strict=True)]
            return rows[0][None] if len(rows) == 1 else torch.stack(rows)

    def _batch(self, batch: Batch) -> Batch:
        return batch._replace(x=self.precision.layout(batch.x))

    @contextlib.contextmanager
    def _inside(self, key: Tensor | None) -> Iterator[None]:
        draws = RowWise(None, key) if key is not None and self.model.has_dropout else contextlib.nullcontext()
        with one_client_at_a_time(), self.precision.context(self.model.device), draws:
            yield


def copied(rows: Tensor, order: Tensor | None = None) -> Tensor:
    """A contiguous copy with rows in this order, in memory from NumPy: its huge pages take a tenth of the time."""
    if rows.stride(0) == 0:
        order = None  # one row for all clients
    if rows.device.type != "cpu":
        return rows.clone(memory_format=torch.contiguous_format) if order is None else rows[order]
    copy = torch.from_numpy(np.empty(rows.shape, rows.new_empty(0).numpy().dtype))
    return copy.copy_(rows) if order is None else torch.index_select(rows.detach(), 0, order, out=copy)
