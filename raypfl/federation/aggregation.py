"""Aggregation of a cohort's reply, group by group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from raypfl.clients.worker import Group, Value
from raypfl.common.errors import MethodError, PrivacyError
from raypfl.learning.privacy import unmasked


class ReplyAggregator:
    """Sums and means over the cohort, and the rows of ``Each``.

    Attributes
    ----------
    sample : name -> a group's value of this name.
    senders : name -> ``{numbers: clients}``, how many clients sent so many numbers.
    """

    def __init__(self, clients: int, device: torch.device):
        self.sample: dict[str, Value] = {}
        self.senders: dict[str, Counter[int]] = {}
        self._contributors: Counter[str] = Counter()
        self._clients = clients
        self._device = device
        self._sums: dict[str, np.ndarray] = {}
        self._weights: dict[str, float] = {}

    def add(self, group: Group, values: Mapping[str, Value]) -> None:
        for name, value in values.items():
            self.sample.setdefault(name, value)
            self.senders.setdefault(name, Counter()).update(value.numbers.tolist())
            self._contributors[name] += value.contributors
            if value.kind == "each":
                rows = self._sums.setdefault(name, np.zeros((self._clients, *value.array.shape[1:]), value.array.dtype))
                rows[group.positions] = value.array
            elif name in self._sums:
                self._sums[name] += value.array
                self._weights[name] += value.weight
            else:
                self._sums[name] = np.array(value.array)
                self._weights[name] = value.weight

    def refuse_exposed(self, who: str) -> None:
        """Raise a PrivacyError if masks do not hide a client's message, of those that the function `who` returned."""
        for name in (name for name, value in self.sample.items() if value.masked is not None):
            senders = self.senders[name].total()
            if senders < self._clients:
                raise PrivacyError(
                    f"{who} returned {name!r} for {senders} of the cohort's {self._clients} clients, but the masks of "
                    "privacy.secure_aggregation cancel only in a sum over all of them; return it for every client."
                )
            if self._contributors[name] == 1:
                raise PrivacyError(
                    f"{who} returned {name!r} with zeros, or a weight of zero, for all clients of the cohort but one, "
                    "so that the sum is this client's own message, which privacy.secure_aggregation is to hide. Choose "
                    "a method, or an option of this one, with which all clients contribute, or set it to false."
                )

    def result(self) -> dict[str, Tensor]:
        """The cohort's reply by name.

        Raises
        ------
        MethodError : if the weights of a ``Mean`` sum to zero.
        """
        result = {}
        for name, array in self._sums.items():
            dtype = self.sample[name].masked
            tensor = (torch.from_numpy(array) if dtype is None else unmasked(array, dtype)).to(self._device)
            if self.sample[name].kind == "mean":
                if self._weights[name] <= 0:
                    raise MethodError(
                        f"The weights of Mean {name!r} sum to {self._weights[name]}; they must be positive."
                    )
                tensor = tensor / self._weights[name]
            result[name] = tensor
        return result
