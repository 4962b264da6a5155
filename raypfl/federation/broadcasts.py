"""Tensors that go to all clients: a large one is sent once as long as it does not change."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
from torch import Tensor

from raypfl.clients.worker import SharedTensors
from raypfl.common.messages import unmarked
from raypfl.federation.backend import Backend

INSIDE = 64_000
"""Bytes up to which tensors are part of each group's call, which is faster than putting and fetching an object."""


@dataclass(frozen=True)
class _Known:
    """A tensor that was sent, the last time in `round`."""

    number: int
    handle: Any
    tensor: weakref.ref[Tensor]
    round: int


class Broadcasts:
    """Makes tensors available to all groups.

    A tensor that was already sent in this round or the one before is sent again only if it has changed. So a ring of
    past models costs one model a round.
    """

    def __init__(self, backend: Backend):
        self._backend = backend
        self._known: dict[int, _Known] = {}  # by the tensor's id, as long as it lives
        self._numbers = count()

    def sent(
        self, tensors: Mapping[str, Tensor], round: int, on_demand: Mapping[str, Tensor] | None = None
    ) -> SharedTensors:
        """The tensors of a call in a round; those that are fetched `on_demand` are not part of the call itself."""
        where: dict[str, tuple[int, str]] = {}
        objects: dict[int, Any] = {}
        for some, inside in ((tensors, True), (on_demand or {}, False)):
            small = {}
            for name, tensor in some.items():
                array = unmarked(tensor).detach().cpu().numpy()
                if array.nbytes > INSIDE:
                    known = self._sent(tensor, array, round)
                    where[name], objects[known.number] = (known.number, ""), known.handle
                else:
                    small[name] = array
            if small:
                number = next(self._numbers)
                objects[number] = self._backend.broadcast(small, inside)
                where |= {name: (number, name) for name in small}
        self._known = {
            key: one for key, one in self._known.items() if one.round >= round - 1 and one.tensor() is not None
        }
        return SharedTensors(where, objects, frozenset(one.number for one in self._known.values()))

    def _sent(self, tensor: Tensor, array: np.ndarray, round: int) -> _Known:
        before = self._known.get(id(tensor))
        if before and before.tensor() is tensor and _same_bits(self._backend.get_broadcast(before.handle)[""], array):
            number, handle = before.number, before.handle
        else:
            number, handle = next(self._numbers), self._backend.broadcast({"": array})
        self._known[id(tensor)] = _Known(number, handle, weakref.ref(tensor), round)
        return self._known[id(tensor)]


def _same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    # The version of a tensor does not tell: a change through tensor.data or a NumPy view does not change it.
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    bits = f"u{min(a.itemsize, 8)}"
    one, other = (np.ascontiguousarray(array).reshape(-1).view(bits) for array in (a, b))
    return np.array_equal(one, other)
