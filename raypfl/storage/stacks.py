"""Stacks: the states of some clients, each name's rows in one array."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Stack:
    """The states of some clients, stacked by name.

    Attributes
    ----------
    rows : name -> ``[n, ...]``.
    index : name -> ``int64[K]``, each client's row of that name, -1 for none. A client's place k is its slot.
    """

    rows: dict[str, np.ndarray]
    index: dict[str, np.ndarray]

    def state_of(self, slot: int) -> dict[str, np.ndarray]:
        """Return the state of one client."""
        return {name: self.rows[name][index[slot]] for name, index in self.index.items() if index[slot] >= 0}

    def single(self, slot: int) -> Stack:
        """Return the state of one client as a stack, whose rows are views."""
        row_of = {name: int(index[slot]) for name, index in self.index.items() if index[slot] >= 0}
        rows = {name: self.rows[name][row : row + 1] for name, row in row_of.items()}
        return Stack(rows, {name: np.zeros(1, dtype=np.int64) for name in row_of})

    def contents(self, count: int, complete: bool = True) -> Contents:
        """Describe what the stack holds of its `count` clients."""
        row_bytes = {name: rows[0].nbytes if len(rows) else 0 for name, rows in self.rows.items()}
        # Clients with the same names share a dict.
        sizes_of_names: dict[tuple[str, ...], dict[str, int]] = {}
        sizes = []
        for slot in range(count):
            names = tuple(name for name, index in self.index.items() if index[slot] >= 0)
            sizes.append(sizes_of_names.setdefault(names, {name: row_bytes[name] for name in names}))
        return Contents(tuple(sizes), complete)

    @classmethod
    def updated(cls, before: list[Mapping[str, np.ndarray]], changes: Mapping[str, np.ndarray]) -> Stack:
        """Return the states `before`, updated with ``changes[name][k]``."""
        rows = dict(changes)
        index = {name: np.arange(len(before)) for name in changes}

        names_before = {name for state in before for name in state}
        for name in sorted(names_before - set(changes)):
            slots = [slot for slot, state in enumerate(before) if name in state]
            rows[name] = np.stack([before[slot][name] for slot in slots])
            index[name] = np.full(len(before), -1)
            index[name][slots] = np.arange(len(slots))
        return cls(rows, index)


@dataclass(frozen=True)
class Contents:
    """What a stack holds, without the rows.

    Attributes
    ----------
    sizes : for each client, name -> bytes.
    complete : whether that is all that the clients keep; otherwise older stacks hold the rest.
    """

    sizes: tuple[Mapping[str, int], ...]
    complete: bool = True

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return sum(sum(size_of_name.values()) for size_of_name in self.sizes)

    def by_client(self) -> list[Contents]:
        """Return the contents of each client alone."""
        return [Contents((size_of_name,), self.complete) for size_of_name in self.sizes]


@dataclass(frozen=True, slots=True)
class StackRef:
    """One client's state, or a part of it, in a stack.

    Attributes
    ----------
    stack : a :class:`Stack`, or a Ray reference to one.
    slot : the client's place among the stack's clients.
    node : the node on which the stack was made.
    """

    stack: Any
    slot: int
    node: str = ""


Fetch = Callable[[Sequence[Any]], Sequence[Stack]]
"""Returns the stacks behind references."""


def merged(parts: Iterable[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Return a client's state from its parts, which come the oldest first."""
    return {name: row for part in parts for name, row in part.items()}


def digests(client_states: Iterable[tuple[int, Mapping[str, np.ndarray]]]) -> dict[int, bytes]:
    """Return client -> SHA-256 of its state, names in order."""
    digest_of_client = {}
    for client, state in client_states:
        digest = hashlib.sha256()
        for name, array in sorted(state.items()):
            digest.update(f"{client}/{name}".encode())
            digest.update(np.ascontiguousarray(array).data)
        digest_of_client[client] = digest.digest()
    return digest_of_client
