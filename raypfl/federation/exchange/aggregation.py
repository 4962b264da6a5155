"""Aggregation of a cohort's reply, group by group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from raypfl.clients.replies.reduction import Value
from raypfl.clients.worker import Group, Reply
from raypfl.common.errors import MethodError, PrivacyError
from raypfl.common.transfer import to_device
from raypfl.federation.exchange.tree_sum import Subtree, Total, TreeSum, added, refuse_other_shape
from raypfl.federation.ledger import MessageSize
from raypfl.federation.robustness.wire import Kind
from raypfl.learning.privacy import unmasked

CombineRows = Callable[[str, Kind, Tensor, np.ndarray], Tensor]
"""Returns a message's result from its name, kind, rows ``[C, ...]`` and their weights ``float64[C]``, NaN for none."""


class ReplyAggregator:
    """Adds up sums and means over the cohort, and collects rows, in whichever order groups reply.

    Parameters
    ----------
    num_clients : the number of clients in the cohort.
    combine : what is made of the rows of training messages; None: ``Each`` alone sends rows, which stay as they are.
    """

    def __init__(self, num_clients: int, device: torch.device, combine: CombineRows | None = None):
        self._num_clients = num_clients
        self._num_replied = 0
        self._device = device
        self._combine = combine
        # Name -> ``(index of the first group that sent it, place in its reply)`` and this value, without its array.
        self._first: dict[str, tuple[tuple[int, int], Value]] = {}
        self._sent: dict[str, Counter[tuple[int, int]]] = {}
        self._contributors: Counter[str] = Counter()
        self._rows: dict[str, np.ndarray] = {}
        self._weights: dict[str, np.ndarray] = {}
        self._tree = TreeSum()
        self._totals: Mapping[str, Total] = {}

    def add(self, group: Group, values: Mapping[str, Value], subtrees: Sequence[Subtree] | None = None) -> None:
        """Add a group's reply.

        `subtrees` has the sums over groups of a bundle, which come with one of them; None: the group is no part of one.
        """
        self._num_replied += len(group.clients)
        for position, (name, value) in enumerate(values.items()):
            place = (group.index, position)
            first = self._first.get(name)
            if first is not None and value.kind != first[1].kind:
                kinds = " and as ".join(sorted([value.kind.title(), first[1].kind.title()]))
                raise MethodError(
                    f"The clients' reply has {name!r} as {kinds}; return it as the same for every client, however the "
                    "cohort is cut into groups."
                )
            if first is None or place < first[0]:
                self._first[name] = (place, _without_array(value))
            sizes = zip(value.numbers.tolist(), value.num_bytes.tolist(), strict=True)
            self._sent.setdefault(name, Counter()).update(sizes)
            self._contributors[name] += value.contributors

            if value.has_rows:
                self._add_rows(group, name, value)

        for subtree in [leaf(group, values)] if subtrees is None else subtrees:
            self.add_sums(subtree)

    def _add_rows(self, group: Group, name: str, value: Value) -> None:
        if name not in self._rows:
            self._rows[name] = np.zeros((self._num_clients, *value.array.shape[1:]), value.array.dtype)
            self._weights[name] = np.full(self._num_clients, np.nan)
        rows = self._rows[name]
        refuse_other_shape(name, rows.shape[1:], value.array.shape[1:])
        # In the type of the first rows, whole numbers for instance, others could lose their digits.
        rows = rows.astype(np.result_type(rows.dtype, value.array.dtype), copy=False)
        rows[group.positions] = value.array
        self._rows[name] = rows
        self._weights[name][group.positions] = 1.0 if value.weights is None else value.weights

    def add_sums(self, subtree: Subtree) -> None:
        """Add sums over groups, whose replies are added separately."""
        self._tree.add(subtree)

    @property
    def kinds(self) -> dict[str, str]:
        """Name -> ``each``, ``sum`` or ``mean``."""
        return {name: value.kind for name, value in self._values()}

    @property
    def sent(self) -> dict[str, list[MessageSize]]:
        """Name -> the sizes of the clients' messages, the largest first."""
        sizes = {}
        for name, _ in self._values():
            sizes[name] = [(*size, clients) for size, clients in sorted(self._sent[name].items(), reverse=True)]
        return sizes

    def next_exchange(self) -> None:
        """Begin another exchange, with group indices from 0; add the totals so far to the result."""
        self._totals = added(self._totals, self._tree.totals())
        self._tree = TreeSum()

    def refuse_exposed(self, function: str) -> None:
        """Raise a PrivacyError if masks do not hide a client's message; `function` describes what returned it."""
        for name, value in self._values():
            if value.masked is None:
                continue

            senders = self._sent[name].total()
            if senders < self._num_clients:
                raise PrivacyError(
                    f"{function} returned {name!r} for {senders} of the cohort's {self._num_clients} clients, but the "
                    "masks of privacy.secure_aggregation cancel only in a sum over all of them; return it for every "
                    "client."
                )
            if self._contributors[name] == 1:
                raise PrivacyError(
                    f"{function} returned {name!r} with zeros, or a weight of zero, for all clients of the cohort but "
                    "one, so the sum is that client's own message, which privacy.secure_aggregation should hide. "
                    "Choose a method, or an option of this one, with which all clients contribute, or set it to false."
                )

    def result(self, function: str) -> dict[str, Tensor]:
        """Return the cohort's reply by name.

        `function` describes what returned it.

        Raises
        ------
        MethodError : if the weights of a ``Mean`` sum to zero, or some clients returned no row of an ``Each``.
        """
        self.next_exchange()
        result = {}
        for name, value in self._values():
            senders = self._sent[name].total()
            if value.kind == "each" and senders < self._num_replied:
                raise MethodError(
                    f"{function} returned {name!r} as rows for {senders} of {self._num_replied} clients; return it for "
                    "every client, such as zeros for those that have nothing to send."
                )

            weight = np.nansum(self._weights[name]) if value.has_rows else self._totals[name].weight
            if value.kind == "mean" and weight <= 0:
                if value.can_be_empty:
                    continue
                raise MethodError(
                    f"{function} returned Mean {name!r} with weights that sum to {weight:g} over the cohort; at least "
                    f"one must be above 0. With can_be_empty=True, the reply lacks {name!r} instead."
                )

            if value.has_rows:
                rows = to_device(self._rows[name], self._device)
                if self._combine is not None:
                    rows = self._combine(name, value.kind, rows, self._weights[name])
                result[name] = rows
                continue

            total = self._totals[name]
            # The array of a single group may be in shared memory, or still in use by its sender.
            array = total.array if total.is_writable else np.array(total.array)
            if value.masked is not None:
                array = unmasked(array, value.masked).numpy()
            tensor = to_device(array, self._device)
            if value.kind == "mean":
                tensor = tensor / total.weight
            result[name] = tensor
        return result

    def _values(self) -> list[tuple[str, Value]]:
        """Return the names and their values in the order of groups and replies."""
        by_place = sorted(self._first.items(), key=lambda entry: entry[1][0])
        return [(name, value) for name, (_, value) in by_place]


def leaf(group: Group, values: Mapping[str, Value]) -> Subtree:
    """Return a group's sums and means as a leaf of the tree."""
    totals = {name: Total(value.array, value.weight) for name, value in values.items() if not value.has_rows}
    return Subtree(0, group.index, totals)


def take_sums(group: Group, reply: Reply) -> Subtree:
    """Take the sums out of the reply of a group in a bundle; return them as a leaf of the bundle's tree."""
    sums = leaf(group, reply.values)
    for name in sums.totals:
        reply.values[name] = _without_array(reply.values[name])
    return sums


def _without_array(value: Value) -> Value:
    return replace(value, array=np.empty(0, value.array.dtype))
