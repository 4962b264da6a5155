"""A check that a method does not draw from global random streams, whose numbers depend on all earlier draws."""

from __future__ import annotations

import ctypes
import dis
import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import BuiltinMethodType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

from raypfl.common import streams
from raypfl.common.errors import MethodError
from raypfl.common.exclusive import exclusive
from raypfl.common.user_code import is_user_file, where_defined

ON_CLIENTS = "clients.generators(stream) or clients.randn(*shape, stream=...), keyed by seed, round and client"
AT_START = "torch.Generator().manual_seed(task.seed)"
ON_SERVER = "cohort.generator(stream), keyed by seed and round"

_SOURCES: dict[str, tuple[Any, ...]] = {
    "NumPy's": (np, np.random, np.random.mtrand._rand),
    "Python's": (random, random._inst),
}
"""The modules and objects that draw from a library's global stream; code that draws must refer to one of them."""

_MT19937_BYTES = 4 * (624 + 1)
"""Size of the state of NumPy's global generator: 624 words, and the position of the next one to use."""


@contextmanager
def refuse_unkeyed(function: Any, device: torch.device, instead: str) -> Iterator[None]:
    """Raise a MethodError if the method's function, called within, draws from a global stream, or seeds one.

    NumPy's and Python's streams are checked only if the method's module refers to them or imports them in a function,
    or a module of the user's that it uses does, since threads of other libraries may draw from them at any time.

    Backward passes within run in this thread. Otherwise PyTorch would give a GPU's to a thread of its own, where a
    checkpointed step, which calls the network again, would wait for this thread's lock for ever.

    Parameters
    ----------
    function : the method's function, bound to the method.
    instead : the source of keyed draws that the error recommends.
    """
    classes = type(function.__self__).__mro__
    modules = [base.__module__ for base in classes]
    # A notebook's module grows: the cached result holds only as long as the modules have the same number of names.
    sizes = tuple(len(vars(sys.modules[name])) for name in modules if name in sys.modules)
    mentioned = _mentioned(classes, sizes)

    # Keep other threads out: their draws would be blamed on this function.
    with exclusive, torch.autograd.set_multithreading_enabled(False):
        before = _states(device, mentioned)
        yield
        after = _states(device, mentioned)

    for library, state in after.items():
        if not _same(state, before[library]):
            raise MethodError(
                f"{where_defined(function)} draws from {library} global random stream (or seeds it), so two runs "
                f"of one experiment would differ. Draw from {instead}."
            )


def _states(device: torch.device, mentioned: frozenset[str]) -> dict[str, Any]:
    states: dict[str, Any] = {"torch's": streams.state(device)}
    if "NumPy's" in mentioned:
        states["NumPy's"] = numpy_bits()
    if "Python's" in mentioned:
        states["Python's"] = random.getstate()
    return states


def numpy_bits() -> bytes | str:
    """Return the bits of NumPy's global generator, which every draw changes but a normal one that was drawn before."""
    generator = np.random.mtrand._rand._bit_generator
    if isinstance(generator, np.random.MT19937):
        # Read in place: get_state makes an object of each of its 624 words, which takes 80 microseconds instead of 3.
        return ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)
    return str(generator.state)


def _same(state: Any, other: Any) -> bool:
    return torch.equal(state, other) if isinstance(state, torch.Tensor) else state == other


@lru_cache
def _mentioned(classes: tuple[type, ...], sizes: tuple[int, ...]) -> frozenset[str]:
    """Return the libraries whose streams the modules of a method's classes refer to, or the user's that these use.

    `sizes` : the modules' numbers of names, which serve only as part of the cache's key.
    """
    values: list[Any] = []
    for module in _with_used(base.__module__ for base in classes):
        # Copies: another thread may import something meanwhile.
        values += list(vars(module).values())
        imported = {name for function in _functions(module) for name in _imported(function.__code__)}
        values += [library for library in (np, random) if library.__name__ in imported]
    values += [value.__self__ for value in values if isinstance(value, BuiltinMethodType | MethodType)]

    libraries = set()
    for library, sources in _SOURCES.items():
        # Identity, not equality: comparing arrays gives no single truth value.
        if any(value is source for value in values for source in sources):
            libraries.add(library)
    return frozenset(libraries)


def _with_used(names: Iterable[str]) -> list[ModuleType]:
    """Return the modules of these names, and the user's that they have names of; raypfl's own are left out."""
    modules = [sys.modules[name] for name in names if name in sys.modules and name.partition(".")[0] != "raypfl"]
    for module in modules:
        for value in list(vars(module).values()):
            if isinstance(value, FunctionType | type):
                value = sys.modules.get(value.__module__)
            if isinstance(value, ModuleType) and value not in modules and _is_users(value):
                modules.append(value)
    return modules


def _is_users(module: ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    return file is not None and is_user_file(file)


def _functions(module: ModuleType) -> Iterator[FunctionType]:
    """Yield the functions of a module and of its classes."""
    values = [value for value in list(vars(module).values()) if isinstance(value, FunctionType | type)]
    for value in values:
        if value.__module__ != module.__name__:
            continue
        for member in list(vars(value).values()) if isinstance(value, type) else [value]:
            function = getattr(member, "fget", None) or getattr(member, "__func__", member)
            if isinstance(function, FunctionType):
                yield function


def _imported(code: CodeType) -> Iterator[str]:
    """Yield the top-level names of what a function, or one within it, imports."""
    for instruction in dis.get_instructions(code):
        if instruction.opname == "IMPORT_NAME":
            yield instruction.argval.partition(".")[0]
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _imported(constant)
