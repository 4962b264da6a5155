"""Trainings of groups of clients, and how those of several runs become one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raypfl.common.messages import PerClient, per_client, unmarked
from raypfl.learning.batches import GroupSamples
from raypfl.learning.executor import Executor
from raypfl.learning.loss import LocalLoss
from raypfl.learning.optimizers import Update
from raypfl.learning.packing.alike import Likeness
from raypfl.learning.packing.numbers import by_row, numbers_of
from raypfl.learning.packing.samples import first_steps, joined_orders, joined_samples, may_join, of_first
from raypfl.learning.sample_order import SampleOrder
from raypfl.models.extras import Extras, Other

MOVED = 0.01
"""The deviation of each entry of a model that is moved for a trial."""


@dataclass(frozen=True, eq=False)
class GroupTraining:
    """The arguments of :meth:`raypfl.learning.executor.Executor.sgd`, without an observer."""

    loss: LocalLoss
    start: Tensor
    samples: GroupSamples
    order: SampleOrder
    update: Update
    keys: Tensor
    extras: Extras
    correction: Tensor | None = None

    def __len__(self) -> int:
        return len(self.start)

    @property
    def steps_in_company(self) -> int:
        """The number of steps that more than one of the clients take."""
        return int(np.sort(self.order.steps)[-2]) if len(self) > 1 else 0

    @property
    def ends_alone(self) -> bool:
        """Whether a client takes steps, the last ones, that no other client takes."""
        return self.steps_in_company < self.order.steps.max(initial=0)

    def run(self, executor: Executor) -> tuple[Tensor, Tensor]:
        """Train; return the trained models ``[K, P+B]`` and the losses ``[K]``."""
        return executor.sgd(
            self.loss,
            self.start,
            self.samples,
            self.order,
            self.update,
            self.keys,
            self.extras,
            self.correction,
        )

    def at_rate(self, lr: float) -> GroupTraining:
        """Return the training at another learning rate."""
        return replace(self, update=replace(self.update, lr=lr))

    def with_rows(self, rows: Mapping[str, Tensor]) -> GroupTraining:
        """Return the training with a row for each client of these numbers, ``float64[K]``."""
        if not rows:
            return self
        loss, update, numbers = by_row(self.loss, self.update, rows)
        return replace(self, loss=loss, update=update, extras={**self.extras, **numbers})

    def rows_of(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return these numbers, once for each client, ``float64[K]``."""
        numbers = numbers_of(self.loss, self.update)
        return {name: torch.full((len(self),), numbers[name], dtype=torch.float64) for name in sorted(names)}

    def shortened(self, steps: int) -> GroupTraining:
        """Return a training of the first `steps` steps."""
        return replace(self, order=first_steps(self.order, steps))

    def moved_apart(self) -> GroupTraining:
        """Return a training from models that differ, and with other models among its extras, in all entries."""
        return replace(
            self,
            start=_moved(self.start, 1),
            extras={name: _moved(extra, 2) for name, extra in self.extras.items()},
            correction=None if self.correction is None else _moved(self.correction, 3),
        )

    def of_first(self, count: int) -> GroupTraining:
        """Return the training of the first `count` clients."""
        order = self.order
        return replace(
            self,
            start=self.start[:count],
            samples=of_first(self.samples, count),
            order=SampleOrder(
                order.index[:count],
                order.counts[:count],
                order.steps[:count],
                None if order.draws is None else order.draws[:count],
            ),
            keys=self.keys[:count],
            extras={name: _first_rows(extra, count) for name, extra in self.extras.items()},
            correction=None if self.correction is None else self.correction[:count],
        )

    def is_like(self, other: GroupTraining, likeness: Likeness) -> bool:
        """Whether the trainings differ only in the numbers of their clients, and in those that may have rows."""
        batches_are_alike = self.order.index.shape[2] == other.order.index.shape[2]
        batches_are_alike &= (self.order.draws is None) == (other.order.draws is None)
        return (
            batches_are_alike
            and (self.correction is None) == (other.correction is None)
            and self.start.dtype == other.start.dtype
            and may_join(self.samples, other.samples)
            and likeness.losses(self.loss, other.loss)
            and likeness.updates(self.update, other.update)
            and likeness.extras(self.extras, other.extras)
        )


def different_numbers(trainings: Sequence[GroupTraining]) -> frozenset[str]:
    """Return the names of the numbers in which trainings that are alike differ."""
    numbers = [numbers_of(training.loss, training.update) for training in trainings]
    return frozenset(name for name in numbers[0] if len({values[name] for values in numbers}) > 1)


def joined(trainings: Sequence[GroupTraining]) -> GroupTraining:
    """Return one training of all clients of trainings that are alike, the first one's clients first."""
    first = trainings[0]
    names = different_numbers(trainings)
    rows_of_runs = [training.rows_of(names) for training in trainings]
    rows = {name: torch.cat([run_rows[name] for run_rows in rows_of_runs]) for name in rows_of_runs[0]}
    correction = None
    if first.correction is not None:
        correction = torch.cat([_of(training.correction) for training in trainings])

    joined_clients = GroupTraining(
        loss=first.loss,
        start=torch.cat([unmarked(training.start) for training in trainings]),
        samples=joined_samples([training.samples for training in trainings]),
        order=joined_orders([training.order for training in trainings]),
        update=first.update,
        keys=torch.cat([training.keys for training in trainings]),
        extras={name: _joined_extra(name, trainings) for name in first.extras},
        correction=correction,
    )
    return joined_clients.with_rows(rows)


def _of(correction: Tensor | None) -> Tensor:
    assert correction is not None
    return unmarked(correction)


def _joined_extra(name: str, trainings: Sequence[GroupTraining]) -> Any:
    """Return an extra with a row for each client, if it is made of tensors: what all clients of a run share differs
    between runs.
    """
    extra = trainings[0].extras[name]
    if isinstance(extra, Other):
        rows = [_rows(training.extras[name].theta, len(training)) for training in trainings]
        return replace(extra, theta=per_client(torch.cat(rows)))
    if isinstance(extra, Tensor):
        return per_client(torch.cat([_rows(training.extras[name], len(training)) for training in trainings]))
    return extra


def _rows(tensor: Tensor, count: int) -> Tensor:
    """Return a tensor with a row for each client."""
    if isinstance(tensor, PerClient):
        return unmarked(tensor)
    return tensor.expand(count, *tensor.shape)


def _first_rows(extra: Any, count: int) -> Any:
    if isinstance(extra, Other):
        return replace(extra, theta=_first_rows(extra.theta, count))
    return per_client(unmarked(extra)[:count]) if isinstance(extra, PerClient) else extra


def _moved(extra: Any, seed: int) -> Any:
    """Return what tensors in floating point are after a small step in a random direction."""
    if isinstance(extra, Other):
        return replace(extra, theta=_moved(extra.theta, seed))
    if not isinstance(extra, Tensor) or not extra.is_floating_point():
        return extra
    plain = unmarked(extra)
    noise = torch.randn(plain.shape, generator=torch.Generator().manual_seed(seed), dtype=plain.dtype)
    moved = plain + MOVED * noise
    return per_client(moved) if isinstance(extra, PerClient) else moved
