"""Whether a function may depend on more than its arguments, by what its code does.

Two recordings of a step show a loss that counts its calls, but not one that waits for its tenth call. So the code of a
user's loss, network, objective and optimizer is read: what may change anything outside, read a clock, or show something
is called in every step.
"""

from __future__ import annotations

import contextlib
import dis
from collections.abc import Iterable, Iterator
from functools import cache, partial
from types import CodeType, FunctionType, MethodType
from typing import Any

CHANGES = frozenset({"STORE_GLOBAL", "STORE_ATTR", "STORE_SUBSCR", "DELETE_GLOBAL", "DELETE_ATTR", "DELETE_SUBSCR"})
"""Instructions that change something outside of a function, or may; as does an assignment to a nonlocal variable."""

CALLS = frozenset(
    {
        *("add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem", "popleft"),
        *("remove", "setattr", "setdefault", "update"),
        *("next", "send", "throw", "random", "time", "datetime", "perf_counter", "monotonic"),
        *("print", "write", "input", "open", "breakpoint", "exec", "eval"),
        *("tolist", "numpy"),
    }
)
"""Names in the code of functions that change an object, read a clock, an iterator or a file, or show something; or that
read a tensor's numbers without an operation, which no recording sees.
"""

LIBRARIES = ("torch", "raypfl", "numpy", "torchvision", "timm", "math")
"""Packages whose functions depend on their arguments only."""


def may_keep_state(functions: Iterable[Any]) -> bool:
    """Return whether any of these functions, or one that they use, may depend on more than its arguments."""
    waiting = list(functions)
    visited: set[tuple[FunctionType, type]] = set()
    while waiting:
        for function, owner in _plain(waiting.pop()):
            if (function, type(owner)) in visited:
                continue
            visited.add((function, type(owner)))
            if _is_of_library(function.__module__):
                # A library function may call methods of a user's class.
                waiting += _attributes(owner, names_in(function.__code__), set())
            elif _changes_something(function.__code__):
                return True
            else:
                waiting += _used(function, owner)
    return False


def _plain(value: Any, owner: Any = None) -> Iterator[tuple[FunctionType, Any]]:
    """Yield the Python functions that a call of `value` runs, each with the object whose method it is, or None."""
    if isinstance(value, partial):
        yield from _plain(value.func)
    elif isinstance(value, MethodType):
        yield from _plain(value.__func__, value.__self__)
    elif isinstance(value, FunctionType):
        yield value, owner
    elif isinstance(value, type):
        yield from _plain(vars(value).get("__init__"))
    elif not _is_of_library(type(value).__module__):
        call = getattr(type(value), "__call__", None)  # noqa: B004
        # Built-in functions such as torch.relu have a __call__ that is not a Python function.
        if isinstance(call, FunctionType):
            yield call, value


def _used(function: FunctionType, owner: Any) -> Iterator[Any]:
    """Yield the values that a function refers to: globals, defaults and closure, and attributes of these."""
    names = names_in(function.__code__)
    values = [owner, *(function.__globals__[name] for name in names if name in function.__globals__)]
    values += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # not assigned yet
            values.append(cell.cell_contents)

    yield from values
    visited: set[int] = set()
    for value in values:
        yield from _attributes(value, names, visited)


def _attributes(value: Any, names: frozenset[str], visited: set[int]) -> Iterator[Any]:
    """Yield the attributes of these names of an object of a user's class, its methods bound to it; and theirs."""
    kind = type(value)
    if id(value) in visited or kind.__module__ == "builtins" or _is_of_library(kind.__module__):
        return
    visited.add(id(value))
    for base in kind.__mro__:
        for name in names & vars(base).keys():
            attribute = vars(base)[name]
            if isinstance(attribute, property):
                attribute = attribute.fget
            elif isinstance(attribute, (staticmethod, classmethod)):
                attribute = attribute.__func__
            yield MethodType(attribute, value) if isinstance(attribute, FunctionType) else attribute

    attributes = getattr(value, "__dict__", {})
    for name in names & attributes.keys():
        yield attributes[name]
        yield from _attributes(attributes[name], names, visited)


@cache
def _is_of_library(module: str | None) -> bool:
    return module is not None and module.partition(".")[0] in LIBRARIES


@cache
def _changes_something(code: CodeType) -> bool:
    if not CALLS.isdisjoint(names_in(code)):
        return True
    for part in with_nested(code):
        for instruction in dis.get_instructions(part):
            if instruction.opname in CHANGES:
                return True
            if instruction.opname == "STORE_DEREF" and instruction.argval in code.co_freevars:
                return True
    return False


@cache
def names_in(code: CodeType) -> frozenset[str]:
    """Return all names of globals and attributes in a function's code, and in functions within it."""
    return frozenset(name for part in with_nested(code) for name in part.co_names)


def with_nested(code: CodeType) -> Iterator[CodeType]:
    """Yield a function's code, and that of all functions within it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from with_nested(constant)
