"""Whether the operations of a step round a client's numbers alike among many clients, among few, and alone.

A few steps do not always show it. Kernels compute the sigmoid of a tensor's last numbers by another formula than that
of the others, and one result in some thousands has other bits. A single client's matrix product or convolution may be
added up in another order, as may products of matrices elsewhere in memory, and larger terms of a step may hide the
difference. So each operation is tried on many numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from raypfl.common.operation_mode import OperationMode

NUMBERS = 2**12
"""The number of inputs on which an elementwise operation is tried, and the fewest results of a product's trial."""

TAIL = 32
"""Kernels process at most this many numbers at once, and the remainder of a tensor one by one."""

FEW = 3
"""Products of up to this many clients are compared with those of `MOST_ROWS` clients."""

PLACE = 16
"""Kernels may add up in another order what does not begin at a multiple of this many bytes, four numbers in fp32."""

MOST_ROWS = 128
"""Most clients that train together; the models of more do not fit into the processor's cache."""

MOST_PLACES = 3
"""Few clients are tried from each client up to this one on, so that rows begin at all places between multiples."""

aten = torch.ops.aten

CLIENT_AXES: dict[Any, tuple[tuple[int | None, ...], tuple[int | None, ...]]] = {
    aten.mm.default: ((0, None), (0,)),
    aten.addmm.default: ((None, 0, None), (0,)),
    aten.convolution.default: ((0, None, None), (0,)),
    aten.convolution_backward.default: ((0, 0, None), (0, None, None)),
}
"""Operations on the samples of all clients with shared weights -> the axis of the clients' samples in each of the first
arguments, and in each of the results; None: all clients share the tensor."""

GROUPS: dict[Any, tuple[int, tuple[int, ...], tuple[int, ...]]] = {
    aten.convolution.default: (8, (1, 0, 0), (1,)),
    aten.convolution_backward.default: (9, (1, 1, 0), (1, 0, 0)),
}
"""Convolutions -> the position of the argument with the number of groups, and, where each client has its own weights
and so is a group, the clients' axes in the first arguments and in the results."""


@dataclass(frozen=True)
class Shape:
    """How a tensor lies in memory.

    `offset` : how many numbers it begins after a multiple of `PLACE` bytes.
    """

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    offset: int = 0

    @classmethod
    def of(cls, tensor: Tensor) -> Shape:
        offset = int(tensor.storage_offset()) % (PLACE // tensor.itemsize)
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, offset)

    @property
    def length_of_row(self) -> int:
        """The number of places in memory from the first to the last number at a position of the first axis."""
        last = [(size - 1) * stride for size, stride in zip(self.sizes[1:], self.strides[1:], strict=True)]
        return 1 + sum(last)


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


class Calls(OperationMode):
    """While active, notes the operations that may round, each once."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, OperationCall] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        outlines = None
        if func is aten.bmm.default or func in CLIENT_AXES or torch.Tag.pointwise in func.tags:
            # Noted before the call, which may return one of its arguments.
            outlines = (_outline(list(args)), _outline(options))
        result = func(*args, **options)
        first = next((value for value in _values(result) if isinstance(value, Tensor)), None)
        if outlines and first is not None and first.is_floating_point():
            call = OperationCall(func, *outlines, first.numel(), first.dtype)
            self.calls.setdefault(repr(call), call)
        return result


def rounds_alike(calls: Iterable[OperationCall], rows: int, dtype: torch.dtype) -> tuple[bool, bool]:
    """Return whether operations round a client's numbers alike among many and few clients; and whether also alone.

    Parameters
    ----------
    rows : the number of clients in the calls.
    dtype : the type of the models' numbers. Results of a more precise type, such as Adam's count of steps, are not
        tried, since they are rounded to it.
    """
    also_alone = True
    for call in calls:
        if torch.finfo(call.dtype).eps < torch.finfo(dtype).eps:
            continue
        if call.function is aten.bmm.default:
            among_few, alone = _pairs_round_alike(*call.arguments)
        elif call.function in CLIENT_AXES:
            among_few, alone = _clients_round_alike(call, rows)
        else:
            # Where each client has whole pieces of `TAIL` numbers, no number is in a tensor's remainder.
            among_few = call.numbers % (rows * TAIL) == 0 or _is_same_everywhere(call)
            alone = among_few
        if not among_few:
            return False, False
        also_alone &= alone
    return True, also_alone


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
    """Return whether an elementwise operation gives the same bits wherever a number is in a tensor.

    Kernels process numbers that are not contiguous in memory as they process the last ones of a tensor.
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

    contiguous = result(lambda numbers: numbers)
    strided = result(lambda numbers: torch.stack([numbers, numbers], dim=1)[:, 0])
    return torch.equal(contiguous.nan_to_num(), strided.nan_to_num())


def _pairs_round_alike(left_factor: Shape, right_factor: Shape) -> tuple[bool, bool]:
    """Return whether products of pairs of matrices have the same bits among few pairs as among many; and alone."""
    pairs = max(left_factor.sizes[0], MOST_ROWS)
    generator = torch.Generator().manual_seed(0)

    def drawn(shape: Shape) -> Callable[[int, int], Tensor]:
        """Return a function that returns `count` of the pairs' matrices, from `start` on, at the place of the first."""
        stride = max(shape.length_of_row, shape.strides[0]) if shape.strides[0] else 0
        memory = torch.randn((pairs - 1) * stride + shape.length_of_row, generator=generator, dtype=shape.dtype)

        def part(start: int, count: int) -> Tensor:
            moved = torch.cat([memory[: shape.offset], memory[start * stride :]])
            return moved.as_strided((count, *shape.sizes[1:]), (stride, *shape.strides[1:]), shape.offset)

        return part

    has_same_bits = {1: True, FEW - 1: True, FEW: True}
    outputs = pairs * left_factor.sizes[1] * right_factor.sizes[2]
    with torch.no_grad():
        for _ in range(max(1, NUMBERS // max(outputs, 1))):
            a = drawn(left_factor)
            b = drawn(right_factor)
            whole = torch.bmm(a(0, pairs), b(0, pairs))
            for start, count in _few_clients(has_same_bits):
                few = torch.bmm(a(start, count), b(start, count))
                has_same_bits[count] &= torch.equal(few, whole[start : start + count])
    return has_same_bits[FEW - 1] and has_same_bits[FEW], has_same_bits[1]


def _few_clients(counts: Iterable[int]) -> list[tuple[int, int]]:
    """Return the few clients of each comparison: the number of the first, and how many follow one another."""
    return [(0, count) for count in counts] + [(start, FEW) for start in range(1, MOST_PLACES + 1)]


def _clients_round_alike(call: OperationCall, rows: int) -> tuple[bool, bool]:
    """Return whether an operation on all clients' samples has the same bits for few clients as for many; and alone."""
    arguments = call.arguments
    axes, result_axes = CLIENT_AXES[call.function]
    groups_at = None
    if call.function in GROUPS and arguments[GROUPS[call.function][0]] % rows == 0:
        groups_at, axes, result_axes = GROUPS[call.function]

    shapes = arguments[: len(axes)]
    if any(axis is not None and shape and shape.sizes[axis] % rows for shape, axis in zip(shapes, axes, strict=True)):
        return False, False

    clients = max(rows, MOST_ROWS)
    generator = torch.Generator().manual_seed(0)

    def drawn(shape: Shape | None, axis: int | None) -> Tensor | None:
        if shape is None:
            return None
        if axis is None:
            return torch.empty_strided(shape.sizes, shape.strides, dtype=shape.dtype).normal_(generator=generator)
        sizes = list(shape.sizes)
        sizes[axis] = sizes[axis] // rows * clients
        return torch.randn(sizes, generator=generator, dtype=shape.dtype)

    def result(tensors: Sequence[Tensor | None], start: int, count: int) -> Sequence[Any]:
        parts: list[Any] = [
            _clients_part(tensor, axis, clients, start, count) for tensor, axis in zip(tensors, axes, strict=True)
        ]
        parts += arguments[len(axes) :]
        if groups_at is not None:
            parts[groups_at] = arguments[groups_at] // rows * count
            # The sizes of the bias, of which each client has its own part.
            if call.function is aten.convolution_backward.default and parts[3]:
                parts[3] = [parts[3][0] // rows * count]
        return _values(call.function(*parts, **call.options))

    has_same_bits = dict.fromkeys(range(1, FEW + 1), True)
    with torch.no_grad():
        for _ in range(max(1, NUMBERS // max(call.numbers, 1))):
            tensors = [drawn(shape, axis) for shape, axis in zip(shapes, axes, strict=True)]
            whole = result(tensors, 0, clients)
            for start, count in _few_clients(has_same_bits):
                for value, all_values, axis in zip(result(tensors, start, count), whole, result_axes, strict=True):
                    # Without an axis, all clients' samples are added up.
                    has_same_bits[count] &= value is None or (
                        axis is not None and torch.equal(value, _clients_part(all_values, axis, clients, start, count))
                    )
    return has_same_bits[FEW - 1] and has_same_bits[FEW], has_same_bits[1]


def _clients_part(tensor: Tensor | None, axis: int | None, clients: int, start: int, count: int) -> Any:
    """Return a copy of the part of `count` clients, from `start` on; without an axis, the tensor itself."""
    if tensor is None or axis is None:
        return tensor
    size = tensor.shape[axis] // clients
    return tensor.narrow(axis, start * size, count * size).clone(memory_format=torch.contiguous_format)
