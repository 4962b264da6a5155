"""Running a function of one client for a whole group: all clients at once, or one by one.

A *loss* here is a :class:`Minimised` function of one client's trainable parameters ``p[P]``, a batch and extras; a
*function* is the same with any output. Extras come as ``{name: tensor}``; those that are :class:`PerClient` have a row
for each client.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn, vmap

from raypfl.federation.batches import Batch, Batches, GroupSamples, Order, StepBatches
from raypfl.federation.descent import Descent, assemble, by_samples, sample_keys, segments
from raypfl.federation.minimised import Loss, Minimised
from raypfl.federation.unkeyed import torch_streams
from raypfl.messages import one_client_at_a_time
from raypfl.models.extras import Extras, chosen, of_client, rows_of, trimmed, with_rows
from raypfl.models.flat import BoundModel, FlatModel
from raypfl.models.predictor import Predictor
from raypfl.models.rowwise import RowWise
from raypfl.optimizers import Memory, Update


class Executor(Protocol):
    """What a group at work needs; both implementations give the same up to floating-point rounding."""

    def sgd(
        self,
        loss: Minimised,
        start: Tensor,
        samples: GroupSamples,
        visits: Order,
        update: Update,
        keys: Tensor,
        extras: Extras,
        correction: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Train from ``start[K, P+B]``; returns ``(trained[K, P+B], mean of what is reported[K])``.

        ``correction[K, P]`` is added to all gradients.
        """
        ...

    def grad(
        self, loss: Minimised, at: Tensor, batches: Batches, keys: Tensor, extras: Extras, update: Update | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradient of each client's loss on its batch: ``(gradients[K, P], reported[K], statistics[K, B] after it)``.

        With an `update` that asks for the gradients of single samples, it is what its optimizer makes of those.
        """
        ...

    def map(self, function: Loss, at: Tensor, batches: list[Batch], keys: Tensor, extras: Extras) -> Tensor:
        """``[K, ...]``: the function of each client's ``at[k]`` and batch; autograd goes through it.

        Where it gives a row for each sample, rows of zeros stand behind those of clients with fewer than the largest.
        """
        ...

    def predict(self, at: Tensor | Predictor, x: Tensor, own: bool) -> Tensor:
        """Outputs ``[K, b, ...]`` of K models, ``[K, P+B]`` or a predictor's, without gradients; the caller sets
        evaluation mode.

        `x` has each model's own inputs, ``[K, b, C, H, W]``, or the same for all, ``[b, C, H, W]``.
        """
        ...


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


class Sequential:
    """Client by client over one flat buffer to which an ordinary module is bound."""

    def __init__(self, model: FlatModel, precision: Precision = Precision()):
        self.model = model
        self.precision = precision

    def sgd(
        self,
        loss: Minimised,
        start: Tensor,
        samples: GroupSamples,
        visits: Order,
        update: Update,
        keys: Tensor,
        extras: Extras,
        correction: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        trained = _copied(start)
        losses = torch.zeros(len(start), dtype=start.dtype, device=start.device)
        with self.model.bound() as bound, self.model.mode(train=True), _forked(start.device):
            gradient, still = Descent.buffer(update, self.model.parameters(trained[0])), _still(self.model, update)
            for k, steps in enumerate(visits.steps):
                added = None if correction is None else correction[k]
                descent = self._begun(bound, trained[k], still, update, gradient, keys[k], added)
                mine = trimmed(self.model, of_client(extras, k))
                own = samples.steps(k, visits)
                for s in range(steps):
                    reported = self._step(loss, descent, self._batch(own(s)), keys[k] + s, mine)
                    losses[k] += reported / int(steps)
        return trained, losses

    def train(
        self,
        loss: Minimised,
        theta: Tensor,
        batches: Iterable[Batch],
        update: Update,
        rate: Callable[[int], float],
        key: Tensor,
        extras: Extras,
        training: bool = True,
    ) -> Iterator[Tensor]:
        """Train one model ``theta[P+B]`` in place, a step for each batch; yields what each reports.

        Parameters
        ----------
        rate : the learning rate of each step, in place of the update's.
        training : whether the network is in training mode. Batches are drawn while it is not.
        """
        mine, still = trimmed(self.model, dict(extras)), _still(self.model, update)
        gradient = Descent.buffer(update, self.model.parameters(theta))
        with self.model.bound() as bound, _forked(theta.device):
            descent = self._begun(bound, theta, still, update, gradient, key)
            for s, batch in enumerate(self._drawn(batches)):
                descent.update = replace(update, lr=rate(s))
                with self.model.mode(training):
                    reported = self._step(loss, descent, self._batch(batch), key + s, mine)
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
        gradient: Tensor | None,
        key: Tensor,
        correction: Tensor | None = None,
    ) -> Descent:
        """Steps of a model vector ``[P+B]``, which is trained in place from its first one on."""
        bound.bind(vector, still)
        _seed(vector.device, key)
        memory = update.init(self.model.parameters(vector))
        return Descent(self.model, update, bound.theta, bound.tensors, gradient, memory, correction)

    def _step(self, loss: Minimised, descent: Descent, batch: Batch, key: Tensor, extras: dict[str, Any]) -> Tensor:
        """Take a step; returns what is reported."""
        if descent.update.optimizer.per_sample:
            slope = partial(self._slope, loss, descent, extras)
            gradient, reported = self._by_samples(descent.update, descent.theta, batch, key, slope)
            descent.step_whole(gradient)
            return reported
        with self._inside(key):
            value, reported = loss(descent.theta, batch, **extras)
        descent.step(*_gradients(value, descent.tensors, descent.theta))
        return reported.detach()

    def _slope(
        self, loss: Minimised, descent: Descent, extras: dict[str, Any], batch: Batch, key: Tensor
    ) -> tuple[Tensor, Tensor]:
        with self._inside(key):
            value, reported = loss(descent.theta, batch, **extras)
        slope = torch.empty_like(descent.theta)
        assemble(segments(self.model, slope), *_gradients(value, descent.tensors, descent.theta), into=slope)
        return slope, reported.detach()

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

    def grad(
        self, loss: Minimised, at: Tensor, batches: Batches, keys: Tensor, extras: Extras, update: Update | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        gradients, losses, statistics = [], [], []
        with self.model.mode(train=True), _forked(at.device):
            for k, batch in enumerate(batches):
                _seed(at.device, keys[k])
                p = self.model.parameters(at[k]).detach().requires_grad_()
                slope = partial(self._slope_at, loss, p, trimmed(self.model, of_client(extras, k)))
                with self.model.statistics(self.model.buffers(at[k])) as moved:
                    if update is None or not update.optimizer.per_sample:
                        gradient, reported = slope(self._batch(batch), keys[k])
                    else:
                        gradient, reported = self._by_samples(update, p, self._batch(batch), keys[k], slope)
                    statistics.append(moved().detach())
                gradients.append(gradient)
                losses.append(reported)
        return torch.stack(gradients), torch.stack(losses), torch.stack(statistics)

    def _slope_at(
        self, loss: Minimised, p: Tensor, extras: dict[str, Any], batch: Batch, key: Tensor
    ) -> tuple[Tensor, Tensor]:
        with self._inside(key):
            value, reported = loss(p, batch, **extras)
        return torch.autograd.grad(value, p)[0], reported.detach()

    def map(self, function: Loss, at: Tensor, batches: list[Batch], keys: Tensor, extras: Extras) -> Tensor:
        rows = []
        with self.model.mode(train=False), self._inside(None), _forked(at.device):
            for k, batch in enumerate(batches):
                _seed(at.device, keys[k])
                rows.append(function(at[k], self._batch(batch), **of_client(extras, k)))
        sizes = [len(batch.y) for batch in batches]
        if len(set(sizes)) > 1 and [len(row) if row.dim() else 0 for row in rows] == sizes:
            return nn.utils.rnn.pad_sequence(rows, batch_first=True)
        return torch.stack(rows)

    def predict(self, at: Tensor | Predictor, x: Tensor, own: bool) -> Tensor:
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
        with one_client_at_a_time(), self.precision.context(self.model.device), self.model.step(), draws:
            yield


def _still(model: FlatModel, update: Update) -> frozenset[str]:
    """Segments of which no entry moves. No gradient of theirs is computed, nor of what only they need."""
    if update.trained is None:
        return frozenset()
    parts = model.unflatten(update.trained)
    return frozenset(name for name in model.parameter_names if not bool(parts[name].any()))


def _copied(rows: Tensor, order: Tensor | None = None) -> Tensor:
    """A contiguous copy with rows in this order. NumPy asks for larger pages for a large array: to get those takes a
    tenth of the time."""
    if rows.stride(0) == 0:
        order = None  # one row for all, which need not be gathered first
    if rows.device.type != "cpu":
        return rows.clone(memory_format=torch.contiguous_format) if order is None else rows[order]
    copy = torch.from_numpy(np.empty(rows.shape, rows.new_empty(0).numpy().dtype))
    return copy.copy_(rows) if order is None else torch.index_select(rows.detach(), 0, order, out=copy)


def _seed(device: torch.device, key: Tensor) -> None:
    """Seed torch's global streams.

    ``torch.manual_seed`` formats its caller's stack for every kind of device, whether there is one or not: a
    millisecond, which is as long as a small client's step.
    """
    torch.default_generator.manual_seed(int(key))
    if device.type == "cuda":
        torch.cuda.manual_seed_all(int(key))


def _forked(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Within: torch's global streams may be seeded; whatever a network draws from them is then keyed, too."""
    return torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])


def _gradients(
    value: Tensor, tensors: Sequence[Tensor], theta: Tensor
) -> tuple[Sequence[Tensor | None], Tensor | None]:
    """Gradients of `value` for its leaves `tensors` and `theta`: None for what it does not use or what stands still."""
    if not value.requires_grad:
        return [None] * len(tensors), None
    moving = [t for t in tensors if t.requires_grad]
    *found, direct = torch.autograd.grad(value, [*moving, theta], allow_unused=True)
    if len(moving) == len(tensors):
        return found, direct
    rest = iter(found)
    return [next(rest) if t.requires_grad else None for t in tensors], direct


class Vectorised:
    """All clients of the group at once with ``vmap``; unequal batches are padded and masked."""

    def __init__(self, model: FlatModel, precision: Precision = Precision()):
        self.model = model
        self.precision = precision

    def sgd(
        self,
        loss: Minimised,
        start: Tensor,
        samples: GroupSamples,
        visits: Order,
        update: Update,
        keys: Tensor,
        extras: Extras,
        correction: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        rank = np.argsort(-visits.steps, kind="stable")
        walk, steps = samples.walk(rank, visits), visits.steps[rank]
        parts = (self.model.parameters(start), self.model.buffers(start))
        if bool((rank[1:] > rank[:-1]).all()):
            theta, statistics = (_copied(rows) for rows in parts)
            return self._longest_first(loss, theta, statistics, walk, steps, update, keys, extras, correction)
        ranked = torch.from_numpy(rank).to(start.device)
        theta, statistics = (_copied(rows, ranked) for rows in parts)
        added = None if correction is None else correction[ranked]
        of = (theta, statistics, walk, steps, update, keys[ranked], chosen(extras, ranked), added)
        trained, losses = self._longest_first(loss, *of)
        back = ranked.argsort()
        return trained[back], losses[back]

    def _longest_first(
        self,
        loss: Minimised,
        theta: Tensor,
        statistics: Tensor,
        walk: Callable[..., Batch],
        steps: np.ndarray,
        update: Update,
        keys: Tensor,
        extras: Extras,
        correction: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Train in place, in the order of clients' steps: those still at it are always the first rows."""
        gradient, memory = Descent.buffer(update, theta), update.init(theta)
        losses = torch.zeros(len(theta), dtype=theta.dtype, device=theta.device)
        mine = list(rows_of(extras).values())
        step, still = self._step(loss, extras), _still(self.model, update)
        descent: Descent | None = None
        with self.model.mode(train=True), self._inside():
            for s in range(steps.max(initial=0)):
                k = int((steps > s).sum())
                if descent is None or len(descent.theta) > k:
                    buffers = (None if rows is None else rows[:k] for rows in (gradient, correction))
                    descent = self._descent(update, theta[:k], still, memory, *buffers)
                batch, active = walk(slice(k), s), [rows[:k] for rows in mine]
                if update.optimizer.per_sample:
                    whole, value = self._by_samples(step, update, descent.theta, keys[:k] + s, batch, active)
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
        return torch.cat([theta, statistics], dim=1) if self.model.num_buffers else theta, losses

    def _descent(
        self,
        update: Update,
        theta: Tensor,
        still: Set[str],
        memory: Memory,
        gradient: Tensor | None,
        correction: Tensor | None,
    ) -> Descent:
        """Of the clients whose models `theta` are, the first of all."""
        mine = {name: rows[: len(theta)] for name, rows in memory.items()}
        return Descent(self.model, update, theta, self._leaves(theta, still), gradient, mine, correction)

    def _by_samples(
        self,
        step: Callable[..., Any],
        update: Update,
        theta: Tensor,
        keys: Tensor,
        batch: Batch,
        mine: Sequence[Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Gradients ``[K, P]`` and reports ``[K]`` of batches, from those of single samples, each as if a client's."""

        def rows(start: int, stop: int) -> tuple[Tensor, Tensor]:
            shape = (len(theta), stop - start)
            at, *extras = (rows.repeat_interleave(stop - start, 0) for rows in (theta, *mine))
            alone = Batch(*(part[:, start:stop].flatten(0, 1)[:, None] for part in batch))
            leaves, none = self._leaves(at, _still(self.model, update)), at[:, :0]
            grads, direct, values, _ = step(at, leaves, none, sample_keys(keys, start, stop).flatten(), alone, extras)
            gradients = torch.empty_like(at)
            assemble(segments(self.model, gradients), grads, direct, into=gradients)
            return gradients.unflatten(0, shape), values.unflatten(0, shape)

        return by_samples(update, theta, batch.weight, keys, rows)

    def grad(
        self, loss: Minimised, at: Tensor, batches: Batches, keys: Tensor, extras: Extras, update: Update | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        theta, statistics = self.model.parameters(at), self.model.buffers(at)
        mine = list(rows_of(extras).values())
        with self.model.mode(train=True), self._inside():
            step, batch = self._step(loss, extras), _padded(batches)
            if update is not None and update.optimizer.per_sample:
                return *self._by_samples(step, update, theta, keys, batch, mine), statistics
            grads, direct, value, moved = step(theta, self._leaves(theta), statistics, keys, batch, mine)
        gradient = torch.empty_like(theta, memory_format=torch.contiguous_format)
        assemble(segments(self.model, gradient), grads, direct, into=gradient)
        return gradient, value, moved

    def map(self, function: Loss, at: Tensor, batches: list[Batch], keys: Tensor, extras: Extras) -> Tensor:
        one, padded = vmap(lambda p, batch, mine: function(p, batch, **with_rows(extras, mine))), _padded(batches)
        with self.model.mode(train=False), self._inside():
            values = one(at, padded, rows_of(extras))
            if values.shape[1:2] != padded.y.shape[1:2] or not self._gives_rows(function, at, batches, extras):
                return values
        return values.masked_fill(padded.weight.reshape(*padded.weight.shape, *[1] * (values.dim() - 2)) == 0, 0)

    def _gives_rows(self, function: Loss, at: Tensor, batches: list[Batch], extras: Extras) -> bool:
        """Whether a function gives a row for each sample: seen at the client with fewest, if others have more."""
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

    def unfit_for_padding(self, function: Loss, at: Tensor, batch: Batch, extras: Extras, train: bool) -> str | None:
        """What keeps `function` from running on padded batches, if anything: tried on the first client of a group.

        `at` is that client's model vector, `batch` some samples of it; a loss is tried in training mode. Nothing is
        remembered: the answer may change over rounds, and must not depend on which groups this process saw before.
        """
        twice, none = torch.cat([batch.x, batch.x]), torch.zeros_like(batch.weight)
        other = batch.x.flip(0)
        strange = torch.cat([batch.x, other.neg().add(1.0) if other.is_floating_point() else other])
        weight = torch.cat([batch.weight, none])
        padded = [
            Batch(twice, torch.cat([batch.y, batch.y.flip(0)]), weight),
            Batch(strange, torch.cat([batch.y, torch.zeros_like(batch.y)]), weight),
        ]
        with _forked(at.device):
            before = torch_streams(at.device)
            alone, *values = [self._value(function, at, b, extras, train) for b in (batch, *padded)]
            if not torch.equal(before, torch_streams(at.device)):
                return "draws random numbers, so its clients run one by one, each with a stream of its own."
        if alone.shape[:1] == batch.y.shape[:1]:  # perhaps a row for each sample, and more for padding
            values = [value[: len(alone)] for value in values]
        # In bf16 a matrix product of more rows may round otherwise.
        rtol = 2e-2 if self.precision.autocast else 1e-4
        if all(v.shape == alone.shape and torch.allclose(alone, v, rtol, 1e-6, equal_nan=True) for v in values):
            return None
        return (
            "does not weigh its samples with batch.weight, so its clients run one by one; use batch.mean(values) to "
            "run them together."
        )

    def _value(self, function: Loss, at: Tensor, batch: Batch, extras: Extras, train: bool) -> Tensor:
        mine = of_client(extras, 0)
        with self.model.mode(train), self._inside():
            if not train:
                return function(at.detach(), batch, **mine).detach()
            key, p = torch.zeros((), dtype=torch.int64, device=batch.y.device), self.model.parameters(at)
            with self.model.statistics(self.model.buffers(at)), self.model.step(), self._rows(batch, key):
                # A loss may itself differentiate.
                value = function(p.detach().requires_grad_(), batch, **trimmed(self.model, mine))
                return torch.stack(value).detach()

    def _leaves(self, theta: Tensor, still: Set[str] = frozenset()) -> list[Tensor]:
        return [part.detach().requires_grad_(name not in still) for name, part in self.model.unflatten(theta).items()]

    def _step(self, loss: Minimised, extras: Extras) -> Callable[..., Any]:
        names = list(rows_of(extras))
        segments = self.model.parameter_names

        # Tensors one by one, not in a Batch and a dict: vmap takes a tenth of a small step to take those apart.
        def one(
            p: Tensor, statistics: Tensor, key: Tensor, x: Tensor, y: Tensor, weight: Tensor, *rest: Tensor
        ) -> tuple[Tensor, ...]:
            tensors, mine = rest[: len(segments)], rest[len(segments) :]
            batch = Batch(x, y, weight)
            parts = self.model.parts(p, dict(zip(segments, tensors, strict=True)))
            with parts, self.model.statistics(statistics) as moved, self.model.step(), self._rows(batch, key):
                own = trimmed(self.model, with_rows(extras, dict(zip(names, mine, strict=True))))
                value, reported = loss(p, batch, **own)
            return (value, moved()) if reported is value else (value, moved(), reported)

        rows = vmap(one)

        # One backward pass through all rows, not torch.func.grad: the same gradients, but that imports the compiler,
        # which takes longer than a small run. A gradient for each segment: putting them together into one for `p` takes
        # a fifth of a small step.
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
            # The sum, and not values with a gradient of ones: PyTorch imports sympy to check that one's shape.
            grads, direct = _gradients(values.sum(), tensors, p)
            return grads, direct, (reported[0] if reported else values).detach(), moved.detach()

        return step

    def _rows(self, batch: Batch, key: Tensor) -> contextlib.AbstractContextManager[Any]:
        if self.model.mixes_rows or self.model.has_dropout or self.model.num_buffers:
            return RowWise(batch.weight, key)
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def _inside(self) -> Iterator[None]:
        with one_client_at_a_time(), self.precision.context(self.model.device):
            yield


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
