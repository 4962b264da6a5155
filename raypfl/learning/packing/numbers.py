"""The numbers of local steps in which runs may differ: learning rate, weight decay, and the largest gradient."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from raypfl.learning.optimizers import LocalOptimizer, Update

NUMBERS = ("lr", "weight_decay", "clip_norm")
"""Attributes of an update that may differ from row to row."""


def may_differ(optimizer: LocalOptimizer, a: float | None, b: float | None) -> bool:
    """Whether rows with these two numbers can take a step together: a step of both does the same operations."""
    # Without weight decay or clipping, a step has fewer operations.
    return optimizer.takes_rates and bool(a) and bool(b)


def different_numbers(updates: Sequence[Update]) -> frozenset[str]:
    """Return the names of the numbers that are not the same in all updates."""
    return frozenset(name for name in NUMBERS if len({getattr(update, name) for update in updates}) > 1)


def by_row(update: Update, names: Iterable[str], rows: int) -> Update:
    """Return an update that has these numbers once for each of so many rows."""
    return replace(update, by_row={name: _rows(update, name, rows) for name in sorted(names)})


def joined_update(updates: Sequence[Update], rows: Sequence[int]) -> Update:
    """Return the first update, with numbers by row where the updates differ in them.

    Parameters
    ----------
    rows : how many rows each update has.
    """
    numbers = {}
    for name in sorted(different_numbers(updates)):
        parts = [_rows(update, name, count) for update, count in zip(updates, rows, strict=True)]
        numbers[name] = torch.cat(parts)
    return replace(updates[0], by_row=numbers) if numbers else updates[0]


def _rows(update: Update, name: str, count: int) -> Tensor:
    return torch.full((count, 1), getattr(update, name), dtype=torch.float64)
