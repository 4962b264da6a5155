"""Where each client's state is: rows of stacks, one stack per finished group."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Stack:
    """The states of some clients, stacked by name.

    Attributes
    ----------
    rows : name -> ``[n, ...]``.
    index : name -> ``int64[K]``, each client's row of that name, -1 where it has none.
    """

    rows: dict[str, np.ndarray]
    index: dict[str, np.ndarray]

    def of(self, k: int) -> dict[str, np.ndarray]:
        """The state of the k-th client."""
        return {name: self.rows[name][where[k]] for name, where in self.index.items() if where[k] >= 0}

    @classmethod
    def updated(cls, before: list[Mapping[str, np.ndarray]], changes: Mapping[str, np.ndarray]) -> Stack:
        """The states `before`, with ``changes[name][k]`` put over them."""
        rows, index = dict(changes), {name: np.arange(len(before)) for name in changes}
        for name in sorted({n for state in before for n in state} - set(changes)):
            owners = [k for k, state in enumerate(before) if name in state]
            rows[name] = np.stack([before[k][name] for k in owners])
            index[name] = np.full(len(before), -1)
            index[name][owners] = np.arange(len(owners))
        return cls(rows, index)


@dataclass(frozen=True)
class Place:
    """One client's state: the k-th of a stack. `stack` is a :class:`Stack`, or a Ray reference to one."""

    stack: Any
    k: int


class StateTable:
    """Client -> :class:`Place`; a round's changes count only once it is committed."""

    def __init__(self) -> None:
        self._kept: dict[int, Place] = {}
        self._staged: dict[int, Place] = {}

    def place(self, client: int) -> Place | None:
        return self._staged.get(client) or self._kept.get(client)

    def stage(self, clients: tuple[int, ...], stack: Any) -> None:
        self._staged.update({c: Place(stack, k) for k, c in enumerate(clients)})

    def commit(self) -> None:
        self._kept.update(self._staged)
        self._staged.clear()

    def abandon(self) -> None:
        self._staged.clear()

    def clients(self) -> list[int]:
        """Clients that have a state, ascending."""
        return sorted(self._kept)

    def stacks(self) -> Iterator[tuple[Any, list[int], list[int]]]:
        """Each stack in use, with the clients whose state it holds and their places in it, by first client."""
        by_stack: dict[int, tuple[Any, list[int], list[int]]] = {}
        for client, place in sorted(self._kept.items()):
            _, clients, ks = by_stack.setdefault(id(place.stack), (place.stack, [], []))
            clients.append(client)
            ks.append(place.k)
        yield from by_stack.values()
