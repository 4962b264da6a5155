"""Hashes of single definitions: of a script or a notebook, most lines are part of no method or network."""

from __future__ import annotations

import dis
import hashlib
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property, partial
from types import CodeType, FunctionType, ModuleType

_OF_EVERY_CLASS = {
    *("__dict__", "__weakref__", "__module__", "__doc__"),
    *("__firstlineno__", "__static_attributes__"),  # of Python 3.13; the line moves with other code
    "__slotnames__",  # a class has it once an object of it was pickled
}


def digest_of_definition(name: str, digest_of_module: Callable[[str], str | None]) -> str | None:
    """Return a hash of a class or function of the running script or notebook; None if there is none of this name.

    Hashed are its compiled code and what this uses: base classes, attributes, default values and global variables of
    plain types, further functions and classes, and the user's modules. Comments and other lines do not count.

    digest_of_module : returns the hash of the module of this name; None if it is not the user's.
    """
    definition = vars(sys.modules["__main__"]).get(name)
    if definition is None:
        return None
    content = _Content(digest_of_module)
    content.add(definition)
    return content.hash.hexdigest()


class _Content:
    """The hash of values, to which each is added with what it refers to."""

    def __init__(self, digest_of_module: Callable[[str], str | None]):
        self.hash = hashlib.sha256()
        self._digest_of_module = digest_of_module
        self._globals = vars(sys.modules["__main__"])
        self._visited: dict[int, object] = {}  # kept, so that no later object has the address of a freed one

    def add(self, value: object) -> None:
        """Add a value, unless it was added before, as a class that its own functions name."""
        if isinstance(value, (str, bytes, int, float, complex, type(None))):
            self._write(repr(value))
        elif id(value) not in self._visited:
            self._visited[id(value)] = value
            self._write(type(value).__name__)
            self._add_parts(value)

    def _add_parts(self, value: object) -> None:
        if isinstance(value, ModuleType):
            self._write(self._digest_of_module(value.__name__))
        elif isinstance(value, (type, FunctionType)):
            self._add_definition(value)
        elif isinstance(value, CodeType):
            self._add_code(value)
        else:
            for part in _parts(value):
                self.add(part)

    def _add_definition(self, definition: type | FunctionType) -> None:
        if definition.__module__ != "__main__":
            self._write(self._digest_of_module(definition.__module__))
        elif isinstance(definition, type):
            self.add(definition.__bases__)
            self.add({name: part for name, part in vars(definition).items() if name not in _OF_EVERY_CLASS})
        else:
            self.add(definition.__code__)
            self.add(definition.__defaults__)
            self.add(definition.__kwdefaults__)
            for cell in definition.__closure__ or ():
                with suppress(ValueError):  # of a variable that has no value yet
                    self.add(cell.cell_contents)

    def _add_code(self, code: CodeType) -> None:
        self.add(code.co_code)
        self.add(code.co_names)
        self.add(code.co_consts)
        for instruction in dis.get_instructions(code):
            if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                self.add(self._globals.get(instruction.argval))

    def _write(self, text: str | None) -> None:
        self.hash.update(f"{text}\n".encode())


def _parts(value: object) -> Sequence[object]:
    """Return what a container holds, or the function that an object wraps; of other objects, only the type counts."""
    if isinstance(value, (tuple, list)):
        return value
    if isinstance(value, dict):
        return list(value.items())
    if isinstance(value, (set, frozenset)):
        return sorted(map(repr, value))

    if isinstance(value, property):
        return [value.fget, value.fset]
    if isinstance(value, (staticmethod, classmethod)):
        return [value.__func__]
    if isinstance(value, cached_property):
        return [value.func]
    if isinstance(value, partial):
        return [value.func, value.args, value.keywords]
    return [getattr(value, "__dict__", {}).get("__wrapped__")]  # of a function with a cache, say
