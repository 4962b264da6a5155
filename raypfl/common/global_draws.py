"""A check that a method does not draw from global random streams, whose numbers depend on all earlier draws."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import BuiltinMethodType, MethodType
from typing import Any

import numpy as np
import torch

from raypfl.common import streams
from raypfl.common.errors import MethodError
from raypfl.common.exclusive import exclusive
from raypfl.common.user_code import where_defined

ON_CLIENTS = "clients.generators(stream) or clients.randn(*shape, stream=...), keyed by seed, round and client"
AT_START = "torch.Generator().manual_seed(task.seed)"
ON_SERVER = "cohort.generator(stream), keyed by seed and round"

_SOURCES: dict[str, tuple[Any, ...]] = {
    "NumPy's": (np, np.random, np.random.mtrand._rand),
    "Python's": (random, random._inst),
}
"""The modules and objects that draw from a library's global stream; code that draws must refer to one of them."""


@contextmanager
def refuse_unkeyed(function: Any, device: torch.device, instead: str) -> Iterator[None]:
    """Raise a MethodError if the method's function, called within, draws from a global stream, or seeds one.

    NumPy's and Python's streams are checked only if the method's module refers to them, since threads of other
    libraries may draw from them at any time.

    Parameters
    ----------
    function : the method's function, bound to the method.
    instead : the source of keyed draws that the error recommends.
    """
    modules = tuple(base.__module__ for base in type(function.__self__).__mro__)
    # A notebook's module grows: the cached result holds only as long as the modules have the same number of names.
    sizes = tuple(len(vars(sys.modules[name])) for name in modules if name in sys.modules)
    mentioned = _mentioned(modules, sizes)

    # Keep other threads out: their draws would be blamed on this function.
    with exclusive:
        before = _states(device, mentioned)
        yield
        after = _states(device, mentioned)

    for library, state in after.items():
        if not _same(state, before[library]):
            raise MethodError(
                f"{where_defined(function)} draws from {library} global random stream (or seeds it), so that two runs "
                f"of one experiment would differ. Draw from {instead}."
            )


def _states(device: torch.device, mentioned: frozenset[str]) -> dict[str, Any]:
    states: dict[str, Any] = {"torch's": streams.state(device)}
    if "NumPy's" in mentioned:
        state = np.random.get_state(legacy=False)["state"]
        states["NumPy's"] = (state["key"].tobytes(), state["pos"])
    if "Python's" in mentioned:
        states["Python's"] = random.getstate()
    return states


def _same(state: Any, other: Any) -> bool:
    return torch.equal(state, other) if isinstance(state, torch.Tensor) else state == other


@lru_cache
def _mentioned(modules: tuple[str, ...], sizes: tuple[int, ...]) -> frozenset[str]:
    """Return the libraries whose streams these modules refer to; raypfl's own modules are left out.

    `sizes` : the modules' numbers of names, which serve only as part of the cache's key.
    """
    names = {name for name in modules if name.partition(".")[0] != "raypfl"} & sys.modules.keys()
    values: list[Any] = []
    for name in names:
        values += vars(sys.modules[name]).values()
    values += [value.__self__ for value in values if isinstance(value, BuiltinMethodType | MethodType)]

    libraries = set()
    for library, sources in _SOURCES.items():
        # Identity, not equality: comparing arrays gives no single truth value.
        if any(value is source for value in values for source in sources):
            libraries.add(library)
    return frozenset(libraries)
