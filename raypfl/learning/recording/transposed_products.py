"""Products that a recorded step transposes, as the gradients of dense layers' weights are."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from raypfl.learning.recording.operations import Name, Operation, OperationRecorder

aten = torch.ops.aten

EXACT = frozenset({aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.mul.Scalar})
"""Operations on each number by itself, whose bits do not depend on the order of their arguments in memory."""

EXACT_IN_PLACE = frozenset({aten.add_.Tensor, aten.sub_.Tensor, aten._foreach_add_.List})
"""Operations like `EXACT` that change their first argument in place, so that it keeps its order in memory."""

_TRIED_NUMBERS = 2**16
"""The fewest numbers of products that must agree."""


def without_transposing(
    operations: Sequence[Operation], recorder: OperationRecorder, is_pure: Callable[[Operation], bool]
) -> list[Operation]:
    """Return the operations with products ``(A^T B)^T`` computed as ``B^T A``, where that gives the same bits.

    Autograd returns the gradient of a dense layer's weights as such a product. The weights lie in memory in the other
    order, so adding it to them takes five times as long.

    `is_pure` : whether an operation's results depend on its arguments only, and neither is ever changed.
    """
    maker = {name: operation for operation in operations for name in operation.results if name is not None}
    replacements: dict[int, list[Operation]] = {}
    for operation in operations:
        product = maker.get(operation.arguments[0]) if _transposes(operation) else None
        if product is None or product.function is not aten.bmm.default or not is_pure(product):
            continue
        left_factor, right_factor = product.arguments
        left_maker = maker.get(left_factor)
        is_read_again = sum(product.results[0] in reader.reads for reader in operations) > 1
        if left_maker is None or not _transposes(left_maker) or is_read_again:
            continue

        result = _result_of(operation)
        untransposed: Name = left_maker.arguments[0]
        shapes = tuple(recorder.tensors[untransposed].shape), tuple(recorder.tensors[right_factor].shape)
        if _have_same_bits(*shapes, recorder.tensors[right_factor].dtype) and _may_be_in_any_order(result, operations):
            name = recorder.name_of_result(recorder.tensors[right_factor].transpose(1, 2))
            replacements[id(product)] = [
                Operation(aten.transpose.int, [right_factor, 1, 2], {}, [name], returns_many=False),
                Operation(aten.bmm.default, [name, untransposed], {}, [result], returns_many=False),
            ]
            replacements[id(operation)] = []

    without = []
    for operation in operations:
        without += replacements.get(id(operation), [operation])
    return without


@functools.lru_cache(maxsize=1024)
def _have_same_bits(left_shape: tuple[int, ...], right_shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Return whether ``(A^T B)^T`` and ``B^T A`` have the same bits for all matrices of these shapes.

    A matrix library adds up in an order that depends on the shapes, and in another one for narrow matrices. So numbers
    are drawn for a trial: those of a step, many of which are 0, can agree by chance.
    """
    generator = torch.Generator().manual_seed(0)
    outputs = max(left_shape[0] * left_shape[2] * right_shape[2], 1)
    for _ in range(max(4, _TRIED_NUMBERS // outputs)):
        a = torch.randn(left_shape, dtype=dtype, generator=generator, device="cpu")
        b = torch.randn(right_shape, dtype=dtype, generator=generator, device="cpu")
        if not torch.equal(torch.bmm(a.transpose(1, 2), b).transpose(1, 2), torch.bmm(b.transpose(1, 2), a)):
            return False
    return True


def _result_of(operation: Operation) -> Name:
    """Return the only tensor that an operation returns."""
    [result] = operation.results
    assert result is not None
    return result


def _transposes(operation: Operation) -> bool:
    return operation.function is aten.transpose.int and operation.arguments[1:] == [1, 2]


def _may_be_in_any_order(name: Name, operations: Sequence[Operation]) -> bool:
    """Return whether the bits of a step do not depend on the order in memory of one tensor, as those of a sum would."""
    for operation in operations:
        if name not in operation.reads:
            continue
        adds_to_another = operation.function in EXACT_IN_PLACE and name not in operation.writes
        if adds_to_another:
            continue
        # The result has the memory order of the arguments, so check what reads it.
        if operation.function not in EXACT or not _may_be_in_any_order(_result_of(operation), operations):
            return False
    return True
