"""A number with a value for each client, in place of a float that a loss was written for."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True, eq=False)
class RowNumber:
    """A float with a value for each client; its arithmetic has the bits of Python floats.

    Operations with other numbers are in double precision, and those with a tensor take the value in its precision, as
    PyTorch takes a float. Whatever else a float can do, such as a comparison, raises a TypeError: clients could need
    other operations, or get other bits.

    `values` : ``float64[K]``; a loss sees the value of its own client, ``float64``.
    """

    values: Tensor

    def __add__(self, other: Any) -> Any:
        return self._combined(operator.add, other)

    def __sub__(self, other: Any) -> Any:
        return self._combined(operator.sub, other)

    def __rsub__(self, other: Any) -> Any:
        return -self + other

    def __mul__(self, other: Any) -> Any:
        return self._combined(operator.mul, other)

    __radd__ = __add__
    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Any:
        # For a float, PyTorch makes this reciprocal() * float.
        return NotImplemented if isinstance(other, Tensor) else self._combined(operator.truediv, other)

    def __rtruediv__(self, other: Any) -> Any:
        if isinstance(other, Tensor) and other.is_floating_point():
            return other / self.values.to(other.dtype)
        return NotImplemented

    def __neg__(self) -> RowNumber:
        return RowNumber(-self.values)

    def __bool__(self) -> bool:
        raise TypeError("a number of which each client has its own is neither true nor false")

    def __eq__(self, other: object) -> bool:
        raise TypeError("a number of which each client has its own cannot be compared")

    __hash__ = None  # type: ignore[assignment]

    def _combined(self, operation: Callable[[Any, Any], Any], other: Any) -> Any:
        if isinstance(other, RowNumber):
            return RowNumber(operation(self.values, other.values))
        if isinstance(other, Tensor) and other.is_floating_point():
            return operation(self.values.to(other.dtype), other)
        if isinstance(other, (int, float)):
            return RowNumber(operation(self.values, other))
        return NotImplemented
