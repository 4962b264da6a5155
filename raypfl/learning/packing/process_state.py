"""Global state of a process that runs which advance together in it each have for themselves."""

from __future__ import annotations

import random
import warnings
from typing import Any

import numpy as np
import torch

from raypfl.common.global_draws import numpy_bits


class ProcessState:
    """Warning filters and random streams, as they are when this object is made."""

    def __init__(self) -> None:
        self._filters = warnings.filters
        self._show = warnings.showwarning
        # catch_warnings(record=True) replaces this function.
        self._show_message = warnings._showwarnmsg_impl  # type: ignore[attr-defined]
        self._torch = torch.default_generator.get_state()
        self._numpy = _numpy.state()
        self._python = random.getstate()

    def restore(self) -> None:
        """Bring the process back to this state."""
        warnings.filters = self._filters
        warnings.showwarning = self._show
        warnings._showwarnmsg_impl = self._show_message  # type: ignore[attr-defined]
        warnings._filters_mutated()  # type: ignore[attr-defined]
        torch.default_generator.set_state(self._torch)
        _numpy.restore(self._numpy)
        random.setstate(self._python)


class _NumpyStream:
    """NumPy's global stream. To read or set its state takes 36 microseconds, so both are left out without a draw."""

    def __init__(self) -> None:
        self._state: dict[str, Any] = {}
        self._bits: bytes | str = ""

    def state(self) -> dict[str, Any]:
        """Return the state; without a draw since the last call, the same object."""
        bits = numpy_bits()
        # A normal draw may only use up the second one of a pair, which is kept apart from the bits.
        if bits != self._bits or self._state["has_gauss"]:
            self._state = np.random.get_state(legacy=False)
            self._bits = bits
        return self._state

    def restore(self, state: dict[str, Any]) -> None:
        """Bring the stream back to a state that :meth:`state` returned."""
        if state is not self.state():
            np.random.set_state(state)
            self._state = state
            self._bits = numpy_bits()


_numpy = _NumpyStream()
