"""The numbers in which trainings of several runs may differ, and which have a row for each client if they do.

They are a local step's (learning rate, weight decay, largest gradient) and those in variables around the functions of a
loss, such as the strength of a penalty.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import replace
from functools import partial
from types import CellType, FunctionType
from typing import Any

from torch import Tensor

from raypfl.common.messages import per_client
from raypfl.learning.loss import LocalLoss, LossFunction, extras_of
from raypfl.learning.optimizers import LocalOptimizer, Update
from raypfl.models.row_number import RowNumber

NUMBERS = ("lr", "weight_decay", "clip_norm")
"""Attributes of an update that may differ from row to row."""

FUNCTIONS = ("loss", "penalty", "report")
"""The functions of a loss."""


def may_differ(optimizer: LocalOptimizer, a: float | None, b: float | None) -> bool:
    """Return whether rows with these two numbers can take a step together: both steps have the same operations."""
    # Without weight decay or clipping, a step has fewer operations.
    return optimizer.takes_rates and bool(a) and bool(b)


def numbers_of(loss: LocalLoss, update: Update) -> dict[str, Any]:
    """Return the numbers in which trainings that are alike may differ, by name; those of functions are ``loss.mu``."""
    return {name: getattr(update, name) for name in NUMBERS} | _numbers_of_functions(loss)


def fixed_numbers(loss: LocalLoss, by_row: Set[str]) -> dict[str, float]:
    """Return the numbers of a loss's functions that have no rows."""
    return {name: number for name, number in _numbers_of_functions(loss).items() if name not in by_row}


def _numbers_of_functions(loss: LocalLoss) -> dict[str, float]:
    numbers: dict[str, float] = {}
    for part in FUNCTIONS:
        function = getattr(loss, part)
        if isinstance(function, FunctionType):
            for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
                if type(cell.cell_contents) is float:
                    numbers[f"{part}.{variable}"] = cell.cell_contents
    return numbers


def by_row(
    loss: LocalLoss, update: Update, rows: Mapping[str, Tensor]
) -> tuple[LocalLoss, Update, dict[str, RowNumber]]:
    """Return a loss and an update that take some numbers by row, and the extras that the loss then needs besides.

    `rows` : the values ``float64[K]`` of these numbers, named as by :func:`numbers_of`.
    """
    step_numbers = {name: values[:, None] for name, values in rows.items() if name in NUMBERS}
    extras = {name: RowNumber(per_client(values)) for name, values in rows.items() if name not in NUMBERS}

    parts: dict[str, Any] = {}
    for part in FUNCTIONS:
        variables = {name.removeprefix(f"{part}."): name for name in extras if name.startswith(f"{part}.")}
        if variables:
            function = getattr(loss, part)
            parts[part] = partial(_call_with_numbers, function, variables, extras_of(function))
    return replace(loss, **parts), replace(update, by_row=step_numbers), extras


def _call_with_numbers(
    function: FunctionType,
    variables: Mapping[str, str],
    names: frozenset[str] | None,
    p: Tensor,
    batch: Any,
    **extras: Any,
) -> Any:
    """Call a function with numbers from extras in variables around it.

    Parameters
    ----------
    variables : variable -> the extra with its number.
    names : the extras that the function takes; None: all others.
    """
    cells = []
    for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        cells.append(CellType(extras[variables[variable]]) if variable in variables else cell)
    with_numbers: LossFunction = FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, tuple(cells)
    )
    with_numbers.__kwdefaults__ = function.__kwdefaults__

    used = extras.keys() - variables.values() if names is None else names
    return with_numbers(p, batch, **{name: extra for name, extra in extras.items() if name in used})
