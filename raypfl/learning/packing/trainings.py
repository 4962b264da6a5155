"""Join the trainings of several runs' groups into one, and cut out the part of a training that is tried first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raypfl.common.messages import PerClient, per_client, unmarked
from raypfl.learning.executor import GroupTraining
from raypfl.learning.packing.alike import Likeness
from raypfl.learning.packing.numbers import by_row, numbers_of
from raypfl.learning.packing.samples import first_of_order, joined_orders, joined_samples, may_join, of_first
from raypfl.models.extras import Other

MOVED = 0.01
"""The deviation of each entry of a model that is moved for a trial."""


def ends_alone(training: GroupTraining) -> bool:
    """Return whether a client takes steps, the last ones, that no other client takes."""
    steps = np.sort(training.order.steps)
    return len(steps) > 0 and steps[-1] > (steps[-2] if len(steps) > 1 else 0)


def numbers_by_client(training: GroupTraining, names: Iterable[str]) -> dict[str, Tensor]:
    """Return these numbers of a training, once for each client, ``float64[K]``."""
    numbers = numbers_of(training.loss, training.update)
    return {name: torch.full((len(training),), numbers[name], dtype=torch.float64) for name in sorted(names)}


def with_numbers_by_client(training: GroupTraining, numbers: Mapping[str, Tensor]) -> GroupTraining:
    """Return a training in which each client has its own values, ``float64[K]``, of these numbers."""
    if not numbers:
        return training
    loss, update, extras = by_row(training.loss, training.update, numbers)
    return replace(training, loss=loss, update=update, extras={**training.extras, **extras})


def first_steps(training: GroupTraining, count: int) -> GroupTraining:
    """Return the training of the first `count` steps."""
    return replace(training, order=first_of_order(training.order, steps=count))


def first_clients(training: GroupTraining, count: int) -> GroupTraining:
    """Return the training of the first `count` clients."""
    return replace(
        training,
        start=training.start[:count],
        samples=of_first(training.samples, count),
        order=first_of_order(training.order, clients=count),
        keys=training.keys[:count],
        extras={name: _first_rows(extra, count) for name, extra in training.extras.items()},
        correction=None if training.correction is None else training.correction[:count],
    )


def moved_apart(training: GroupTraining) -> GroupTraining:
    """Return a training from models that differ, and with other models among its extras, in all entries."""
    return replace(
        training,
        start=_moved(training.start, 1),
        extras={name: _moved(extra, 2) for name, extra in training.extras.items()},
        correction=None if training.correction is None else _moved(training.correction, 3),
    )


def are_alike(a: GroupTraining, b: GroupTraining, likeness: Likeness) -> bool:
    """Return whether trainings differ only in the numbers of their clients, and in those that may have rows."""
    return (
        a.order.index.shape[2] == b.order.index.shape[2]
        and (a.order.draws is None) == (b.order.draws is None)
        and (a.correction is None) == (b.correction is None)
        and a.start.dtype == b.start.dtype
        and may_join(a.samples, b.samples)
        and likeness.same_loss(a.loss, b.loss)
        and likeness.same_update(a.update, b.update)
        and likeness.same_extras(a.extras, b.extras)
    )


def different_numbers(trainings: Sequence[GroupTraining]) -> frozenset[str]:
    """Return the names of the numbers in which trainings that are alike differ."""
    numbers = [numbers_of(training.loss, training.update) for training in trainings]
    return frozenset(name for name in numbers[0] if len({values[name] for values in numbers}) > 1)


def joined(trainings: Sequence[GroupTraining]) -> GroupTraining:
    """Return one training of all clients of trainings that are alike, the first one's clients first."""
    first = trainings[0]
    numbers = {}
    for name in sorted(different_numbers(trainings)):
        numbers[name] = torch.cat([numbers_by_client(training, [name])[name] for training in trainings])
    corrections = [unmarked(training.correction) for training in trainings if training.correction is not None]
    joined_clients = GroupTraining(
        loss=first.loss,
        start=torch.cat([unmarked(training.start) for training in trainings]),
        samples=joined_samples([training.samples for training in trainings]),
        order=joined_orders([training.order for training in trainings]),
        update=first.update,
        keys=torch.cat([training.keys for training in trainings]),
        extras={name: _joined_extra(name, trainings) for name in first.extras},
        correction=torch.cat(corrections) if corrections else None,
    )
    return with_numbers_by_client(joined_clients, numbers)


def _joined_extra(name: str, trainings: Sequence[GroupTraining]) -> Any:
    """Return an extra for all clients; a tensor gets a row for each, since runs may have different ones."""
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
    """Return a floating-point tensor after a small step in a random direction; anything else unchanged."""
    if isinstance(extra, Other):
        return replace(extra, theta=_moved(extra.theta, seed))
    if not isinstance(extra, Tensor) or not extra.is_floating_point():
        return extra
    plain = unmarked(extra)
    noise = torch.randn(plain.shape, generator=torch.Generator().manual_seed(seed), dtype=plain.dtype)
    moved = plain + MOVED * noise
    return per_client(moved) if isinstance(extra, PerClient) else moved
