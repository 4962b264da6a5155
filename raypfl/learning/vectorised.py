"""The executor that runs all clients of a group at once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Sequence, Set
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, vmap

from raypfl.common import streams
from raypfl.common.transfer import to_device
from raypfl.learning.batches import Batches, StepBatches
from raypfl.learning.executor import DEFAULT_PRECISION, Executor, GroupTraining, Precision, StepCallback
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
from raypfl.learning.optimizers.ranked_training import ActiveRows, RankedTraining, phases
from raypfl.learning.recording import (
    Recorder,
    compute,
    key_of_gradients,
    key_of_steps,
    may_keep_state,
    numbered,
    repeat,
    shared_tensors,
)
from raypfl.models.extras import Extras, of_client, of_clients, rows_of, with_rows, without_buffers
from raypfl.models.flat import FlatModel, FunctionalCall
from raypfl.models.predictor import Predictor
from raypfl.models.rows import aligned, copy_rows, empty_rows
from raypfl.models.rowwise import RowWise


class Vectorised(Executor):
    """Runs all clients of a group at once with ``vmap``; unequal batches are padded, and padding has weight 0.

    `recorder` : records the steps of SGD, which are then repeated; None: vmap and autograd run in every step.
    """

    def __init__(
        self, model: FlatModel, precision: Precision = DEFAULT_PRECISION, recorder: Recorder | None = None
    ) -> None:
        super().__init__(model, precision)
        self.recorder = recorder

    @torch.enable_grad()
    def sgd(self, training: GroupTraining, observe: StepCallback | None = None) -> tuple[Tensor, Tensor]:
        # Clients with most steps come first, so that the active ones are always the first rows.
        start = training.start
        rank = (-training.order.steps).argsort(kind="stable")
        steps = training.order.steps[rank]
        already_in_order = bool((rank[1:] > rank[:-1]).all())
        ranked = None if already_in_order else to_device(rank, start.device)

        loss = training.loss
        extras = training.extras
        update = training.update
        correction = training.correction
        if ranked is not None:
            extras = of_clients(extras, ranked)
            update = update.of_rows(ranked)
            correction = None if correction is None else correction[ranked]

        theta = copy_rows(self.model.parameters(start), ranked)
        if update.separates_penalty:
            loss = self._separated(loss, theta, extras)
        ranked_training = RankedTraining(
            loss=loss,
            step=self._vectorised_step(loss, extras),
            update=update,
            frozen=frozen_segments(self.model, update),
            batches=training.samples.stacked(rank, training.order),
            keys=to_device(training.keys.numpy()[rank], start.device),
            extras=extras,
            correction=correction,
            theta=theta,
            statistics=copy_rows(self.model.buffers(start), ranked),
            memory={name: aligned(rows) for name, rows in update.init(theta).items()},
            losses=torch.zeros(len(theta), dtype=theta.dtype, device=theta.device),
        )
        self._take_steps(ranked_training, rank, steps, observe)

        losses = ranked_training.losses / to_device(steps, theta.device).to(theta.dtype).clamp_min(1)
        trained = torch.cat([theta, ranked_training.statistics], dim=1) if self.model.num_buffers else theta
        if ranked is None:
            return trained, losses
        original_order = ranked.argsort()
        return trained[original_order], losses[original_order]

    def _take_steps(
        self, training: RankedTraining, rank: np.ndarray, steps: np.ndarray, observe: StepCallback | None
    ) -> None:
        """Take all steps, recorded ones if they can be.

        `rank`, `steps` : each row's place in the group, and its number of steps, in descending order.
        """
        recorder = self.recorder
        if observe is not None or self.may_keep_state(training.loss, training.update):
            recorder = None
        key = None
        if recorder is not None and training.batches.draws is None:
            key = key_of_steps(training.loss, training.update, training.extras, training.batches.is_normalised)

        with self.model.mode(train=True), self._loss_context(None):
            for k, phase in phases(steps):
                active = self._first_rows(training, k)
                take = partial(self._take_step, training, active)
                if recorder is not None:
                    signature = None if key is None else training.signature(key, active)
                    if not repeat(take, phase, training.theta.device, recorder, signature):
                        self.recorder = None
                    continue

                for s in phase:
                    if observe is not None:
                        for row, *model in zip(rank[:k].tolist(), training.theta, training.statistics, strict=False):
                            observe(row, s, torch.cat(model))
                    take(s)

    def _first_rows(self, training: RankedTraining, k: int) -> ActiveRows:
        """Return the first k rows, as views: a step on them moves the training."""
        theta = training.theta[:k]
        update = training.update.of_rows(slice(k))
        leaves = self._leaves(theta, training.frozen)
        memory = {name: rows[:k] for name, rows in training.memory.items()}
        correction = None if training.correction is None else training.correction[:k]
        return ActiveRows(
            count=k,
            descent=Descent(self.model, update, theta, leaves, memory, correction),
            extras=[rows[:k] for rows in rows_of(training.extras).values()],
        )

    def _take_step(self, training: RankedTraining, active: ActiveRows, s: int | Tensor) -> None:
        """Let the active rows take step s, a number or ``int64[1]`` on the device."""
        k = active.count
        descent = active.descent
        statistics = training.statistics
        batch = training.batches(slice(k), s)
        keys = training.keys[:k] + s
        if training.update.separates_penalty:
            gradients, reported, moved = self._gradients(
                training.step,
                training.update,
                training.frozen,
                descent.theta,
                statistics[:k],
                keys,
                batch,
                active.extras,
            )
            self._add_penalty_gradients(training.loss, descent.theta, training.extras, active.extras, gradients)
            descent.step_whole(gradients)
        else:
            grads, direct, reported, moved = training.step(
                descent.theta, descent.tensors, statistics[:k], keys, batch, active.extras
            )
            descent.step(grads, direct)

        if self.model.num_buffers:
            statistics[:k] = moved
        training.losses[:k] += reported

    def may_keep_state(self, loss: LocalLoss, update: Update) -> bool:
        """Return whether a step's functions may depend on more than their arguments.

        The network's are left out: `recorder` is None if they may.
        """
        return may_keep_state([loss.loss, loss.penalty, loss.report, update.optimizer.step_, update.perturb])

    def _gradients(
        self,
        step: Callable[..., Any],
        update: Update | None,
        frozen: Set[str],
        theta: Tensor,
        statistics: Tensor,
        keys: Tensor,
        batch: Batch,
        extra_rows: Sequence[Tensor],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return a step's gradients ``[K, P]``, reported losses ``[K]`` and statistics afterwards ``[K, B]``."""
        if update is not None and update.sample_rule is not None:
            gradients, reported = self._gradients_by_sample(step, update, frozen, theta, keys, batch, extra_rows)
            return gradients, reported, statistics

        def gradients_at(at: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            grads, direct, reported, moved = step(at, self._leaves(at, frozen), statistics, keys, batch, extra_rows)
            gradients = empty_rows(at.shape, at)
            assemble(segments(self.model, gradients), grads, direct, into=gradients)
            return gradients, reported, moved

        gradients, reported, moved = gradients_at(theta)
        if update is not None and update.perturb is not None:
            gradients, _, _ = gradients_at(update.perturbed(theta, gradients))
        return gradients, reported, moved

    def _gradients_by_sample(
        self,
        step: Callable[..., Any],
        update: Update,
        frozen: Set[str],
        theta: Tensor,
        keys: Tensor,
        batch: Batch,
        extra_rows: Sequence[Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Return gradients ``[K, P]`` and reported losses ``[K]``, with every sample vectorised like a client."""

        def gradients_of_samples(start: int, stop: int) -> tuple[Tensor, Tensor]:
            count = stop - start
            at = theta.repeat_interleave(count, 0)
            extras = [rows.repeat_interleave(count, 0) for rows in extra_rows]
            single_samples = Batch(*(field[:, start:stop].flatten(0, 1)[:, None] for field in batch))
            leaves = self._leaves(at, frozen)
            # Networks with per-sample gradients have no batch norm, so no statistics move.
            no_statistics = at[:, :0]
            step_keys = sample_keys(keys, start, stop).flatten()
            grads, direct, values, _ = step(at, leaves, no_statistics, step_keys, single_samples, extras)

            gradients = torch.empty_like(at)
            assemble(segments(self.model, gradients), grads, direct, into=gradients)
            shape = (len(theta), count)
            return gradients.unflatten(0, shape), values.unflatten(0, shape)

        return gradient_by_sample(update, theta, batch.weight, keys, gradients_of_samples)

    def _separated(self, loss: LocalLoss, theta: Tensor, extras: Extras) -> LocalLoss:
        return loss.separated(theta[0], without_buffers(self.model, of_client(extras, 0)))

    def _add_penalty_gradients(
        self, loss: LocalLoss, theta: Tensor, extras: Extras, extra_rows: Sequence[Tensor], gradients: Tensor
    ) -> None:
        """Add the gradients of a penalty that is separate from the samples' loss."""
        if not loss.penalty_is_separate:
            return
        names = list(rows_of(extras))
        p = theta.detach().requires_grad_()

        def penalty_of_client(p: Tensor, *client_rows: Tensor) -> Tensor:
            rows = with_rows(extras, dict(zip(names, client_rows, strict=True)))
            return loss.separate_penalty(p, without_buffers(self.model, rows))

        gradients += torch.autograd.grad(vmap(penalty_of_client)(p, *extra_rows).sum(), p)[0]

    @torch.enable_grad()
    def grad(
        self, loss: LocalLoss, at: Tensor, batches: Batches, keys: Tensor, extras: Extras, update: Update | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        theta = self.model.parameters(at)
        statistics = self.model.buffers(at)
        extra_rows = list(rows_of(extras).values())
        keys = to_device(keys.numpy(), at.device)
        with self.model.mode(train=True), self._loss_context(None):
            batch = _pad(batches)
            frozen: Set[str] = frozenset()
            if update is not None and update.separates_penalty:
                loss = self._separated(loss, theta, extras)
                frozen = frozen_segments(self.model, update)
            step = self._vectorised_step(loss, extras)

            def gradients_on_batch() -> tuple[Tensor, Tensor, Tensor]:
                gradients, reported, moved = self._gradients(
                    step, update, frozen, theta, statistics, keys, batch, extra_rows
                )
                self._add_penalty_gradients(loss, theta, extras, extra_rows, gradients)
                return gradients, reported, moved

            # On a GPU, recordings of single gradients were never measured.
            recorder = self.recorder if theta.device.type == "cpu" else None
            key = None if recorder is None else self._key_of_gradients(loss, update, extras)
            if recorder is None or key is None:
                return gradients_on_batch()

            function_key, captured_tensors = key
            inputs = {
                "theta": theta,
                "statistics": statistics,
                "keys": keys,
                **batch._asdict(),
                **shared_tensors(extras),
                **numbered("extra row", extra_rows),
                **numbered("captured", captured_tensors),
            }
            results = empty_rows(theta.shape, theta), theta.new_empty(len(theta)), torch.empty_like(statistics)
            compute(gradients_on_batch, results, recorder, (function_key, frozen), inputs)
        return results

    def _key_of_gradients(
        self, loss: LocalLoss, update: Update | None, extras: Extras
    ) -> tuple[Hashable, list[Tensor]] | None:
        """Return the key of a recording of gradients on a batch; None if they cannot be recorded."""
        perturb = None if update is None else update.perturb
        by_sample = update is not None and update.sample_rule is not None
        if by_sample or may_keep_state([loss.loss, loss.penalty, loss.report, perturb]):
            return None
        return key_of_gradients(loss, perturb, extras)

    def map(self, function: LossFunction, at: Tensor, batches: list[Batch], keys: Tensor, extras: Extras) -> Tensor:
        all_clients = vmap(lambda p, batch, client_rows: function(p, batch, **with_rows(extras, client_rows)))
        padded = _pad(batches)
        with self.model.mode(train=False), self._loss_context(None):
            values = all_clients(at, padded, rows_of(extras))
            may_have_rows = values.shape[1:2] == padded.y.shape[1:2]
            if not may_have_rows or not self._returns_rows(function, at, batches, extras):
                return values

        # Rows of padding become zeros.
        is_padding = padded.weight.reshape(*padded.weight.shape, *[1] * (values.dim() - 2)) == 0
        return values.masked_fill(is_padding, 0)

    def _returns_rows(self, function: LossFunction, at: Tensor, batches: list[Batch], extras: Extras) -> bool:
        """Return whether a function returns a row per sample; False if all clients have equally many, without padding.

        It is tried on the client with fewest samples.
        """
        sizes = [len(batch.y) for batch in batches]
        k = int(np.argmin(sizes))
        return sizes[k] < max(sizes) and len(function(at[k], batches[k], **of_client(extras, k))) == sizes[k]

    def predict(self, at: Tensor | Predictor, x: Tensor, own_inputs: bool) -> Tensor:
        with torch.no_grad(), self.precision.context(self.model.device):
            if isinstance(at, Predictor):
                return vmap(at.outputs, in_dims=(0 if own_inputs else None, 0))(x, at.rows)
            if len(at) == 1:
                return self.model(at[0], x[0] if own_inputs else x)[None]
            return vmap(self.model, in_dims=(0, 0 if own_inputs else None))(at, x)

    def unfit_for_padding(
        self, function: LossFunction, at: Tensor, batch: Batch, extras: Extras, train: bool
    ) -> str | None:
        """Say why `function` would give other results on padded batches; None if it would not.

        It is tried on samples of the first client, whose model vector is `at`; a loss is tried in training mode. The
        answer is not remembered: it may change over rounds, and must not depend on which groups this process ran
        before.
        """
        weight = torch.cat([batch.weight, torch.zeros_like(batch.weight)])
        flipped = batch.x.flip(0)
        unlike = flipped.neg().add(1.0) if flipped.is_floating_point() else flipped
        # Two kinds of padding: the samples again with other targets, and unlike samples.
        padded_batches = [
            Batch(torch.cat([batch.x, batch.x]), torch.cat([batch.y, batch.y.flip(0)]), weight),
            Batch(torch.cat([batch.x, unlike]), torch.cat([batch.y, torch.zeros_like(batch.y)]), weight),
        ]

        with streams.forked(at.device):
            before = streams.state(at.device)
            unpadded = self._try(function, at, batch, extras, train)
            padded = [self._try(function, at, padded_batch, extras, train) for padded_batch in padded_batches]
            if not torch.equal(before, streams.state(at.device)):
                return "draws random numbers, so its clients run one by one, each with a stream of its own."

        if unpadded.shape[:1] == batch.y.shape[:1]:
            # The function may return a row for each sample, padding included.
            padded = [value[: len(unpadded)] for value in padded]

        for value in padded:
            if value.shape != unpadded.shape or not torch.allclose(
                unpadded, value, self.precision.rtol, 1e-6, equal_nan=True
            ):
                return (
                    "does not weigh its samples with batch.weight, so its clients run one by one; use "
                    "batch.mean(values) to run them together."
                )
        return None

    def _try(self, function: LossFunction, at: Tensor, batch: Batch, extras: Extras, train: bool) -> Tensor:
        client_extras = of_client(extras, 0)
        with self.model.mode(train), self._loss_context(None):
            if not train:
                return function(at.detach(), batch, **client_extras).detach()

            key = torch.zeros((), dtype=torch.int64, device=batch.y.device)
            p = self.model.parameters(at)
            with FunctionalCall(self.model, self.model.buffers(at)), self._row_wise(batch, key):
                # requires_grad_: a loss may itself differentiate.
                value = function(p.detach().requires_grad_(), batch, **without_buffers(self.model, client_extras))
                return torch.stack(value).detach()

    def _leaves(self, theta: Tensor, frozen: Set[str] = frozenset()) -> list[Tensor]:
        """Return the segments of parameters ``theta[..., P]`` as leaves, which get gradients unless they are frozen."""
        views = self.model.unflatten(theta)
        return [view.detach().requires_grad_(name not in frozen) for name, view in views.items()]

    def _vectorised_step(self, loss: LocalLoss, extras: Extras) -> Callable[..., Any]:
        """Return ``step``, which computes gradients, reported losses and statistics of all rows."""
        names = list(rows_of(extras))
        num_segments = len(self.model.parameter_names)

        # Separate tensors, not a Batch and a dict: flattening those takes vmap a tenth of a small step.
        def loss_of_client(
            p: Tensor, statistics: Tensor, key: Tensor, x: Tensor, y: Tensor, weight: Tensor, *rest: Tensor
        ) -> tuple[Tensor, ...]:
            tensors = rest[:num_segments]
            client_rows = rest[num_segments:]
            batch = Batch(x, y, weight)
            call = FunctionalCall(self.model, statistics, p, tensors)
            with call, self._row_wise(batch, key):
                client_extras = with_rows(extras, dict(zip(names, client_rows, strict=True)))
                value, reported = loss(p, batch, **without_buffers(self.model, client_extras))
            return (value, call.moved()) if reported is value else (value, call.moved(), reported)

        # One backward pass through all rows gives the gradients of torch.func.grad, which imports the compiler: longer
        # than a small run. Gradients stay per segment: assembling one for `p` takes a fifth of a small step.
        def step(
            theta: Tensor,
            tensors: Sequence[Tensor],
            statistics: Tensor,
            keys: Tensor,
            batch: Batch,
            extra_rows: Sequence[Tensor],
        ) -> tuple[Sequence[Tensor | None], Tensor | None, Tensor, Tensor]:
            p = theta.detach().requires_grad_()
            values, moved, *reported = vmap(loss_of_client)(p, statistics, keys, *batch, *tensors, *extra_rows)
            # The sum, not values with a gradient of ones, whose shape PyTorch checks with sympy: a slow import.
            reported_values = reported[0] if reported else values
            grads, direct = gradients_of(loss, values.sum(), reported_values, tensors, p)
            return grads, direct, reported_values.detach(), moved.detach()

        return step

    def _row_wise(self, batch: Batch, key: Tensor) -> contextlib.AbstractContextManager[Any]:
        if self.model.mixes_rows or self.model.has_dropout or self.model.num_buffers:
            return RowWise(batch.weight, key)
        return contextlib.nullcontext()


def _pad(batches: Batches) -> Batch:
    """Stack batches of unequal length to one, ``[K, b, ...]``, padded with rows of weight 0."""
    if isinstance(batches, StepBatches):
        return batches.padded
    width = max(len(batch.y) for batch in batches)

    def stack(tensors: list[Tensor]) -> Tensor:
        stacked = tensors[0].new_zeros((len(tensors), width, *tensors[0].shape[1:]))
        for row, tensor in zip(stacked, tensors, strict=True):
            row[: len(tensor)] = tensor
        return stacked

    return Batch(
        x=stack([batch.x for batch in batches]),
        y=stack([batch.y for batch in batches]),
        weight=stack([batch.weight for batch in batches]),
    )
