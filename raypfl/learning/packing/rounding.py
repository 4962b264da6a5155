"""Whether the operations of a step round a client's numbers alike among many clients, among few, and alone.

The results of a few steps do not always show it. Kernels take a sigmoid of the last numbers of a tensor by another
formula than of the others: one of some thousands has other bits. And a single client's product of matrices, or its
convolution, may be added up in another order, which a step hides whose other terms are larger. So each operation is
tried on many numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

NUMBERS = 2**12
"""How many numbers an operation on each number by itself is tried on, and how many a product has to give at least."""

TAIL = 32
"""Kernels take numbers in pieces of at most so many, and what remains of a tensor one by one."""

FEW = 3
"""With so many clients, and with fewer, a product is compared with that of many."""

aten = torch.ops.aten

CONVOLUTIONS: dict[Any, tuple[tuple[int, ...], int, tuple[int, ...]]] = {
    aten.convolution.default: ((1, 0, 0), 8, (1,)),
    aten.convolution_backward.default: ((1, 1, 0), 9, (1, 0, 0)),
}
"""Where they have the channels of all clients, a group for each: the axis in the first arguments, tensors; the argument
with the number of groups; and the axis in the results."""


@dataclass(frozen=True)
class Shape:
    """How a tensor lies in memory."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> Shape:
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype)


@dataclass(frozen=True)
class OperationCall:
    """A call of an operation, with a `Shape` in place of each tensor.

    Attributes
    ----------
    numbers, dtype : how many numbers its first result has, and of which type.
    """

    function: Any
    arguments: list[Any]
    options: dict[str, Any]
    numbers: int
    dtype: torch.dtype


class Calls(TorchDispatchMode):
    """While active, notes the operations that may round, each once."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, OperationCall] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Otherwise the first use in a process imports torch's compiler.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        outlines = None
        if func is aten.bmm.default or func in CONVOLUTIONS or torch.Tag.pointwise in func.tags:
            # Noted before the call, which may return one of its arguments.
            outlines = (_outline(list(args)), _outline(options))
        result = func(*args, **options)
        first = next((value for value in _values(result) if isinstance(value, Tensor)), None)
        if outlines and first is not None and first.is_floating_point():
            call = OperationCall(func, *outlines, first.numel(), first.dtype)
            self.calls.setdefault(repr(call), call)
        return result


def rounds_alike(calls: Iterable[OperationCall], rows: int, dtype: torch.dtype) -> tuple[bool, bool]:
    """Return whether operations round a client's numbers alike among many and few clients; and alone, too.

    Parameters
    ----------
    calls : the operations of a step.
    rows : the number of clients in it.
    dtype : the type of the models' numbers. What is more precise, as Adam's count of steps, is rounded to it.
    """
    single_too = True
    for call in calls:
        if torch.finfo(call.dtype).eps < torch.finfo(dtype).eps:
            continue
        if call.function is aten.bmm.default or call.function in CONVOLUTIONS:
            is_product = call.function is aten.bmm.default
            among_few, alone = _products(*call.arguments) if is_product else _convolutions(call, rows)
            if not among_few:
                return False, False
            single_too &= alone
        elif call.numbers % (rows * TAIL) and not _is_same_everywhere(call):
            return False, False
    return True, single_too


def _values(result: Any) -> Sequence[Any]:
    return result if isinstance(result, (list, tuple)) else [result]


def _outline(value: Any) -> Any:
    if isinstance(value, Tensor):
        return Shape.of(value)
    if isinstance(value, (list, tuple)):
        return [_outline(item) for item in value]
    if isinstance(value, dict):
        return {name: _outline(item) for name, item in value.items()}
    return value


def _is_same_everywhere(call: OperationCall) -> bool:
    """Return whether an operation on each number by itself gives the same bits wherever the number is in a tensor.

    Of numbers that are not one after the other, kernels take each as they take the last ones of a tensor.
    """

    def result(arranged: Callable[[Tensor], Tensor]) -> Tensor:
        generator = torch.Generator().manual_seed(0)

        def drawn(value: Any) -> Any:
            if isinstance(value, Shape):
                count = NUMBERS if value.sizes else 1
                numbers = torch.randn(count, generator=generator, dtype=torch.float64)
                scales = torch.randint(-4, 5, (count,), generator=generator)
                numbers = (numbers * 2.0**scales).to(value.dtype)
                return arranged(numbers) if value.sizes else numbers[0]
            if isinstance(value, list):
                return [drawn(item) for item in value]
            if isinstance(value, dict):
                return {name: drawn(item) for name, item in value.items()}
            return value

        with torch.no_grad():
            return call.function(*drawn(call.arguments), **drawn(call.options))

    together = result(lambda numbers: numbers)
    apart = result(lambda numbers: torch.stack([numbers, numbers], dim=1)[:, 0])
    return torch.equal(together.nan_to_num(), apart.nan_to_num())


def _products(left: Shape, right: Shape) -> tuple[bool, bool]:
    """Whether products of pairs of matrices have the same bits among few pairs and among many; and alone, too."""
    pairs = max(left.sizes[0], 2 * FEW)
    generator = torch.Generator().manual_seed(0)

    def drawn(shape: Shape) -> Tensor:
        inner_sizes = shape.sizes[1:]
        inner_strides = shape.strides[1:]
        length = 1 + sum((size - 1) * stride for size, stride in zip(inner_sizes, inner_strides, strict=True))
        stride = max(length, shape.strides[0]) if shape.strides[0] else 0
        memory = torch.randn((pairs - 1) * stride + length, generator=generator, dtype=shape.dtype)
        return memory.as_strided((pairs, *inner_sizes), (stride, *inner_strides))

    same = {1: True, FEW - 1: True, FEW: True}
    outputs = pairs * left.sizes[1] * right.sizes[2]
    with torch.no_grad():
        for _ in range(max(1, NUMBERS // max(outputs, 1))):
            a = drawn(left)
            b = drawn(right)
            whole = torch.bmm(a, b)
            for count in same:
                same[count] &= torch.equal(torch.bmm(a[:count], b[:count]), whole[:count])
    return same[FEW - 1] and same[FEW], same[1]


def _convolutions(call: OperationCall, rows: int) -> tuple[bool, bool]:
    """Whether convolutions of clients in groups have the same bits among few clients and among many; and alone, too."""
    axes, groups_at, result_axes = CONVOLUTIONS[call.function]
    arguments = call.arguments
    if arguments[groups_at] % rows:  # the clients' samples have the same weights
        return True, True
    generator = torch.Generator().manual_seed(0)

    def of_first(count: int, tensors: Sequence[Tensor | None]) -> list[Any]:
        parts: list[Any] = [_part(tensor, axis, rows, count) for tensor, axis in zip(tensors, axes, strict=True)]
        parts += arguments[len(axes) :]
        parts[groups_at] = arguments[groups_at] // rows * count
        if call.function is aten.convolution_backward.default and parts[3]:
            parts[3] = [parts[3][0] // rows * count]
        return parts

    same = dict.fromkeys(range(1, min(FEW, rows) + 1), True)
    with torch.no_grad():
        for _ in range(max(1, NUMBERS // max(call.numbers, 1))):
            tensors = []
            for value in arguments[: len(axes)]:
                is_tensor = isinstance(value, Shape)
                tensors.append(torch.randn(value.sizes, generator=generator, dtype=value.dtype) if is_tensor else None)
            whole = _values(call.function(*of_first(rows, tensors)))
            for count in same:
                few = _values(call.function(*of_first(count, tensors)))
                for value, all_values, axis in zip(few, whole, result_axes, strict=True):
                    same[count] &= value is None or torch.equal(value, _part(all_values, axis, rows, count))
    return all(same[count] for count in same if count > 1), same[1]


def _part(tensor: Tensor | None, axis: int, rows: int, count: int) -> Any:
    """Return the part of the first `count` clients along an axis; None for None."""
    return None if tensor is None else tensor.narrow(axis, 0, tensor.shape[axis] // rows * count).contiguous()
