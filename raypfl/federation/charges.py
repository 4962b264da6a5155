"""What the messages of the server to its clients are charged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from raypfl.common.messages import Broadcast, Scatter, numbers_charged
from raypfl.federation.ledger import MessageSize
from raypfl.storage.tree import flatten


@dataclass(frozen=True)
class Recipients:
    """The clients that receive the messages of an exchange.

    Attributes
    ----------
    ids : the cohort's clients, C of them.
    present : which of these are still in the round, ``bool[C]``.
    lost : further clients, which drop out after these messages or are late.
    num_clients : the number N of all clients of the run.
    """

    ids: Sequence[int]
    present: np.ndarray
    lost: Sequence[int]
    num_clients: int

    def charges(self, arguments: Mapping[str, Any]) -> Iterator[tuple[str, list[MessageSize]]]:
        """Yield the name of each message among the arguments of ``cohort.run``, and its sizes, the largest first."""
        for name, value in arguments.items():
            if isinstance(value, Scatter):
                yield name, self._sizes(name, value.rows, value.rows.shape[1:].numel(), value.charged)
            else:
                charged = value.charged if isinstance(value, Broadcast) else True
                _, tensors = flatten(tensors_of(value), name)
                for path, tensor in tensors.items():
                    yield path, self._sizes(path, tensor, tensor.numel(), charged)

    def _sizes(self, name: str, tensor: Tensor, size: int, charged: bool | int | Tensor) -> list[MessageSize]:
        """Return the sizes of a message of `size` numbers."""
        if isinstance(charged, Tensor) and charged.shape == (self.num_clients,):
            numbers = numbers_charged(name, charged[list(self.ids)], len(self.ids), size)
            numbers_of_lost = numbers_charged(name, charged[list(self.lost)], len(self.lost), size)
        else:
            numbers = numbers_charged(name, charged, len(self.ids), size)
            numbers_of_lost = np.full(len(self.lost), _largest(name, charged, numbers, size))

        received = Counter(np.concatenate([numbers[self.present], numbers_of_lost]).tolist())
        itemsize = tensor.element_size()
        return [(count, count * itemsize, clients) for count, clients in sorted(received.items(), reverse=True)]


def _largest(name: str, charged: bool | int | Tensor, numbers: np.ndarray, size: int) -> int:
    """Return the largest number of charged numbers of a message, given those of each client of the cohort."""
    if len(numbers):
        return int(numbers.max())
    # An empty cohort shows only charges that are the same for all clients.
    is_by_client = isinstance(charged, Tensor) and charged.dim() > 0
    return size if is_by_client else int(numbers_charged(name, charged, 1, size)[0])


def tensors_of(value: Any) -> Any:
    """Return the tensors of a broadcast; anything else as it is."""
    return value.tensor if isinstance(value, Broadcast) else value
