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
    """Adds up sums and means over the cohort, and collects the rows of ``Each``.

    Attributes
    ----------
    sample : name -> the first group's value of this name.
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
        """Add a group's reply. Sums round differently in another order, so groups must come in theirs."""
        for name, value in values.items():
            self.sample.setdefault(name, value)
            self.senders.setdefault(name, Counter()).update(value.numbers.tolist())
            self._contributors[name] += value.contributors

            if value.kind == "each":
                if name not in self._sums:
                    self._sums[name] = np.zeros((self._clients, *value.array.shape[1:]), value.array.dtype)
                self._sums[name][group.positions] = value.array
            elif name in self._sums:
                self._sums[name] += value.array
                self._weights[name] += value.weight
            else:
                self._sums[name] = np.array(value.array)
                self._weights[name] = value.weight

    def refuse_exposed(self, function: str) -> None:
        """Raise a PrivacyError if masks do not hide a client's message; `function` describes what returned it."""
        for name, sample in self.sample.items():
            if sample.masked is None:
                continue

            senders = self.senders[name].total()
            if senders < self._clients:
                raise PrivacyError(
                    f"{function} returned {name!r} for {senders} of the cohort's {self._clients} clients, but the "
                    "masks of privacy.secure_aggregation cancel only in a sum over all of them; return it for every "
                    "client."
                )
            if self._contributors[name] == 1:
                raise PrivacyError(
                    f"{function} returned {name!r} with zeros, or a weight of zero, for all clients of the cohort but "
                    "one, so that the sum is this client's own message, which privacy.secure_aggregation is to hide. "
                    "Choose a method, or an option of this one, with which all clients contribute, or set it to false."
                )

    def result(self) -> dict[str, Tensor]:
        """Return the cohort's reply by name.

        Raises
        ------
        MethodError : if the weights of a ``Mean`` sum to zero.
        """
        result = {}
        for name, array in self._sums.items():
            dtype = self.sample[name].masked
            tensor = torch.from_numpy(array) if dtype is None else unmasked(array, dtype)
            tensor = tensor.to(self._device)

            if self.sample[name].kind == "mean":
                if self._weights[name] <= 0:
                    raise MethodError(
                        f"The weights of Mean {name!r} sum to {self._weights[name]}; they must be positive."
                    )
                tensor = tensor / self._weights[name]

            result[name] = tensor
        return result
