"""What functions depend on besides their arguments: numbers and tensors that their code can reach.

A recorded step contains the numbers that Python knew, such as the weight of a penalty. In a later round it may be
repeated only if all of them are the same. So everything that the code of a loss names is compared: variables around it,
attributes of its objects, globals, and the functions that it calls. Where that is not certain to be all, `Unknown` is
raised, and the step is not repeated in another round.
"""

from __future__ import annotations

import dis
from collections.abc import Iterable, Mapping
from functools import cache, partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from raypfl.common.component import Component
from raypfl.learning.recording.python_state import LIBRARIES, names_in, with_nested

PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size})
"""Types of values that are the same if they read the same."""

BY_ANY_NAME = frozenset({"getattr", "attrgetter", "vars", "globals", "locals", "dir", "hasattr", "__dict__"})
"""Names by which code can reach what it does not name itself."""

IGNORED = frozenset(
    {"__init__", "__post_init__", "__repr__", "__eq__", "__hash__", "__setattr__", "__delattr__", "__init_subclass__"}
)
"""Special methods that no step of a loss calls on an existing object."""


class Unknown(Exception):
    """Functions may depend on more than can be compared."""


def captured(values: Iterable[Any], modules: Iterable[nn.Module] = ()) -> tuple[tuple[Any, ...], list[Tensor]]:
    """Return a key that is equal only if functions depend on equal values, and the tensors that they reach, in order.

    The tensors' numbers are not part of the key. It keeps what it compares by identity alive.

    Parameters
    ----------
    values : functions, and other values that they get.
    modules : the modules of networks that the functions call.

    Raises
    ------
    Unknown : if there may be more.
    """
    values = list(values)
    modules = list(modules)
    # A function that gets an object may read any attribute whose name occurs in any of the functions. With the names in
    # the functions that are given, one walk is often enough.
    names = frozenset[str]()
    for value in values:
        if isinstance(value, FunctionType) and not _is_of_library(value.__module__):
            names |= names_in(value.__code__)
    while True:
        walk = _Walk(names)
        for value in values:
            walk.add(value)
        for module in modules:
            walk.add_module(module)
        if walk.found_names <= names:
            return tuple(walk.key), walk.tensors
        names |= walk.found_names


class _Same:
    """Equal only for the same object, which it keeps alive."""

    def __init__(self, value: object):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


class _Walk:
    """A walk through everything that functions reach by these names."""

    def __init__(self, names: frozenset[str]):
        self.names = names
        self.found_names: frozenset[str] = frozenset()
        self.key: list[Any] = []
        self.tensors: list[Tensor] = []
        # Id of a value -> its number, and the value, which is kept alive so that nothing else gets its id.
        self._visited: dict[int, tuple[int, Any]] = {}

    def add(self, value: Any) -> None:
        """Add a value, and all that functions reach through it."""
        kind = type(value)
        self.key.append(kind)
        if kind in PLAIN:
            self.key.append(repr(value))
        elif id(value) in self._visited:
            self.key.append(self._visited[id(value)][0])
        else:
            self._visited[id(value)] = (len(self._visited), value)
            self._add_new(value, kind)

    def _add_new(self, value: Any, kind: type) -> None:
        if _is_of_numpy(value):
            raise Unknown
        if kind in (tuple, list):
            self.key.append(len(value))
            for item in value:
                self.add(item)
        elif kind is dict:
            self.key.append(len(value))
            for name, item in value.items():
                self.add(name)
                self.add(item)
        elif isinstance(value, Tensor):
            self.tensors.append(value)
        elif kind in (partial, MethodType, FunctionType, BuiltinFunctionType):
            self._add_callable(value, kind)
        elif kind is ModuleType:
            self._add_module_of_code(value)
        elif isinstance(value, type):
            self._add_class(value)
        elif _is_of_raypfl(kind.__module__):
            self._add_object_of_raypfl(value)
        else:
            self._add_object(value)

    def _add_callable(self, value: Any, kind: type) -> None:
        if kind is partial:
            self.add((value.func, value.args, value.keywords))
        elif kind is FunctionType:
            self._add_function(value)
        elif kind is BuiltinFunctionType:
            if not isinstance(value.__self__, ModuleType | None):
                raise Unknown
            self.key.append(_Same(value))
        else:
            # A bound method; its object may declare in `_lasting` what its functions depend on.
            self.add(value.__func__)
            lasting = getattr(value.__self__, "_lasting", None)
            if lasting is None or not _is_of_raypfl(type(value.__self__).__module__):
                self.add(value.__self__)
            else:
                self._add_lasting(lasting, value.__func__.__name__)

    def add_module(self, module: nn.Module) -> None:
        """Add what a network's module holds besides parameters, buffers and modules."""
        kind = type(module)
        if module._forward_hooks or module._forward_pre_hooks:
            raise Unknown
        if _is_of_library(kind.__module__):
            self.key += [kind, repr([item for item in vars(module).items() if type(item[1]) in PLAIN])]
        else:
            self.add(module)

    def _add_function(self, function: FunctionType) -> None:
        if _is_of_library(function.__module__):
            self.key.append(_Same(function))
            return
        names = names_in(function.__code__)
        if imports_something(function.__code__) or not BY_ANY_NAME.isdisjoint(names):
            raise Unknown

        self.found_names |= names
        self.key.append(_Same(function.__code__))
        self.add(function.__defaults__)
        self.add(function.__kwdefaults__)
        for cell in function.__closure__ or ():
            try:
                self.add(cell.cell_contents)
            except ValueError:  # not assigned yet
                raise Unknown from None
        for name in sorted(names & function.__globals__.keys()):
            self.add(function.__globals__[name])

    def _add_module_of_code(self, module: ModuleType) -> None:
        self.key.append(_Same(module))
        if not _is_of_library(module.__name__):
            for name in sorted(self.names & vars(module).keys()):
                self.add(vars(module)[name])

    def _add_class(self, owner: type) -> None:
        self.key.append(_Same(owner))
        for base in _bases_of_user(owner):
            self._add_attributes_of_class(base, IGNORED - {"__init__", "__post_init__"})

    def _add_object(self, value: Any) -> None:
        """Add an object of a user's class: attributes that functions name, and functions that operators call."""
        kind = type(value)
        bases = _bases_of_user(kind)
        for base in kind.__mro__:
            is_usual = base is object or base in bases or _is_of_raypfl(base.__module__) or base is nn.Module
            if not is_usual:
                raise Unknown
        if not bases:
            raise Unknown

        self.key.append(_Same(kind))
        attributes = getattr(value, "__dict__", {})
        for name in sorted(self.names & attributes.keys()):
            self.key.append(name)
            self.add(attributes[name])
        for base in kind.__mro__:
            if base is not object and base is not nn.Module:
                self._add_attributes_of_class(base, IGNORED)

    def _add_object_of_raypfl(self, value: Any) -> None:
        """Add an object of raypfl: by options, by attributes in use if it is new in each round, or by identity."""
        if isinstance(value, Component):
            self.key.append(_Same(type(value)))
            for option in vars(value).items():
                self.add(option)
            return
        lasting = getattr(value, "_lasting", None)
        if lasting is None:
            self.key.append(_Same(value))
            return

        attributes = vars(value)
        for name in sorted(self.names):
            if name in attributes:
                self.key.append(name)
                self.add(attributes[name])
            elif hasattr(type(value), name):
                self._add_lasting(lasting, name)

    def _add_lasting(self, lasting: Mapping[str, tuple[Any, ...]], name: str) -> None:
        """Add a function of an object that is new in each round, if all that it depends on is not."""
        if name not in lasting:
            raise Unknown
        self.key += [name, *map(_Same, lasting[name])]

    def _add_attributes_of_class(self, owner: type, ignored: frozenset[str]) -> None:
        for name, attribute in vars(owner).items():
            is_operator = name.startswith("__") and isinstance(attribute, FunctionType) and name not in ignored
            if name in ("__getattr__", "__getattribute__", "__slots__"):
                raise Unknown
            if not (is_operator or name in self.names):
                continue

            self.key.append(name)
            if isinstance(attribute, staticmethod | classmethod):
                self.add(attribute.__func__)
            elif isinstance(attribute, FunctionType) or not hasattr(type(attribute), "__get__"):
                self.add(attribute)
            else:  # a property, or another descriptor
                raise Unknown


@cache
def _is_of_raypfl(module: str) -> bool:
    """Return whether a module is raypfl's and none of its methods; those depend on more than their arguments."""
    return module.partition(".")[0] == "raypfl" and not module.startswith("raypfl.methods")


def _is_of_numpy(value: Any) -> bool:
    """Return whether a value is NumPy's, whose functions read tensors without an operation that a recording sees."""
    module = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    return str(module).partition(".")[0] == "numpy"


@cache
def _is_of_library(module: str | None) -> bool:
    root = str(module).partition(".")[0]
    return root == "builtins" or (root in LIBRARIES and not str(module).startswith("raypfl.methods"))


def _bases_of_user(owner: type) -> list[type]:
    return [base for base in owner.__mro__ if not _is_of_library(base.__module__)]


@cache
def imports_something(code: CodeType) -> bool:
    """Return whether a function imports a module, by whose names it then reaches more."""
    return any(
        instruction.opname == "IMPORT_NAME" for part in with_nested(code) for instruction in dis.get_instructions(part)
    )
