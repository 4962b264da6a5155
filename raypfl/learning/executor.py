"""Executors, which run a function of one client for a whole group: one by one here, all at once in :mod:`.vectorised`.

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

import torch
from torch import Tensor, nn

from raypfl.common import streams
from raypfl.common.messages import one_client_at_a_time
from raypfl.learning.batches import Batches, GroupSamples
from raypfl.learning.loss import LocalLoss, LossFunction
from raypfl.learning.objectives.batch import Batch
from raypfl.learning.optimizers import Update
from raypfl.learning.optimizers.descent import (
    Descent,
    assemble,
    frozen_segments,
    gradient_by_sample,
    gradients_of,
    sample_keys,
    segments,
)
from raypfl.learning.sample_order import SampleOrder
from raypfl.models.extras import Extras, of_client, without_buffers
from raypfl.models.flat import BoundModel, FlatModel, FunctionalCall, LossCall
from raypfl.models.predictor import Predictor
from raypfl.models.rows import copy_rows, empty_rows
from raypfl.models.rowwise import RowWise


@dataclass(frozen=True)
class Precision:
    """Rounding and memory layout of the forward and backward passes.

    Attributes
    ----------
    autocast : whether to use bf16 autocast.
    channels_last : whether images are in the channels-last layout.
    tf32 : whether this process's matrix products use TF32, which is set for all of them at once.
    """

    autocast: bool = False
    channels_last: bool = False
    tf32: bool = False

    @classmethod
    def named(cls, precision: str, channels_last: bool) -> Precision:
        """Return the precision of ``training.precision``; fp64 is the dtype of all tensors."""
        return cls(precision == "bf16", channels_last, precision == "tf32")

    @property
    def rtol(self) -> float:
        """The relative tolerance for comparing outputs: a matrix product with more rows may round differently."""
        return 2e-2 if self.autocast or self.tf32 else 1e-4

    def context(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        """Return the autocast context for `device`."""
        return torch.autocast(device.type, torch.bfloat16) if self.autocast else contextlib.nullcontext()

    def layout(self, x: Tensor) -> Tensor:
        """Return a batch of images in the chosen layout."""
        return x.contiguous(memory_format=torch.channels_last) if self.channels_last and x.dim() == 4 else x


StepCallback = Callable[[int, int, Tensor], None]
"""A function of a client's row, the number of a step, and the model vector ``[P+B]`` before the step."""

DEFAULT_PRECISION = Precision()
"""No autocast, and images as they are stored."""


@dataclass(frozen=True, eq=False)
class GroupTraining:
    """Local SGD of a group of K clients, which :meth:`Executor.sgd` carries out.

    Attributes
    ----------
    start : the models before the first step, ``[K, P+B]``.
    samples, order : the clients' training samples, and which of them each step visits.
    keys : the keys of the clients' draws, ``int64[K]`` in the host's memory, where they can be read without waiting
        for a GPU.
    correction : ``[K, P]``, added to all gradients; None: nothing.
    """

    loss: LocalLoss
    start: Tensor
    samples: GroupSamples
    order: SampleOrder
    update: Update
    keys: Tensor
    extras: Extras
    correction: Tensor | None = None

    def __len__(self) -> int:
        return self.start.shape[0]  # len() of a tensor takes four calls


class Executor:
    """Runs functions of one client for a group, one client after the other.

    A client trains on an ordinary module whose parameters are views of a flat vector. Subclasses may run clients in
    other ways; all agree up to floating-point rounding.
    """

    def __init__(self, model: FlatModel, precision: Precision = DEFAULT_PRECISION):
        self.model = model
        self.precision = precision

    @torch.enable_grad()
    def sgd(self, training: GroupTraining, observe: StepCallback | None = None) -> tuple[Tensor, Tensor]:
        """Train all clients of a group; return ``(trained[K, P+B], mean reported loss[K])``.

        `observe` is called before each of a client's steps.
        """
        start = training.start
        update = training.update
        trained = copy_rows(start)
        losses = torch.zeros(len(start), dtype=start.dtype, device=start.device)

        with self.model.bound() as bound, self.model.mode(train=True), streams.forked(start.device):
            frozen = frozen_segments(self.model, update)
            for k, steps in enumerate(training.order.steps):
                key = training.keys[k]
                correction = None if training.correction is None else training.correction[k]
                descent = self._start_descent(bound, trained[k], frozen, update, key, correction)
                extras = without_buffers(self.model, of_client(training.extras, k))
                batch_of_step = training.samples.steps(k, training.order)
                loss = training.loss
                if update.separates_penalty:
                    loss = loss.separated(descent.theta, extras)

                for s in range(steps):
                    if observe is not None:
                        observe(k, s, trained[k])
                    batch = self._batch(batch_of_step(s))
                    reported = self._step(loss, bound, descent, batch, key + s, extras)
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
        """Train one model ``theta[P+B]`` in place, a step per batch; yield the loss that each step reports.

        Parameters
        ----------
        rate : the learning rate of each step, in place of the update's.
        key : the key of the draws, a scalar in the host's memory.
        training : whether the network is in training mode in steps; it never is while batches are produced.
        """
        extras_without_buffers = without_buffers(self.model, dict(extras))
        frozen = frozen_segments(self.model, update)
        with self.model.bound() as bound, streams.forked(theta.device):
            descent = self._start_descent(bound, theta, frozen, update, key)
            for s, batch in enumerate(self._in_evaluation_mode(batches)):
                descent.update = replace(update, lr=rate(s))
                with self.model.mode(training):
                    reported = self._step(loss, bound, descent, self._batch(batch), key + s, extras_without_buffers)
                yield reported

    def _in_evaluation_mode(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the batches, each produced in evaluation mode and without gradients."""
        iterator = iter(batches)
        while True:
            with self.model.mode(train=False), torch.no_grad():
                batch = next(iterator, None)
            if batch is None:
                return
            yield batch

    def _start_descent(
        self,
        bound: BoundModel,
        vector: Tensor,
        frozen: Set[str],
        update: Update,
        key: Tensor,
        correction: Tensor | None = None,
    ) -> Descent:
        """Prepare the steps of a model vector ``[P+B]``, which is trained in place."""
        bound.bind(vector, frozen)
        streams.seed(vector.device, int(key))
        memory = update.init(self.model.parameters(vector))
        return Descent(self.model, update, bound.parameters, bound.tensors, memory, correction)

    def _step(
        self, loss: LocalLoss, bound: BoundModel, descent: Descent, batch: Batch, key: Tensor, extras: dict[str, Any]
    ) -> Tensor:
        """Take a step; return the loss that it reports."""
        update = descent.update
        if update.separates_penalty:
            gradient_of = partial(self._bound_gradient, loss, bound, extras)
            if update.sample_rule is not None:
                gradient, reported = self._gradient_by_sample(update, descent.theta, batch, key, gradient_of)
            else:
                gradient, reported = gradient_of(batch, key)
                moved = bound.moved()
                gradient = self._perturbed_gradient(update, loss, moved, descent.theta, gradient, extras, batch, key)
            self._add_penalty_gradient(loss, descent.theta, extras, gradient)
            descent.step_whole(gradient)
            return reported

        value, reported = self._value(loss, bound, bound.parameters, extras, batch, key)
        descent.step(*gradients_of(loss, value, reported, bound.tensors, bound.parameters))
        return reported.detach()

    def _add_penalty_gradient(self, loss: LocalLoss, at: Tensor, extras: dict[str, Any], gradient: Tensor) -> None:
        """Add the gradient of a penalty that is separate from the samples' loss."""
        if loss.penalty_is_separate:
            p = at.detach().requires_grad_()
            with one_client_at_a_time():
                gradient += torch.autograd.grad(loss.separate_penalty(p, extras), p)[0]

    def _bound_gradient(
        self, loss: LocalLoss, bound: BoundModel, extras: dict[str, Any], batch: Batch, key: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the gradient ``[P]`` of a bound model's loss, and the reported loss."""
        value, reported = self._value(loss, bound, bound.parameters, extras, batch, key)
        gradient = torch.empty_like(bound.parameters)
        grads, direct = gradients_of(loss, value, reported, bound.tensors, bound.parameters)
        assemble(segments(self.model, gradient), grads, direct, into=gradient)
        return gradient, reported.detach()

    def _value(
        self, loss: LocalLoss, call: LossCall, p: Tensor, extras: dict[str, Any], batch: Batch, key: Tensor
    ) -> tuple[Tensor, Tensor]:
        with call, self._loss_context(key):
            return loss(p, batch, **extras)

    def _gradient_by_sample(
        self,
        update: Update,
        at: Tensor,
        batch: Batch,
        key: Tensor,
        gradient_of_sample: Callable[[Batch, Tensor], tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """Return gradient and reported loss of a batch, from ``gradient_of_sample(batch, key)`` of its samples."""

        def gradients_of_samples(start: int, stop: int) -> tuple[Tensor, Tensor]:
            keys = sample_keys(key, start, stop)
            gradients = []
            losses = []
            for i in range(start, stop):
                sample = Batch(*(field[i : i + 1] for field in batch))
                gradient, loss = gradient_of_sample(sample, keys[i - start])
                gradients.append(gradient)
                losses.append(loss)
            return torch.stack(gradients), torch.stack(losses)

        return gradient_by_sample(update, at.detach(), batch.weight, key, gradients_of_samples)

    @torch.enable_grad()
    def grad(
        self, loss: LocalLoss, at: Tensor, batches: Batches, keys: Tensor, extras: Extras, update: Update | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return gradients of the losses ``[K, P]``, reported losses ``[K]``, and statistics afterwards ``[K, B]``.

        If `update` needs per-sample gradients, the gradient is the one that its rule computes from them. The keys are
        in the host's memory.
        """
        gradients = empty_rows((len(at), self.model.num_parameters), at)
        losses = []
        statistics = []
        with self.model.mode(train=True), streams.forked(at.device):
            for k, client_batch in enumerate(batches):
                streams.seed(at.device, int(keys[k]))
                p = self.model.parameters(at[k]).detach().requires_grad_()
                call = self._call_at(p, self.model.buffers(at[k]))
                client_extras = without_buffers(self.model, of_client(extras, k))
                batch = self._batch(client_batch)

                client_loss = loss
                if update is not None and update.separates_penalty:
                    client_loss = loss.separated(p.detach(), client_extras)
                gradient_of = partial(self._gradient_at, client_loss, call, p, client_extras)

                if update is not None and update.sample_rule is not None:
                    gradient, reported = self._gradient_by_sample(update, p, batch, keys[k], gradient_of)
                else:
                    gradient, reported = gradient_of(batch, keys[k])
                moved = call.moved().detach()

                if update is not None and update.perturb is not None:
                    gradient = self._perturbed_gradient(
                        update, client_loss, moved, p, gradient, client_extras, batch, keys[k]
                    )
                self._add_penalty_gradient(client_loss, p, client_extras, gradient)

                gradients[k] = gradient
                losses.append(reported)
                statistics.append(moved)
        return gradients, torch.stack(losses), torch.stack(statistics)

    def _call_at(self, p: Tensor, buffers: Tensor) -> FunctionalCall:
        """Return a call that computes with segments of ``p[P]``, so that ``p`` gets their gradients."""
        return FunctionalCall(self.model, buffers, p, list(self.model.unflatten(p).values()))

    def _gradient_at(
        self, loss: LocalLoss, call: LossCall, p: Tensor, extras: dict[str, Any], batch: Batch, key: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the gradient of a loss at ``p[P]``, and the reported loss."""
        value, reported = self._value(loss, call, p, extras, batch, key)
        _, gradient = gradients_of(loss, value, reported, [], p)
        return torch.zeros_like(p) if gradient is None else gradient, reported.detach()

    def _perturbed_gradient(
        self,
        update: Update,
        loss: LocalLoss,
        statistics: Tensor,
        at: Tensor,
        gradient: Tensor,
        extras: dict[str, Any],
        batch: Batch,
        key: Tensor,
    ) -> Tensor:
        """Return the gradient where `update` takes it, given the one at ``at[P]``; a batch's draws are the same."""
        p = update.perturbed(at.detach(), gradient).requires_grad_()
        return self._gradient_at(loss, self._call_at(p, statistics), p, extras, batch, key)[0]

    def map(self, function: LossFunction, at: Tensor, batches: list[Batch], keys: Tensor, extras: Extras) -> Tensor:
        """Return the function of each client's ``at[k]`` and batch, ``[K, ...]``; autograd goes through it.

        If it gives a row for each sample, clients with fewer samples than the largest are padded with rows of zeros.
        """
        rows = []
        with self.model.mode(train=False), self._loss_context(None), streams.forked(at.device):
            for k, batch in enumerate(batches):
                streams.seed(at.device, int(keys[k]))
                rows.append(function(at[k], self._batch(batch), **of_client(extras, k)))

        sizes = [len(batch.y) for batch in batches]
        lengths = [len(row) if row.dim() else 0 for row in rows]
        if len(set(sizes)) > 1 and lengths == sizes:
            return nn.utils.rnn.pad_sequence(rows, batch_first=True)
        return torch.stack(rows)

    def predict(self, at: Tensor | Predictor, x: Tensor, own_inputs: bool) -> Tensor:
        """Return outputs ``[K, b, ...]`` of K models, ``[K, P+B]`` or a predictor's, without gradients.

        The caller sets evaluation mode.

        `x` : the inputs: ``[K, b, ...]``, one batch for each model, if `own_inputs`; else ``[b, ...]``, the same for
        all.
        """
        with torch.no_grad(), self.precision.context(self.model.device):
            xs = map(self.precision.layout, x) if own_inputs else itertools.repeat(self.precision.layout(x), len(at))
            if isinstance(at, Predictor):
                rows = [at.outputs_of(k, inputs) for k, inputs in enumerate(xs)]
            else:
                rows = [self.model(theta, inputs) for theta, inputs in zip(at, xs, strict=True)]
            return rows[0][None] if len(rows) == 1 else torch.stack(rows)

    def _batch(self, batch: Batch) -> Batch:
        return batch._replace(x=self.precision.layout(batch.x))

    @contextlib.contextmanager
    def _loss_context(self, key: Tensor | None) -> Iterator[None]:
        """Set the precision and keyed dropout for one client's function, and refuse tensors of all clients in it."""
        draws = RowWise(None, key) if key is not None and self.model.has_dropout else contextlib.nullcontext()
        with one_client_at_a_time(), self.precision.context(self.model.device), draws:
            yield
