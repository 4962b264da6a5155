"""A method's code must not draw from global random streams, whose numbers depend on what was drawn before."""

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

_HIDDEN: dict[str, tuple[Any, ...]] = {
    "NumPy's": (np, np.random, np.random.mtrand._rand),
    "Python's": (random, random._inst),
}
"""What a module must refer to in order to draw from a stream: a module, or the object whose methods draw."""


@contextmanager
def refuse_unkeyed(function: Any, device: torch.device, instead: str) -> Iterator[None]:
    """Raise a MethodError if the method's function that runs within draws from a global stream, or seeds one.

    NumPy's and Python's streams are checked only if the method's module refers to them, since threads of other
    libraries may draw from them at any time.
    """
    modules = tuple(base.__module__ for base in type(function.__self__).__mro__)
    # A notebook's module grows: what was found in it counts until it has other names.
    mentioned = _mentioned(modules, tuple(len(vars(sys.modules[name])) for name in modules if name in sys.modules))
    with exclusive:  # another thread that seeds the streams meanwhile would look like this function
        before = _states(device, mentioned)
        yield
        after = _states(device, mentioned)

    for whose, state in after.items():
        if state != before[whose]:
            raise MethodError(
                f"{where_defined(function)} draws from {whose} global random stream (or seeds it), so that two runs of "
                f"one experiment would differ. Draw from {instead}."
            )


def _states(device: torch.device, mentioned: frozenset[str]) -> dict[str, Any]:
    states: dict[str, Any] = {"torch's": streams.state(device).numpy().tobytes()}
    if "NumPy's" in mentioned:
        state = np.random.get_state(legacy=False)["state"]
        states["NumPy's"] = (state["key"].tobytes(), state["pos"])
    if "Python's" in mentioned:
        states["Python's"] = random.getstate()
    return states


@lru_cache
def _mentioned(modules: tuple[str, ...], sizes: tuple[int, ...]) -> frozenset[str]:
    """Whose streams these modules, which have so many names, refer to, except modules of raypfl."""
    names = {name for name in modules if name.partition(".")[0] != "raypfl"} & sys.modules.keys()
    values = [value for name in names for value in vars(sys.modules[name]).values()]
    values += [value.__self__ for value in values if isinstance(value, BuiltinMethodType | MethodType)]
    return frozenset(whose for whose, those in _HIDDEN.items() if any(v is one for v in values for one in those))
