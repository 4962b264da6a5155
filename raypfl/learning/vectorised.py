"""The executor that runs all clients of a group at once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence, Set
from typing import Any

import numpy as np
import torch
from torch import Tensor, vmap

from raypfl.common import streams
from raypfl.learning.batches import Batches, GroupSamples, SampleOrder, StepBatches
from raypfl.learning.descent import Descent, assemble, by_samples, gradients_of, sample_keys, segments, still_segments
from raypfl.learning.executor import Executor, StepCallback, copied
from raypfl.learning.loss import LocalLoss, LossFunction
from raypfl.learning.objectives.batch import Batch
from raypfl.learning.optimizers import Update
from raypfl.models.extras import Extras, of_client, of_clients, rows_of, with_rows, without_buffers
from raypfl.models.flat import FunctionalCall
from raypfl.models.predictor import Predictor
from raypfl.models.rowwise import RowWise


class Vectorised(Executor):
    """All clients of a group at once with ``vmap``; unequal batches are padded, and padding has weight 0."""

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
        # Clients with most steps come first, so that those that still have some are always the first rows.
        rank = np.argsort(-visits.steps, kind="stable")
        batches, steps = samples.stacked(rank, visits), visits.steps[rank]
        ranked = None if bool((rank[1:] > rank[:-1]).all()) else torch.from_numpy(rank).to(start.device)
        theta, statistics = (copied(part, ranked) for part in (self.model.parameters(start), self.model.buffers(start)))
        if ranked is not None:
            keys, extras = keys[ranked], of_clients(extras, ranked)
            correction = None if correction is None else correction[ranked]
        memory, losses = update.init(theta), torch.zeros(len(theta), dtype=theta.dtype, device=theta.device)
        mine = list(rows_of(extras).values())
        if update.sample_rule is not None:
            loss = self._for_samples(loss, theta, extras)
        step, still = self._step_of_all(loss, extras), still_segments(self.model, update)
        descent: Descent | None = None
        with self.model.mode(train=True), self._inside(None):
            for s in range(steps.max(initial=0)):
                k = int((steps > s).sum())
                if observe is not None:
                    for row, *model in zip(rank[:k].tolist(), theta, statistics, strict=False):
                        observe(row, s, torch.cat(model))
                if descent is None or len(descent.theta) > k:
                    own = {name: rows[:k] for name, rows in memory.items()}
                    added, leaves = None if correction is None else correction[:k], self._leaves(theta[:k], still)
                    descent = Descent(self.model, update, theta[:k], leaves, own, added)
                batch, active = batches(slice(k), s), [rows[:k] for rows in mine]
                if update.sample_rule is not None:
                    whole, value = self._by_samples_of_all(step, update, descent.theta, keys[:k] + s, batch, active)
                    self._add_pulls(loss, descent.theta, extras, active, whole)
                    descent.step_whole(whole)
                else:
                    grads, direct, value, moved = step(
                        descent.theta, descent.tensors, statistics[:k], keys[:k] + s, batch, active
                    )
                    descent.step(grads, direct)
                    if self.model.num_buffers:
                        statistics[:k] = moved
                losses[:k] += value
        losses /= torch.from_numpy(steps).to(losses).clamp_min(1)
        trained = torch.cat([theta, statistics], dim=1) if self.model.num_buffers else theta
        if ranked is None:
            return trained, losses
        back = ranked.argsort()
        return trained[back], losses[back]

    def _by_samples_of_all(
        self,
        step: Callable[..., Any],
        update: Update,
        theta: Tensor,
        keys: Tensor,
        batch: Batch,
        mine: Sequence[Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Gradients ``[K, P]`` and reported losses ``[K]``, with every sample vectorised as a client of its own."""

        def rows(start: int, stop: int) -> tuple[Tensor, Tensor]:
            shape = (len(theta), stop - start)
            at, *extras = (rows.repeat_interleave(stop - start, 0) for rows in (theta, *mine))
            alone = Batch(*(part[:, start:stop].flatten(0, 1)[:, None] for part in batch))
            leaves, none = self._leaves(at, still_segments(self.model, update)), at[:, :0]
            grads, direct, values, _ = step(at, leaves, none, sample_keys(keys, start, stop).flatten(), alone, extras)
            gradients = torch.empty_like(at)
            assemble(segments(self.model, gradients), grads, direct, into=gradients)
            return gradients.unflatten(0, shape), values.unflatten(0, shape)

        return by_samples(update, theta, batch.weight, keys, rows)

    def _for_samples(self, loss: LocalLoss, theta: Tensor, extras: Extras) -> LocalLoss:
        return loss.for_samples(theta[0], without_buffers(self.model, of_client(extras, 0)))

    def _add_pulls(
        self, loss: LocalLoss, theta: Tensor, extras: Extras, mine: Sequence[Tensor], gradients: Tensor
    ) -> None:
        """Add the gradients of a penalty that is apart from the samples' loss."""
        if not loss.apart:
            return
        names, p = list(rows_of(extras)), theta.detach().requires_grad_()

        def one(p: Tensor, *mine: Tensor) -> Tensor:
            rows = with_rows(extras, dict(zip(names, mine, strict=True)))
            return loss.pull(p, without_buffers(self.model, rows))

        gradients += torch.autograd.grad(vmap(one)(p, *mine).sum(), p)[0]

    @torch.enable_grad()
    def grad(
        self, loss: LocalLoss, at: Tensor, batches: Batches, keys: Tensor, extras: Extras, update: Update | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        theta, statistics = self.model.parameters(at), self.model.buffers(at)
        mine = list(rows_of(extras).values())
        with self.model.mode(train=True), self._inside(None):
            batch = _padded(batches)
            if update is not None and update.sample_rule is not None:
                loss = self._for_samples(loss, theta, extras)
                step = self._step_of_all(loss, extras)
                whole, value = self._by_samples_of_all(step, update, theta, keys, batch, mine)
                self._add_pulls(loss, theta, extras, mine, whole)
                return whole, value, statistics
            step = self._step_of_all(loss, extras)
            grads, direct, value, moved = step(theta, self._leaves(theta), statistics, keys, batch, mine)
        gradient = torch.empty_like(theta, memory_format=torch.contiguous_format)
        assemble(segments(self.model, gradient), grads, direct, into=gradient)
        return gradient, value, moved

    def map(self, function: LossFunction, at: Tensor, batches: list[Batch], keys: Tensor, extras: Extras) -> Tensor:
        one, padded = vmap(lambda p, batch, mine: function(p, batch, **with_rows(extras, mine))), _padded(batches)
        with self.model.mode(train=False), self._inside(None):
            values = one(at, padded, rows_of(extras))
            if values.shape[1:2] != padded.y.shape[1:2] or not self._gives_rows(function, at, batches, extras):
                return values
        return values.masked_fill(padded.weight.reshape(*padded.weight.shape, *[1] * (values.dim() - 2)) == 0, 0)

    def _gives_rows(self, function: LossFunction, at: Tensor, batches: list[Batch], extras: Extras) -> bool:
        """Whether a function gives a row for each sample, tried on the client with fewest, if others have more."""
        sizes = [len(batch.y) for batch in batches]
        k = int(np.argmin(sizes))
        return sizes[k] < max(sizes) and len(function(at[k], batches[k], **of_client(extras, k))) == sizes[k]

    def predict(self, at: Tensor | Predictor, x: Tensor, own: bool) -> Tensor:
        with torch.no_grad(), self.precision.context(self.model.device):
            if isinstance(at, Predictor):
                return vmap(at.outputs, in_dims=(0 if own else None, 0))(x, at.rows)
            if len(at) == 1:
                return self.model(at[0], x[0] if own else x)[None]
            return vmap(self.model, in_dims=(0, 0 if own else None))(at, x)

    def unfit_for_padding(
        self, function: LossFunction, at: Tensor, batch: Batch, extras: Extras, train: bool
    ) -> str | None:
        """Why `function` would give other results on padded batches, or None; tried on samples of the first client.

        `at` is that client's model vector; a loss is tried in training mode. The answer is not remembered: it may
        change over rounds, and must not depend on which groups this process ran before.
        """
        twice, none = torch.cat([batch.x, batch.x]), torch.zeros_like(batch.weight)
        other = batch.x.flip(0)
        strange = torch.cat([batch.x, other.neg().add(1.0) if other.is_floating_point() else other])
        weight = torch.cat([batch.weight, none])
        padded = [
            Batch(twice, torch.cat([batch.y, batch.y.flip(0)]), weight),
            Batch(strange, torch.cat([batch.y, torch.zeros_like(batch.y)]), weight),
        ]
        with streams.forked(at.device):
            before = streams.state(at.device)
            alone, *values = [self._tried(function, at, b, extras, train) for b in (batch, *padded)]
            if not torch.equal(before, streams.state(at.device)):
                return "draws random numbers, so its clients run one by one, each with a stream of its own."
        if alone.shape[:1] == batch.y.shape[:1]:  # perhaps a row for each sample, padding included
            values = [value[: len(alone)] for value in values]
        # In bf16 a matrix product with more rows may round differently.
        rtol = 2e-2 if self.precision.autocast else 1e-4
        if all(v.shape == alone.shape and torch.allclose(alone, v, rtol, 1e-6, equal_nan=True) for v in values):
            return None
        return (
            "does not weigh its samples with batch.weight, so its clients run one by one; use batch.mean(values) to "
            "run them together."
        )

    def _tried(self, function: LossFunction, at: Tensor, batch: Batch, extras: Extras, train: bool) -> Tensor:
        mine = of_client(extras, 0)
        with self.model.mode(train), self._inside(None):
            if not train:
                return function(at.detach(), batch, **mine).detach()
            key, p = torch.zeros((), dtype=torch.int64, device=batch.y.device), self.model.parameters(at)
            with FunctionalCall(self.model, self.model.buffers(at)), self._rows(batch, key):
                # A loss may itself differentiate.
                value = function(p.detach().requires_grad_(), batch, **without_buffers(self.model, mine))
                return torch.stack(value).detach()

    def _leaves(self, theta: Tensor, still: Set[str] = frozenset()) -> list[Tensor]:
        return [part.detach().requires_grad_(name not in still) for name, part in self.model.unflatten(theta).items()]

    def _step_of_all(self, loss: LocalLoss, extras: Extras) -> Callable[..., Any]:
        names, segments = list(rows_of(extras)), len(self.model.parameter_names)

        # Separate tensors, not a Batch and a dict: flattening those takes vmap a tenth of a small step.
        def one(
            p: Tensor, statistics: Tensor, key: Tensor, x: Tensor, y: Tensor, weight: Tensor, *rest: Tensor
        ) -> tuple[Tensor, ...]:
            tensors, mine = rest[:segments], rest[segments:]
            batch, call = Batch(x, y, weight), FunctionalCall(self.model, statistics, p, tensors)
            with call, self._rows(batch, key):
                own = without_buffers(self.model, with_rows(extras, dict(zip(names, mine, strict=True))))
                value, reported = loss(p, batch, **own)
            return (value, call.moved()) if reported is value else (value, call.moved(), reported)

        rows = vmap(one)

        # One backward pass through all rows gives the gradients of torch.func.grad, which imports the compiler: longer
        # than a small run. Gradients stay per segment: assembling one for `p` takes a fifth of a small step.
        def step(
            theta: Tensor,
            tensors: Sequence[Tensor],
            statistics: Tensor,
            keys: Tensor,
            batch: Batch,
            mine: Sequence[Tensor],
        ) -> tuple[Sequence[Tensor | None], Tensor | None, Tensor, Tensor]:
            p = theta.detach().requires_grad_()
            values, moved, *reported = rows(p, statistics, keys, *batch, *tensors, *mine)
            # The sum, not values with a gradient of ones, whose shape PyTorch checks with sympy: a slow import.
            grads, direct = gradients_of(values.sum(), tensors, p)
            return grads, direct, (reported[0] if reported else values).detach(), moved.detach()

        return step

    def _rows(self, batch: Batch, key: Tensor) -> contextlib.AbstractContextManager[Any]:
        if self.model.mixes_rows or self.model.has_dropout or self.model.num_buffers:
            return RowWise(batch.weight, key)
        return contextlib.nullcontext()


def _padded(batches: Batches) -> Batch:
    """Batches of unequal length as one, ``[K, b, ...]``, padded with rows of weight 0."""
    if isinstance(batches, StepBatches):
        return batches.padded
    width = max(len(b.y) for b in batches)

    def stack(parts: list[Tensor]) -> Tensor:
        out = parts[0].new_zeros((len(parts), width, *parts[0].shape[1:]))
        for row, part in zip(out, parts, strict=True):
            row[: len(part)] = part
        return out

    return Batch(stack([b.x for b in batches]), stack([b.y for b in batches]), stack([b.weight for b in batches]))
