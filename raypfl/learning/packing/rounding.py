"""Whether the operations of a step round a client's numbers alike among many clients, among few, and alone.

The results of a few steps do not always show it. Kernels take a sigmoid of the last numbers of a tensor by another
formula than of the others: one of some thousands has other bits. And a product of a single pair of matrices may be
added up in another order, which a step hides whose other terms are larger. So each operation is tried on many numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
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
    numbers, dtype : how many numbers its result has, and of which type.
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
        is_product = func is torch.ops.aten.bmm.default
        outlines = None
        if is_product or torch.Tag.pointwise in func.tags:
            # Before the call, which may return one of them.
            outlines = (_outline(list(args)), _outline(options))
        result = func(*args, **options)
        if outlines and isinstance(result, Tensor) and result.is_floating_point():
            call = OperationCall(func, *outlines, result.numel(), result.dtype)
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
        if call.function is torch.ops.aten.bmm.default:
            among_few, alone = _product_rounds_alike(*call.arguments)
            if not among_few:
                return False, False
            single_too &= alone
        elif call.numbers % (rows * TAIL) and not _is_same_everywhere(call):
            return False, False
    return True, single_too


def _outline(value: Any) -> Any:
    if isinstance(value, Tensor):
        return Shape.of(value)
    if isinstance(value, (list, tuple)):
        return [_outline(item) for item in value]
    if isinstance(value, dict):
        return {name: _outline(item) for name, item in value.items()}
    return value


def _is_same_everywhere(call: OperationCall) -> bool:
    """Whether an operation on each number by itself gives the same bits wherever the number is in a tensor.

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


def _product_rounds_alike(left: Shape, right: Shape) -> tuple[bool, bool]:
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
