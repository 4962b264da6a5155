"""Where each client's state is: rows of stacks, one or more for every finished group."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

SPARSE = 2 / 3
"""A stack lives as long as one of its rows does. One of whose rows fewer than this share are live is worth rewriting:
then memory is about 1.2 times the live states, and a row is rewritten twice in its life on average."""

SLACK = 1 / 8
"""Dead rows in sparse stacks, as a share of all live rows, above which those stacks are rewritten: not every round."""


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

    def alone(self, k: int) -> Stack:
        """The k-th client's state as a stack of its own; its rows are views."""
        own = {name: int(where[k]) for name, where in self.index.items() if where[k] >= 0}
        rows = {name: self.rows[name][row : row + 1] for name, row in own.items()}
        return Stack(rows, {name: np.zeros(1, dtype=np.int64) for name in own})

    @property
    def nbytes(self) -> int:
        """Of all rows."""
        return sum(rows.nbytes for rows in self.rows.values())

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


@dataclass(frozen=True, slots=True)
class Place:
    """One client's state: the k-th of a stack.

    Attributes
    ----------
    stack : a :class:`Stack`, or a Ray reference to one.
    home : the node that made it.
    """

    stack: Any
    k: int
    home: str = ""


@dataclass(frozen=True, eq=False)
class Pack:
    """A file of the newest checkpoint, with the states of some lots as they were when it was first written.

    Attributes
    ----------
    path : in the file system of the checkpoints. bytes, sha256 : of the file. rows : clients in it.
    """

    path: str
    bytes: int
    sha256: str
    rows: int


@dataclass(eq=False)
class Lot:
    """A stack in use.

    Attributes
    ----------
    number : in the order in which stacks came.
    clients : whose states it was made of; `live` of them have had no newer one since.
    pack : the checkpoint's file that holds it, if one does.
    """

    number: int
    stack: Any
    clients: tuple[int, ...]
    home: str
    live: int = 0
    pack: Pack | None = None


class StateTable:
    """Client -> :class:`Place`; a round's changes count only once it is committed."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[Lot, int]] = {}
        self._staged: dict[int, tuple[Lot, int]] = {}
        self._lots: dict[int, Lot] = {}
        self._count = 0

    def place(self, client: int) -> Place | None:
        found = self._staged.get(client) or self._kept.get(client)
        return None if found is None else Place(found[0].stack, found[1], found[0].home)

    def stage(self, clients: Sequence[int], stack: Any, home: str = "", pack: Pack | None = None) -> None:
        lot = Lot(self._count, stack, tuple(clients), home, pack=pack)
        self._count += 1
        self._staged.update({c: (lot, k) for k, c in enumerate(clients)})

    def commit(self) -> None:
        for client, (lot, k) in self._staged.items():
            if before := self._kept.get(client):
                self._release(before[0])
            self._kept[client] = (lot, k)
            self._lots[lot.number] = lot
            lot.live += 1
        self._staged.clear()

    def abandon(self) -> None:
        self._staged.clear()

    def __len__(self) -> int:
        """Clients that have a state."""
        return len(self._kept)

    def lots(self) -> list[Lot]:
        """The stacks in use, in the order in which they came."""
        return [self._lots[number] for number in sorted(self._lots)]

    def live(self, lot: Lot) -> list[int]:
        """The places in a stack whose clients have no newer state."""
        return [k for k, client in enumerate(lot.clients) if self._kept.get(client) == (lot, k)]

    def packs(self) -> list[tuple[Pack, list[Lot]]]:
        """Files of the newest checkpoint of which enough is live to be kept, in their order, and the lots in them."""
        inside: dict[Pack, list[Lot]] = {}
        for lot in self.lots():
            if lot.pack is not None:
                inside.setdefault(lot.pack, []).append(lot)
        worthy = [(p, lots) for p, lots in inside.items() if sum(lot.live for lot in lots) >= SPARSE * p.rows]
        return sorted(worthy, key=lambda entry: entry[0].path)

    def scattered(self) -> list[list[int]]:
        """Clients whose states should be put together anew, since they keep too many dead ones in memory.

        In parts no larger than the groups that the states were made by, so that an actor has room for one.
        """
        sparse = [lot for lot in self._lots.values() if lot.live < SPARSE * len(lot.clients)]
        dead = sum(len(lot.clients) - lot.live for lot in sparse)
        if dead <= SLACK * len(self._kept):
            return []
        clients = sorted(lot.clients[k] for lot in sparse for k in self.live(lot))
        size = max(len(lot.clients) for lot in sparse)
        return [clients[first : first + size] for first in range(0, len(clients), size)]

    def _release(self, lot: Lot) -> None:
        lot.live -= 1
        if lot.live == 0:
            del self._lots[lot.number]


@dataclass(frozen=True)
class StateShard:
    """The states of some clients that remember things of the same names.

    Attributes
    ----------
    clients : ``int64[k]``, ids.
    tensors : name -> ``[k, ...]``, row i belonging to ``clients[i]``.
    lot : that it is of, on its way into a checkpoint. pack : that it came from, on its way out of one.
    """

    clients: np.ndarray
    tensors: dict[str, np.ndarray]
    lot: Lot | None = None
    pack: Pack | None = None

    @property
    def nbytes(self) -> int:
        return self.clients.nbytes + sum(rows.nbytes for rows in self.tensors.values())

    def stack(self) -> Stack:
        """The same as a stack."""
        return Stack(dict(self.tensors), {name: np.arange(len(self.clients)) for name in self.tensors})


def shards_of(lot: Lot, ks: Sequence[int], stack: Stack) -> Iterator[StateShard]:
    """The states at places `ks` of a stack."""
    names = [tuple(sorted(name for name, where in stack.index.items() if where[k] >= 0)) for k in ks]
    for pattern in sorted(set(names)):
        mine = [k for k, own in zip(ks, names, strict=True) if own == pattern]
        rows = {name: stack.rows[name][stack.index[name][mine]] for name in pattern}
        yield StateShard(np.array([lot.clients[k] for k in mine]), rows, lot)


def digests(client_states: Iterable[tuple[int, Mapping[str, np.ndarray]]]) -> dict[int, bytes]:
    """Client -> SHA-256 of its state, names in order."""
    found = {}
    for client, state in client_states:
        digest = hashlib.sha256()
        for name, array in sorted(state.items()):
            digest.update(f"{client}/{name}".encode())
            digest.update(np.ascontiguousarray(array).data)
        found[client] = digest.digest()
    return found
