"""Join the samples of several groups, and the orders in which their clients visit them."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
import torch

from raypfl.learning.batches import GroupSamples
from raypfl.learning.sample_order import SampleOrder


def may_join(a: GroupSamples, b: GroupSamples) -> bool:
    """Return whether joining the samples of two runs' groups leaves every sample unchanged."""
    alike = (a.x.shape[1:], a.y.shape[1:]) == (b.x.shape[1:], b.y.shape[1:])
    alike &= (a.x.dtype, a.y.dtype) == (b.x.dtype, b.y.dtype)
    alike &= list(a._source.augmentation) == list(b._source.augmentation)
    if not alike or a.normalises_once != b.normalises_once:
        return False

    # Each run normalises by the moments of its own training samples. But joined samples that are normalised in every
    # step, or filled with black by an augmentation, would take the moments of the first group.
    if a.normalises_once and not a._source.augmentation:
        return True
    return torch.equal(a._source.gain, b._source.gain) and torch.equal(a._source.offset, b._source.offset)


def joined_samples(groups: Sequence[GroupSamples]) -> GroupSamples:
    """Return the samples of several groups' clients, the first group's first, normalised as each group has them."""
    first = groups[0]
    joined = copy.copy(first)
    joined.sizes = np.concatenate([group.sizes for group in groups])
    joined.width = max(group.width for group in groups)
    offsets = np.cumsum([0, *(len(group.y) for group in groups)])
    joined._starts = np.concatenate([group._starts + offset for group, offset in zip(groups, offsets, strict=False)])
    joined.x = torch.cat([group.x for group in groups])
    joined.y = torch.cat([group.y for group in groups])
    joined._normalised = torch.cat([group.normalised() for group in groups]) if first.normalises_once else None
    return joined


def of_first(samples: GroupSamples, count: int) -> GroupSamples:
    """Return the samples of the first `count` clients, in the same memory."""
    first = copy.copy(samples)
    first.sizes = samples.sizes[:count]
    first._starts = samples._starts[:count]
    return first


def joined_orders(orders: Sequence[SampleOrder]) -> SampleOrder:
    """Return the orders of several groups' clients, the first group's first; their batches must be equally long."""
    longest = max(order.index.shape[1] for order in orders)

    def padded(values: np.ndarray) -> np.ndarray:
        rows = np.zeros((len(values), longest, *values.shape[2:]), values.dtype)
        rows[:, : values.shape[1]] = values
        return rows

    draws = [padded(order.draws) for order in orders if order.draws is not None]
    return SampleOrder(
        index=np.concatenate([padded(order.index) for order in orders]),
        counts=np.concatenate([padded(order.counts) for order in orders]),
        steps=np.concatenate([order.steps for order in orders]),
        draws=np.concatenate(draws) if draws else None,
    )


def first_of_order(order: SampleOrder, clients: int | None = None, steps: int | None = None) -> SampleOrder:
    """Return the first `steps` steps of the first `clients`; None: all."""
    draws = None if order.draws is None else order.draws[:clients, :steps]
    index = order.index[:clients, :steps]
    num_steps = np.minimum(order.steps[:clients], index.shape[1])
    return SampleOrder(index, order.counts[:clients, :steps], num_steps, draws)
