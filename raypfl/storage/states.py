"""Where each client's state is: rows of stacks, one or more for every finished group.

A stack holds what its clients changed. What they keep beside that stays where it is, in older stacks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

SPARSE = 2 / 3
"""A stack lives as long as one of its rows does. One of whose bytes fewer than this share are live is worth rewriting:
then memory is about 1.2 times the live states, and a row is rewritten twice in its life on average."""

SLACK = 1 / 8
"""Dead bytes in sparse stacks, as a share of all live ones, above which those stacks are rewritten: not every round."""


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

    def kept(self, count: int, whole: bool = True) -> Kept:
        """What it holds of its `count` clients."""
        widths = {name: rows[0].nbytes if len(rows) else 0 for name, rows in self.rows.items()}
        patterns: dict[tuple[str, ...], dict[str, int]] = {}  # a dict for each, not for each client
        held = []
        for k in range(count):
            names = tuple(name for name, where in self.index.items() if where[k] >= 0)
            held.append(patterns.setdefault(names, {name: widths[name] for name in names}))
        return Kept(tuple(held), whole)

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
class Kept:
    """What a stack holds, without the rows.

    Attributes
    ----------
    held : for each of its clients name -> bytes.
    whole : whether that is all that they keep; else what they keep beside is in older stacks.
    """

    held: tuple[Mapping[str, int], ...]
    whole: bool = True

    @property
    def nbytes(self) -> int:
        """Of all rows."""
        return sum(map(_size, self.held))

    def apart(self) -> list[Kept]:
        """The same for each client alone."""
        return [Kept((names,), self.whole) for names in self.held]


@dataclass(frozen=True, slots=True)
class Place:
    """One client's state, or a part of it: the k-th of a stack.

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
    path : in the file system of the checkpoints. bytes, sha256 : of the file. held : bytes of the states in it.
    """

    path: str
    bytes: int
    sha256: str
    held: int


@dataclass(eq=False)
class Lot:
    """A stack in use.

    Attributes
    ----------
    number : in the order in which stacks came.
    clients : whose states it was made of; `live` of them still have something in it.
    held : for each of them, name -> bytes; `seen` bytes of all have not been replaced by newer ones.
    hides : whether older stacks have names that its clients do not keep any more.
    pack : the checkpoint's file that holds it, if one does.
    """

    number: int
    stack: Any
    clients: tuple[int, ...]
    home: str
    held: tuple[Mapping[str, int], ...]
    hides: bool
    pack: Pack | None = None
    live: int = 0
    seen: int = 0

    @cached_property
    def bytes(self) -> int:
        """Of all rows."""
        return sum(map(_size, self.held))

    @property
    def is_sparse(self) -> bool:
        """Whether most of it has been replaced."""
        return self.seen < SPARSE * self.bytes


Layers = tuple[tuple[Lot, int], ...]
"""A client's state: its places in stacks, the oldest first; of a name in several, the newest counts."""


class StateTable:
    """Client -> its places in stacks; a round's changes count only once it is committed."""

    def __init__(self) -> None:
        self._kept: dict[int, Layers] = {}
        self._staged: dict[int, Layers] = {}
        self._lots: dict[Lot, None] = {}
        self._count = 0

    def places(self, client: int) -> tuple[Place, ...]:
        """Where a client's state is, the oldest part first; empty if it has none."""
        return tuple(Place(lot.stack, k, lot.home) for lot, k in self._layers(client))

    def stage(
        self,
        clients: Sequence[int],
        stack: Any,
        home: str = "",
        kept: Kept | None = None,
        shard: StateShard | None = None,
    ) -> None:
        """Put a new stack over what its clients have.

        Parameters
        ----------
        kept : what it holds; None: the stack is here to be asked.
        shard : of a checkpoint, that it was made of.
        """
        kept = kept or stack.kept(len(clients))
        number = self._count if shard is None else shard.number
        hides = self._hides(clients, kept) if shard is None else shard.whole
        lot = Lot(number, stack, tuple(clients), home, kept.held, hides, None if shard is None else shard.pack)
        self._count = max(self._count, number + 1)
        for k, client in enumerate(clients):
            self._staged[client] = _layered(*self._layers(client), (lot, k))

    def commit(self) -> None:
        for client, layers in self._staged.items():
            self._count_in(layers, 1)
            self._count_in(self._kept.get(client, ()), -1)
            self._kept[client] = layers
        self._staged.clear()

    def abandon(self) -> None:
        self._staged.clear()

    def __len__(self) -> int:
        """Clients that have a state."""
        return len(self._kept)

    def lots(self) -> list[Lot]:
        """The stacks in use, in the order in which they came."""
        return sorted(self._lots, key=lambda lot: lot.number)

    def seen(self, lot: Lot) -> dict[int, tuple[str, ...]]:
        """The places in a stack that clients still have, each with the names of which there is nothing newer."""
        layers = ((k, layer) for k, client in enumerate(lot.clients) for layer in _seen(self._kept.get(client, ())))
        return {k: names for k, (other, _, names) in layers if other is lot}

    def together(self) -> Iterator[tuple[tuple[Lot, ...], dict[int, tuple[int, ...]]]]:
        """Stacks, and the clients whose states are made of those, each with its place in every one of them."""
        found: dict[tuple[Lot, ...], dict[int, tuple[int, ...]]] = {}
        for client, layers in self._kept.items():
            found.setdefault(tuple(lot for lot, _ in layers), {})[client] = tuple(k for _, k in layers)
        yield from sorted(found.items(), key=lambda entry: [lot.number for lot in entry[0]])

    def packs(self) -> list[tuple[Pack, list[Lot]]]:
        """Files of the newest checkpoint of which enough is live to be kept, in their order, and the lots in them."""
        inside: dict[Pack, list[Lot]] = {}
        for lot in self.lots():
            if lot.pack is not None:
                inside.setdefault(lot.pack, []).append(lot)
        worthy = [(p, lots) for p, lots in inside.items() if sum(lot.seen for lot in lots) >= SPARSE * p.held]
        return sorted(worthy, key=lambda entry: entry[0].path)

    def scattered(self) -> list[list[int]]:
        """Clients whose states should be put together anew, since they keep too many dead bytes in memory.

        In parts no larger than the groups that the states were made by, so that an actor has room for one.
        """
        sparse = [lot for lot in self._lots if lot.is_sparse]
        dead = sum(lot.bytes - lot.seen for lot in sparse)
        if dead <= SLACK * sum(lot.seen for lot in self._lots):
            return []
        clients = sorted({lot.clients[k] for lot in sparse for k in self.seen(lot)})
        size = max(len(lot.clients) for lot in sparse)
        return [clients[first : first + size] for first in range(0, len(clients), size)]

    def _layers(self, client: int) -> Layers:
        return self._staged.get(client) or self._kept.get(client, ())

    def _hides(self, clients: Sequence[int], kept: Kept) -> bool:
        """Whether something in older stacks, or in the files of checkpoints, must not be taken for these clients'."""
        if not kept.whole:
            return False
        return any(
            lot.hides or not lot.held[place].keys() <= names.keys()
            for client, names in zip(clients, kept.held, strict=True)
            for lot, place in self._layers(client)
        )

    def _count_in(self, layers: Layers, sign: int) -> None:
        for lot, k, names in _seen(layers):
            lot.live += sign
            lot.seen += sign * sum(lot.held[k][name] for name in names)
            if lot.live:
                self._lots[lot] = None
            else:
                del self._lots[lot]


def _layered(*layers: tuple[Lot, int]) -> Layers:
    """Those of a client's places that are needed, in their order."""
    kept: list[tuple[Lot, int]] = []
    names: set[str] = set()
    for lot, k in sorted(layers, key=lambda layer: layer[0].number, reverse=True):
        if lot.hides or not lot.held[k].keys() <= names:
            kept.append((lot, k))
        names |= lot.held[k].keys()
        if lot.hides:
            break
    return tuple(reversed(kept))


def _seen(layers: Layers) -> Iterator[tuple[Lot, int, tuple[str, ...]]]:
    """A client's places, the newest first, each with the names of which there is nothing newer."""
    newer: set[str] = set()
    for lot, k in reversed(layers):
        yield lot, k, tuple(name for name in lot.held[k] if name not in newer)
        newer |= lot.held[k].keys()


def _size(names: Mapping[str, int]) -> int:
    return sum(names.values())


@dataclass(frozen=True)
class StateShard:
    """The states of some clients, or parts of them, of the same names.

    Attributes
    ----------
    clients : ``int64[k]``, ids.
    tensors : name -> ``[k, ...]``, row i belonging to ``clients[i]``.
    number : of the stack that it is of. Of a client in several shards, for each name the greatest counts.
    whole : whether what smaller numbers have of these clients does not count at all.
    lot : that it is of, on its way into a checkpoint. pack : that it came from, on its way out of one.
    """

    clients: np.ndarray
    tensors: dict[str, np.ndarray]
    number: int = 0
    whole: bool = True
    lot: Lot | None = None
    pack: Pack | None = None

    @property
    def held(self) -> int:
        """Bytes of the states."""
        return sum(rows.nbytes for rows in self.tensors.values())

    @property
    def nbytes(self) -> int:
        return self.clients.nbytes + self.held

    def stack(self) -> Stack:
        """The same as a stack."""
        return Stack(dict(self.tensors), {name: np.arange(len(self.clients)) for name in self.tensors})


def shards_of(lot: Lot, seen: Mapping[int, tuple[str, ...]], stack: Stack) -> Iterator[StateShard]:
    """What clients still have in a stack: ``place -> names`` as `StateTable.seen` gives it."""
    for pattern in sorted({tuple(sorted(names)) for names in seen.values()}):
        mine = [k for k, names in seen.items() if tuple(sorted(names)) == pattern]
        rows = {name: stack.rows[name][stack.index[name][mine]] for name in pattern}
        yield StateShard(np.array([lot.clients[k] for k in mine]), rows, lot.number, lot.hides, lot)


def merged(parts: Iterable[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """A client's state, of its parts, the oldest first."""
    return {name: row for part in parts for name, row in part.items()}


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
