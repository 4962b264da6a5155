"""Tensors that go to all clients: a large one is sent once as long as it does not change."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import numpy as np
from torch import Tensor

from raypfl.clients.worker import SharedTensors
from raypfl.common.messages import unmarked
from raypfl.common.transfer import refuse_without_array
from raypfl.federation.exchange.backend import Backend

INLINE_BYTES = 64_000
"""Bytes up to which tensors are part of each group's call. Fetching an object of its own takes an actor longer: with
two actors, a small round saves 1.2 to 1.5 ms."""


@dataclass(frozen=True)
class _SentTensor:
    """A large tensor that was sent, the last time in `round`."""

    number: int
    handle: Any
    tensor: weakref.ref[Tensor]
    round: int


class Broadcasts:
    """Makes tensors available to all groups.

    A tensor that was already sent in this round or the one before is sent again only if it has changed. So a method
    that sends its last few models in every round costs one model a round.
    """

    def __init__(self, backend: Backend):
        self._backend = backend
        self._large: dict[int, _SentTensor] = {}  # by the tensor's id, as long as it lives
        self._numbers = count()

    def send(
        self, tensors: Mapping[str, Tensor], round: int, on_demand: Mapping[str, Tensor] | None = None
    ) -> SharedTensors:
        """Send the tensors of a call in a round; those that are fetched `on_demand` are not part of the call itself."""
        locations: dict[str, tuple[int, str]] = {}
        objects: dict[int, Any] = {}
        for batch, inside in ((tensors, True), (on_demand or {}, False)):
            small = {}
            for name, tensor in batch.items():
                refuse_without_array(f"What the server sends as {name!r}", tensor.dtype)
                array = unmarked(tensor).detach().cpu().numpy()
                if array.nbytes > INLINE_BYTES:
                    large = self._send_large(tensor, array, round)
                    locations[name] = (large.number, "")
                    objects[large.number] = large.handle
                else:
                    small[name] = array

            if small:
                number = next(self._numbers)
                objects[number] = self._backend.broadcast(small, inside)
                locations |= {name: (number, name) for name in small}

        self._large = {
            key: large for key, large in self._large.items() if large.round >= round - 1 and large.tensor() is not None
        }
        return SharedTensors(locations, objects, frozenset(large.number for large in self._large.values()))

    def _send_large(self, tensor: Tensor, array: np.ndarray, round: int) -> _SentTensor:
        """Send a tensor as an object of its own, unless an earlier object still has its bits."""
        earlier = self._large.get(id(tensor))

        # Python reuses the ids of deleted tensors, so compare the tensor itself.
        if (
            earlier is not None
            and earlier.tensor() is tensor
            and _same_bits(self._backend.get_broadcast(earlier.handle)[""], array)
        ):
            large = replace(earlier, round=round)
        else:
            large = _SentTensor(next(self._numbers), self._backend.broadcast({"": array}), weakref.ref(tensor), round)
        self._large[id(tensor)] = large
        return large


def _same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    # A tensor's version is no proof: changes through tensor.data or a NumPy view do not increase it.
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    # Compared as integers: NaN equals itself, and 0.0 differs from -0.0.
    bits = f"u{min(a.itemsize, 8)}"
    bits_of_a = np.ascontiguousarray(a).reshape(-1).view(bits)
    bits_of_b = np.ascontiguousarray(b).reshape(-1).view(bits)
    return np.array_equal(bits_of_a, bits_of_b)
