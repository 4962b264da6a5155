"""Which options of a method its code never reads, by the names that occur in the functions that a run can reach."""

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
"""Functions that only judge the options: to read one there gives it no effect."""

_BY_ANY_NAME = {"getattr", "vars", "asdict", "astuple", "fields", "__dict__", "replace"}
"""What may read an option whose name does not occur."""

_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})


@lru_cache(maxsize=512)
def unread_options(method: Any) -> frozenset[str]:
    """The options of a method's class that no function reads which a run can reach; none if that is not sure.

    A function counts as reached if its name occurs in one that is: a function of the class, of one of its bases where
    ``super()`` is called, or of a module. So an option that is returned here is never read under its name, while one
    that is not may still have no effect.
    """
    options = {field.name for field in dataclasses.fields(method)}
    names = _names_reached(method)
    return frozenset() if names & _BY_ANY_NAME else frozenset(options - names)


def _names_reached(method: type) -> set[str]:
    """All names that occur in the functions that a run of a method can reach."""
    entries = {name for name in vars(Method) if not name.startswith("__")} - _CHECKS
    waiting = [code for name in entries for code in _resolved(method, name)]
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
    """The function ``self.name``, and those of bases that it may call by ``super()``."""
    for owner in method.__mro__:
        if owner is object or name not in vars(owner):
            continue
        functions = list(filter(_may_read, _functions(vars(owner)[name])))
        yield from functions
        if not any("super" in _names(function.__code__) for function in functions):
            return


def _global(function: FunctionType, name: str) -> Iterator[FunctionType]:
    """The function, or the functions of the class, that a name means in the module of `function`."""
    value = function.__globals__.get(name)
    if hasattr(builtins, name) or value is None:
        return
    inside = vars(value).values() if isinstance(value, type) else [value]
    for item in inside:
        yield from filter(_may_read, _functions(item))


def _may_read(function: FunctionType) -> bool:
    """Whether a function may read options of a method that it is handed: of raypfl, only what is in the same room."""
    room = (*function.__module__.split("."), "", "")[:2]
    is_another_room = room[0] == "raypfl" and room[1] != "methods"
    return not is_another_room and not function.__code__.co_filename.startswith(_LIBRARIES)


def _functions(value: Any) -> Iterator[FunctionType]:
    """The Python functions in what a class or module has under a name."""
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
    """The names and texts that occur in a function and in those that it defines."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, tuple):  # the attributes in `case Mine(lam=value)`
            yield from (item for item in constant if isinstance(item, str))
        elif isinstance(constant, CodeType):
            yield from _names(constant)
