"""The operations of a step, recorded on a CPU."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from raypfl.common.operation_mode import OperationMode

UNREPEATABLE = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view)
"""Tags of operations that tell Python a tensor's values, so that the next step may take another path, and of those that
change a tensor's shape in place."""


class Name(str):
    """The name of a tensor: ``c`` and a number for one that was there before, ``t`` for a result."""

    __slots__ = ()


@dataclass(frozen=True)
class Operation:
    """A call of an operation, in whose arguments names stand for tensors.

    Attributes
    ----------
    results : the names of the tensors that it returned; None for another value.
    returns_many : whether it returned several values.
    """

    function: OpOverload
    arguments: list[Any]
    options: dict[str, Any]
    results: list[Name | None]
    returns_many: bool

    @functools.cached_property
    def reads(self) -> set[Name]:
        """The tensors that it gets."""
        return _names_in([*self.arguments, *self.options.values()])

    @functools.cached_property
    def writes(self) -> set[Name]:
        """The tensors that it changes."""
        changed = []
        for position, name in _changed_arguments(self.function):
            is_positional = position < len(self.arguments)
            changed.append(self.arguments[position] if is_positional else self.options.get(name))
        return _names_in(changed)

    @functools.cached_property
    def is_view(self) -> bool:
        """Whether it only returns tensors that it gets, seen in another way."""
        shares_memory = any(value.alias_info is not None for value in self.function._schema.returns)
        return shares_memory and not self.writes

    @property
    def draws(self) -> bool:
        """Whether it takes numbers from a random stream."""
        return torch.Tag.nondeterministic_seeded in self.function.tags

    def renamed(self, names: Mapping[Name, Name]) -> Operation:
        """Return the operation on other tensors."""
        if names.keys().isdisjoint(self.reads):
            return self
        return replace(self, arguments=with_values(self.arguments, names), options=with_values(self.options, names))


class OperationRecorder(OperationMode):
    """While active, notes every operation on tensors.

    Attributes
    ----------
    constants : the tensors that are no results, by name.
    tensors : all tensors, by name.
    is_repeatable : whether no operation told Python a tensor's values.
    """

    def __init__(self) -> None:
        super().__init__()
        self.constants: dict[Name, Tensor] = {}
        self.operations: list[Operation] = []
        self.is_repeatable = True
        # The tensors are kept alive while recording, so that no other one gets the id or the memory of a freed one.
        self.tensors: dict[Name, Tensor] = {}
        self._names: dict[int, Name] = {}
        self._memory: dict[Name, int] = {}
        self._memory_numbers: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        # Noted before the call, which may return one of its arguments.
        abstract_arguments = self._abstract(args)
        abstract_options = self._abstract(options)
        result = func(*args, **options)

        self.is_repeatable &= _is_repeatable(func, args)
        returns_many = isinstance(result, (list, tuple))
        results = [self._result(value) for value in (result if returns_many else [result])]
        self.operations.append(Operation(func, abstract_arguments, abstract_options, results, returns_many))
        return result

    def memory_of(self, name: Name) -> int:
        """Return a number for the memory of a tensor, which views of it share."""
        return self._memory[name]

    def view_of(self, name: Name) -> tuple[Any, ...]:
        """Return a key that is equal for names of the same view of the same memory."""
        tensor = self.tensors[name]
        return self._memory[name], tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype

    @functools.cached_property
    def key(self) -> tuple[Any, ...]:
        """A key that is equal for recordings with the same operations to repeat."""
        calls = []
        for operation in self.operations:
            arguments = (repr(operation.arguments), repr(operation.options))
            calls.append((operation.function, *arguments, tuple(operation.results)))
        return (*calls, *map(self.view_of, self.tensors))

    def is_repeated_by(self, other: OperationRecorder) -> bool:
        """Return whether another recording has the same operations on the same tensors, and neither read values."""
        if not (self.is_repeatable and other.is_repeatable and self.key == other.key):
            return False
        return all(tensor is other.constants[name] for name, tensor in self.constants.items())

    def _add(self, tensor: Tensor, text: str) -> Name:
        name = Name(text)
        self.tensors[name] = tensor
        self._names[id(tensor)] = name
        address = tensor.untyped_storage().data_ptr()
        self._memory[name] = self._memory_numbers.setdefault(address, len(self._memory_numbers))
        return name

    def name_of_result(self, result: Tensor) -> Name:
        """Return the name of a result, which gets one if it was not seen before."""
        return self._names.get(id(result)) or self._add(result, f"t{len(self.tensors)}")

    def _result(self, value: Any) -> Name | None:
        return self.name_of_result(value) if isinstance(value, Tensor) else None

    def _name_of_argument(self, tensor: Tensor) -> Name:
        """Return the tensor's name; one that was not seen before is a constant."""
        name = self._names.get(id(tensor))
        if name is None:
            name = self._add(tensor, f"c{len(self.tensors)}")
            self.constants[name] = tensor
        return name

    def _abstract(self, value: Any) -> Any:
        """Return arguments with names in place of tensors."""
        if isinstance(value, Tensor):
            return self._name_of_argument(value)
        if isinstance(value, (list, tuple)):
            return [self._abstract(item) for item in value]
        if isinstance(value, dict):
            return {key: self._abstract(item) for key, item in value.items()}
        return value


class WatchedOperations(OperationMode):
    """While active, notes whether operations can be repeated, without keeping their tensors.

    Attributes
    ----------
    devices : the devices of all tensors.
    are_repeatable : whether no operation told Python a tensor's values.
    """

    def __init__(self) -> None:
        super().__init__()
        self.devices: set[torch.device] = set()
        self.are_repeatable = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.are_repeatable &= _is_repeatable(func, args)
        self.devices |= set(map(device_of, _tensors_in((args, kwargs, result))))
        return result


def with_values(arguments: Any, values: Mapping[Any, Any]) -> Any:
    """Return arguments with names replaced by their values; names without a value stay."""
    if isinstance(arguments, Name):
        return values.get(arguments, arguments)
    if isinstance(arguments, list):
        return [with_values(item, values) for item in arguments]
    if isinstance(arguments, dict):
        return {key: with_values(item, values) for key, item in arguments.items()}
    return arguments


def _is_repeatable(function: OpOverload, arguments: Any) -> bool:
    if function is torch.ops.aten.index.Tensor:
        # The shape of the result depends on values only if the index is boolean.
        _, indices = arguments
        return all(index is None or index.dtype not in (torch.bool, torch.uint8) for index in indices)
    return not any(tag in function.tags for tag in UNREPEATABLE)


@functools.cache
def _changed_arguments(function: OpOverload) -> list[tuple[int, str]]:
    """Return position and name of the arguments that an operation changes."""
    changed = []
    for position, argument in enumerate(function._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            changed.append((position, argument.name))
    return changed


def _names_in(values: Sequence[Any]) -> set[Name]:
    names: set[Name] = set()
    for value in values:
        if isinstance(value, Name):
            names.add(value)
        elif isinstance(value, list):
            names |= _names_in(value)
    return names


def device_of(tensor: Tensor) -> torch.device:
    """Return the device of a tensor."""
    # A function, which tests with a pretended GPU replace: within an operation they cannot replace the attribute.
    return tensor.device


def _tensors_in(values: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested arguments or results."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from _tensors_in(value)
    elif isinstance(values, dict):
        yield from _tensors_in(list(values.values()))
