"""Options that a method declares but never reads, found by the names in the functions that a run can reach."""

from __future__ import annotations

import builtins
import dataclasses
import sysconfig
from collections.abc import Iterator
from functools import cached_property, lru_cache, partial, partialmethod
from types import CodeType, FunctionType
from typing import Any

from raypfl.methods import Method

_CHECKS = {"__post_init__", "check"}
"""Functions that only check options: an option read there alone has no effect."""

_BY_ANY_NAME = {"getattr", "vars", "asdict", "astuple", "fields", "__dict__", "replace"}
"""Names with which code may read options without naming them."""

_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})


@lru_cache(maxsize=512)
def unread_options(method: Any) -> frozenset[str]:
    """Return the options of a method's class that no function in reach of a run reads; none if that is uncertain.

    A function is in reach if its name occurs in another one in reach: functions of the class, of its bases if
    ``super()`` is called, and of modules. So an option returned here is certainly never read under its name, but one
    that is not returned may have no effect either.
    """
    options = {field.name for field in dataclasses.fields(method)}
    names = names_reached(method)
    if names & _BY_ANY_NAME:
        return frozenset()
    return frozenset(options - names)


def names_reached(method: type) -> set[str]:
    """Return all names that occur in the functions that a run of a method can reach."""
    hooks = {name for name in vars(Method) if not name.startswith("__")} - _CHECKS
    waiting: list[FunctionType] = []
    for name in hooks:
        waiting += _resolved(method, name)

    reached: set[str] = set()
    visited = set()
    while waiting:
        function = waiting.pop()
        if function in visited:
            continue
        visited.add(function)

        names = set(_names(function.__code__))
        reached |= names
        for name in names - _CHECKS:
            waiting += _resolved(method, name)
            waiting += _global(function, name)
    return reached


def _resolved(method: type, name: str) -> Iterator[FunctionType]:
    """Yield the function ``self.name``, and those of base classes that it may call by ``super()``."""
    for owner in method.__mro__:
        if owner is object or name not in vars(owner):
            continue
        functions = list(filter(_may_read, _functions(vars(owner)[name])))
        yield from functions
        if not any("super" in _names(function.__code__) for function in functions):
            return


def _global(function: FunctionType, name: str) -> Iterator[FunctionType]:
    """Yield the function, or the functions of the class, to which a name refers in the module of `function`."""
    value = function.__globals__.get(name)
    if hasattr(builtins, name) or value is None:
        return
    candidates = vars(value).values() if isinstance(value, type) else [value]
    for candidate in candidates:
        yield from filter(_may_read, _functions(candidate))


def _may_read(function: FunctionType) -> bool:
    """Return whether a function may read a method's options: not in libraries, in raypfl only among the methods."""
    package, room = (*function.__module__.split("."), "", "")[:2]
    is_another_room = package == "raypfl" and room != "methods"
    is_library = function.__code__.co_filename.startswith(_LIBRARIES)
    return not is_another_room and not is_library


def _functions(value: Any) -> Iterator[FunctionType]:
    """Yield the Python function behind an attribute of a class or module: a property, partial, wrapper, ..."""
    if isinstance(value, property):
        value = value.fget
    elif isinstance(value, cached_property):
        value = value.func
    elif isinstance(value, classmethod | staticmethod):
        value = value.__func__
    value = getattr(value, "__wrapped__", value)
    if isinstance(value, partial | partialmethod):
        value = value.func
    if isinstance(value, FunctionType):
        yield value


def _names(code: CodeType) -> Iterator[str]:
    """Yield the names and texts that occur in a function and in the functions that it defines."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, tuple):
            # The attributes in `case Mine(lam=value)`.
            yield from (item for item in constant if isinstance(item, str))
        elif isinstance(constant, CodeType):
            yield from _names(constant)
