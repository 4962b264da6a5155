"""Hashes of single definitions: of a script or a notebook, most lines are part of no method or network."""

from __future__ import annotations

import dis
import hashlib
import sys
from collections.abc import Callable
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
        elif isinstance(value, (type, FunctionType)) and value.__module__ != "__main__":
            self._write(self._digest_of_module(value.__module__))
        elif isinstance(value, type):
            self.add(value.__bases__)
            self.add({name: part for name, part in vars(value).items() if name not in _OF_EVERY_CLASS})
        elif isinstance(value, FunctionType):
            self.add(value.__code__)
            self.add(value.__defaults__)
            self.add(value.__kwdefaults__)
            self.add([cell.cell_contents for cell in value.__closure__ or ()])
        elif isinstance(value, CodeType):
            self._add_code(value)
        elif isinstance(value, (staticmethod, classmethod)):
            self.add(value.__func__)
        elif isinstance(value, property):
            self.add([value.fget, value.fset])
        elif isinstance(value, dict):
            self.add(list(value.items()))
        elif isinstance(value, (tuple, list)):
            for part in value:
                self.add(part)
        elif isinstance(value, (set, frozenset)):
            self._write(repr(sorted(map(repr, value))))

    def _add_code(self, code: CodeType) -> None:
        self.add(code.co_code)
        self.add(code.co_names)
        self.add(code.co_consts)
        for instruction in dis.get_instructions(code):
            if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                self.add(self._globals.get(instruction.argval))

    def _write(self, text: str | None) -> None:
        self.hash.update(f"{text}\n".encode())
