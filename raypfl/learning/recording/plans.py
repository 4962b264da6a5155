"""The part of a step recorded on a CPU that has to be repeated, as Python code."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from raypfl.learning.recording.operations import Name, Operation, OperationRecorder
from raypfl.learning.recording.transposed_products import EXACT, EXACT_IN_PLACE, without_transposing

aten = torch.ops.aten

FILLED = frozenset(
    {
        aten.ones_like.default,
        aten.zeros_like.default,
        aten.full_like.default,
        aten.new_zeros.default,
        aten.new_ones.default,
        aten.new_full.default,
    }
)
"""Operations that read the shape of their tensor, and none of its values."""

BINDINGS: Mapping[OpOverload, Callable[..., Any]] = {
    aten._foreach_add_.List: torch._foreach_add_,
    aten._log_softmax.default: torch._log_softmax,
    aten._log_softmax_backward_data.default: torch._log_softmax_backward_data,
    aten.add.Tensor: torch.add,
    aten.add_.Tensor: Tensor.add_,
    aten.bmm.default: torch.bmm,
    aten.clamp_min.default: torch.clamp_min,
    aten.div.Tensor: torch.div,
    aten.expand.default: Tensor.expand,
    aten.gather.default: torch.gather,
    aten.index_select.default: torch.index_select,
    aten.mul.Scalar: torch.mul,
    aten.mul.Tensor: torch.mul,
    aten.neg.default: torch.neg,
    aten.pow.Tensor_Scalar: torch.pow,
    aten.relu.default: torch.relu,
    aten.scatter_add.default: torch.scatter_add,
    aten.select.int: torch.select,
    aten.squeeze.dims: torch.squeeze,
    aten.sub.Tensor: torch.sub,
    aten.sum.dim_IntList: torch.sum,
    aten.transpose.int: torch.transpose,
    aten.unsqueeze.default: torch.unsqueeze,
    aten.view.default: Tensor.view,
}
"""The same operations as PyTorch binds them to Python: a call takes 1.5 to 3 microseconds less, half of a small one."""

MAX_PLANS = 512
"""The number of plans that a process remembers. A run has one for each loss, number of clients and batch size; fewer
plans than that would be forgotten before they are needed again."""

_plans: OrderedDict[Any, StepPlan] = OrderedDict()


def plan_of(recorder: OperationRecorder) -> StepPlan:
    """Return the plan of a recording, from the cache if the same operations were recorded before."""
    key = recorder.key
    if key not in _plans:
        _plans[key] = StepPlan(recorder)
        if len(_plans) > MAX_PLANS:
            _plans.popitem(last=False)
    _plans.move_to_end(key)
    return _plans[key]


def _unfilled(tensor: Tensor) -> Tensor:
    """Return a tensor that has only the shape and the layout of another one."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


class StepPlan:
    """The operations of a recorded step: those to repeat, and those whose results stay the same.

    Computed once: views of constants, and tensors filled with a number that nothing changes. Left out: results that
    nothing uses, equal operations on equal tensors, and what returns a tensor as it is.
    """

    def __init__(self, recorder: OperationRecorder):
        self._once: list[Operation] = []
        # Non-tensors that the code refers to: operations and their options.
        self._constants: dict[str, Any] = {}

        # Memory -> the number of the first operation that changes it.
        self._first_change: dict[int, int] = {}
        for number, operation in enumerate(recorder.operations):
            for name in operation.writes:
                self._first_change.setdefault(recorder.memory_of(name), number)

        operations = self._needed(self._simplified(recorder))
        # Elsewhere a transposed product may have other bits.
        if all(tensor.device.type == "cpu" for tensor in recorder.tensors.values()):
            operations = without_transposing(operations, recorder, lambda operation: self._is_pure(operation, recorder))
        # Again: operations that run once have left the list, and with them the need for some results.
        changing = self._needed(self._changing(operations, recorder))
        code = self._code(recorder, changing)

        computed = {name for operation in self._once for name in operation.results}
        read = {name for operation in self._once for name in operation.reads} - computed - recorder.constants.keys()
        # Operations that run once read only the shapes of results that change. Memory that nothing fills takes no room.
        examples: dict[str, Tensor] = {name: _unfilled(recorder.tensors[name]) for name in read}
        namespace: dict[str, Any] = {**self._constants, **examples}
        exec(compile(code, "<a recorded step>", "exec"), namespace)
        self._repeat_on: Callable[..., Callable[[], None]] = namespace["repeat_on"]

    def function(self, constants: Mapping[Name, Tensor]) -> Callable[[], None]:
        """Return the function that repeats the operations on these constants. No tensor in it requires a gradient."""
        with torch.no_grad():
            return self._repeat_on(**{name: tensor.detach() for name, tensor in constants.items()})

    def _simplified(self, recorder: OperationRecorder) -> list[Operation]:
        """Return the operations without those whose result equals an existing tensor."""
        replacement_of: dict[Name, Name] = {}
        results_of: dict[str, list[Name | None]] = {}
        simplified = []
        for original in recorder.operations:
            operation = original.renamed(replacement_of)
            if operation.function is aten.copy_.default and operation.arguments[0] == operation.arguments[1]:
                continue  # it copies a tensor to itself
            unchanged = self._unchanged(operation, recorder)
            if unchanged is not None:
                result, argument = unchanged
                replacement_of[result] = argument
                continue

            if self._is_pure(operation, recorder):
                call = f"{operation.function} {operation.arguments!r} {operation.options!r}"
                earlier = results_of.setdefault(call, operation.results)
                if earlier is not operation.results:
                    for result_name, earlier_name in zip(operation.results, earlier, strict=True):
                        if result_name is not None and earlier_name is not None:
                            replacement_of[result_name] = earlier_name
                    continue
            simplified.append(operation)
        return simplified

    def _unchanged(self, operation: Operation, recorder: OperationRecorder) -> tuple[Name, Name] | None:
        """Return the result of an operation and the argument that it is equal to; None if it is another tensor."""
        if operation.writes or len(operation.results) != 1 or operation.results[0] is None:
            return None
        result = operation.results[0]
        for name in operation.reads:
            if recorder.view_of(name) == recorder.view_of(result):
                return result, name

        # A square's gradient has a first power.
        if operation.function in (aten.mul.Scalar, aten.pow.Tensor_Scalar) and operation.arguments[1] == 1:
            argument: Name = operation.arguments[0]
            if self._may_replace(result, argument, recorder):
                return result, argument
        return None

    def _may_replace(self, copy: Name, original: Name, recorder: OperationRecorder) -> bool:
        """Return whether a tensor may stand for its copy, which has the same bits, perhaps in another order."""
        memory = recorder.memory_of(copy)
        if memory in self._first_change or recorder.tensors[copy].dtype != recorder.tensors[original].dtype:
            return False

        # The original may change after the copy's last use, as parameters do at the end of a step.
        change = self._first_change.get(recorder.memory_of(original), len(recorder.operations))
        for number, operation in enumerate(recorder.operations):
            uses_copy = any(recorder.memory_of(name) == memory for name in operation.reads)
            keeps_bits = operation.is_view or operation.function in EXACT or operation.function in EXACT_IN_PLACE
            if uses_copy and (number >= change or not keeps_bits):
                return False
        return True

    def _is_pure(self, operation: Operation, recorder: OperationRecorder) -> bool:
        """Return whether its results depend on its arguments only, and neither is ever changed."""
        if operation.draws:
            return False
        tensors = {name for name in (*operation.reads, *operation.results) if name is not None}
        return self._first_change.keys().isdisjoint(map(recorder.memory_of, tensors))

    def _needed(self, operations: Sequence[Operation]) -> list[Operation]:
        """Return the operations whose results are used, or that change something."""
        used: set[Name] = set()
        needed = []
        for operation in reversed(operations):
            if operation.writes or operation.draws or not used.isdisjoint(operation.results):
                used |= operation.reads
                needed.append(operation)
        return needed[::-1]

    def _changing(self, operations: Sequence[Operation], recorder: OperationRecorder) -> list[Operation]:
        """Return the operations whose results change from step to step; the others are computed once."""
        computed_once = set(recorder.constants)
        unchanging: set[Name] = set()
        changing = []
        for operation in operations:
            is_view_of_constants = operation.is_view and operation.reads <= computed_once
            is_filled = operation.function in FILLED or not operation.reads
            is_unchanging = self._is_pure(operation, recorder) and (is_filled or operation.reads <= unchanging)
            if not is_view_of_constants and not is_unchanging:
                changing.append(operation)
                continue

            self._once.append(operation)
            results = {name for name in operation.results if name is not None}
            computed_once |= results
            if is_unchanging:
                unchanging |= results
        return changing

    def _code(self, recorder: OperationRecorder, operations: Sequence[Operation]) -> str:
        """Return the code of ``repeat_on``, which does the constant operations and returns a function ``repeat``."""
        last_use = {name: number for number, operation in enumerate(operations) for name in operation.reads}
        results_of_once = {name for operation in self._once for name in operation.results}
        defined_once = {*recorder.constants, *results_of_once}

        lines = [f"def repeat_on({', '.join(recorder.constants)}):"]
        lines += [f" {self._line(operation)}" for operation in self._once]
        lines.append(" def repeat():")
        for number, operation in enumerate(operations):
            lines.append(f"  {self._line(operation)}")
            tensors = {name for name in (*operation.reads, *operation.results) if name is not None}
            no_longer_used = {name for name in tensors if last_use.get(name, -1) <= number} - defined_once
            if no_longer_used:
                lines.append(f"  del {', '.join(sorted(no_longer_used))}")
        lines.append(" return repeat")
        return "\n".join(lines)

    def _line(self, operation: Operation) -> str:
        """Return the line of code of an operation."""
        arguments = [self._text(value) for value in operation.arguments]
        arguments += [f"{name}={self._text(value)}" for name, value in operation.options.items()]
        function = BINDINGS.get(operation.function, operation.function)
        call = f"{self._constant(function)}({', '.join(arguments)})"

        # An in-place operation returns its argument.
        if all(name is None or name in operation.reads for name in operation.results):
            return call
        targets = ", ".join(name or "_" for name in operation.results)
        return f"{targets}{',' if operation.returns_many else ''} = {call}"

    def _text(self, value: Any) -> str:
        if isinstance(value, Name):
            return value
        if isinstance(value, list):
            return f"[{', '.join(map(self._text, value))}]"
        if value is None or isinstance(value, (bool, int)):
            return repr(value)
        return self._constant(value)

    def _constant(self, value: Any) -> str:
        """Return the name of a value that is no tensor."""
        for name, other in self._constants.items():
            if other is value:
                return name
        name = f"k{len(self._constants)}"
        self._constants[name] = value
        return name
