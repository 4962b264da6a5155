"""Where each client's state is: rows of stacks, one or more for every finished group.

A stack holds what its clients changed. What they keep besides stays in older stacks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

SPARSE = 2 / 3
"""A stack stays in memory as long as one of its rows is live. One with a smaller share of live bytes than this is worth
rewriting: memory is then about 1.2 times the live states, and a row is rewritten twice in its life on average."""

SLACK = 1 / 8
"""Dead bytes in sparse stacks, as a share of all live ones, above which those stacks are rewritten: not every round."""


@dataclass(frozen=True)
class Stack:
    """The states of some clients, stacked by name.

    Attributes
    ----------
    rows : name -> ``[n, ...]``.
    index : name -> ``int64[K]``, each client's row of that name, -1 for none.
    """

    rows: dict[str, np.ndarray]
    index: dict[str, np.ndarray]

    def of(self, slot: int) -> dict[str, np.ndarray]:
        """The state of one of its clients."""
        return {name: self.rows[name][where[slot]] for name, where in self.index.items() if where[slot] >= 0}

    def alone(self, slot: int) -> Stack:
        """The state of one of its clients as a stack of its own; its rows are views."""
        own = {name: int(where[slot]) for name, where in self.index.items() if where[slot] >= 0}
        rows = {name: self.rows[name][row : row + 1] for name, row in own.items()}
        return Stack(rows, {name: np.zeros(1, dtype=np.int64) for name in own})

    def contents(self, count: int, complete: bool = True) -> Contents:
        """What it holds of its `count` clients."""
        widths = {name: rows[0].nbytes if len(rows) else 0 for name, rows in self.rows.items()}
        patterns: dict[tuple[str, ...], dict[str, int]] = {}  # clients with the same names share a dict
        held = []
        for slot in range(count):
            names = tuple(name for name, where in self.index.items() if where[slot] >= 0)
            held.append(patterns.setdefault(names, {name: widths[name] for name in names}))
        return Contents(tuple(held), complete)

    @classmethod
    def updated(cls, before: list[Mapping[str, np.ndarray]], changes: Mapping[str, np.ndarray]) -> Stack:
        """The states `before`, updated with ``changes[name][k]``."""
        rows, index = dict(changes), {name: np.arange(len(before)) for name in changes}
        for name in sorted({n for state in before for n in state} - set(changes)):
            owners = [k for k, state in enumerate(before) if name in state]
            rows[name] = np.stack([before[k][name] for k in owners])
            index[name] = np.full(len(before), -1)
            index[name][owners] = np.arange(len(owners))
        return cls(rows, index)


@dataclass(frozen=True)
class Contents:
    """What a stack holds, without the rows.

    Attributes
    ----------
    held : for each of its clients name -> bytes.
    complete : whether that is all that they keep; otherwise older stacks hold the rest.
    """

    held: tuple[Mapping[str, int], ...]
    complete: bool = True

    @property
    def nbytes(self) -> int:
        """Of all rows."""
        return sum(sum(names.values()) for names in self.held)

    def apart(self) -> list[Contents]:
        """The same for each client alone."""
        return [Contents((names,), self.complete) for names in self.held]


@dataclass(frozen=True, slots=True)
class StackRef:
    """One client's state, or a part of it, in a stack.

    Attributes
    ----------
    stack : a :class:`Stack`, or a Ray reference to one.
    slot : of the client among the stack's clients.
    node : on which the stack was made.
    """

    stack: Any
    slot: int
    node: str = ""


@dataclass(frozen=True, eq=False)
class StateFile:
    """A checkpoint's file with the states of some stacks, as they were when it was first written.

    Attributes
    ----------
    path : in the file system of the checkpoints. bytes, sha256 : of the file. held : bytes of the states in it.
    """

    path: str
    bytes: int
    sha256: str
    held: int = 0


@dataclass(eq=False)
class LiveStack:
    """A stack in use.

    Attributes
    ----------
    number : in the order in which stacks came.
    clients : whose states it was made of; `live` of them still have something in it.
    held : for each of them, name -> bytes; `live_bytes` of all have not been replaced by newer ones.
    hides : whether older stacks have names that its clients do not keep any more.
    file : the file of the newest checkpoint that holds it, if one does.
    """

    number: int
    stack: Any
    clients: tuple[int, ...]
    node: str
    held: tuple[Mapping[str, int], ...]
    hides: bool
    file: StateFile | None = None
    live: int = 0
    live_bytes: int = 0

    @cached_property
    def bytes(self) -> int:
        """Of all rows."""
        return sum(sum(names.values()) for names in self.held)

    @property
    def is_sparse(self) -> bool:
        """Whether much of it has been replaced."""
        return self.live_bytes < SPARSE * self.bytes


Layers = tuple[tuple[LiveStack, int], ...]
"""A client's state: stacks and its slots in them, the oldest first; of a name in several, the newest counts."""


class StateTable:
    """Client -> its slots in stacks; a round's changes count only once it is committed."""

    def __init__(self) -> None:
        self._committed: dict[int, Layers] = {}
        self._staged: dict[int, Layers] = {}
        self._stacks: dict[LiveStack, None] = {}
        self._count = 0

    def refs(self, client: int) -> tuple[StackRef, ...]:
        """Where a client's state is, the oldest part first; empty if it has none."""
        return tuple(StackRef(one.stack, slot, one.node) for one, slot in self._layers(client))

    def stage(
        self,
        clients: Sequence[int],
        stack: Any,
        node: str = "",
        contents: Contents | None = None,
        shard: StateShard | None = None,
    ) -> None:
        """Put a new stack over what its clients have.

        Parameters
        ----------
        contents : of the stack; None: it is a :class:`Stack`, which tells.
        shard : of a checkpoint, that it was made of.
        """
        contents = contents or stack.contents(len(clients))
        number = self._count if shard is None else shard.number
        hides = self._hides(clients, contents) if shard is None else shard.complete
        file = None if shard is None else shard.file
        new = LiveStack(number, stack, tuple(clients), node, contents.held, hides, file)
        self._count = max(self._count, number + 1)
        for slot, client in enumerate(clients):
            self._staged[client] = _needed(*self._layers(client), (new, slot))

    def commit(self) -> None:
        for client, layers in self._staged.items():
            self._count_in(layers, 1)
            self._count_in(self._committed.get(client, ()), -1)
            self._committed[client] = layers
        self._staged.clear()

    def abandon(self) -> None:
        self._staged.clear()

    def __len__(self) -> int:
        """Clients that have a state."""
        return len(self._committed)

    def stacks(self) -> list[LiveStack]:
        """The stacks in use, in the order in which they came."""
        return sorted(self._stacks, key=lambda one: one.number)

    def live(self, stack: LiveStack) -> dict[int, tuple[str, ...]]:
        """The slots of a stack that are in use, each with the names of which there is nothing newer."""
        layers = (layer for client in stack.clients for layer in _newest(self._committed.get(client, ())))
        return {slot: names for one, slot, names in layers if one is stack}

    def by_stacks(self) -> Iterator[tuple[tuple[LiveStack, ...], dict[int, tuple[int, ...]]]]:
        """Stacks, and the clients whose states are made of those, each with its slot in every one of them."""
        found: dict[tuple[LiveStack, ...], dict[int, tuple[int, ...]]] = {}
        for client, layers in self._committed.items():
            found.setdefault(tuple(one for one, _ in layers), {})[client] = tuple(slot for _, slot in layers)
        yield from sorted(found.items(), key=lambda entry: [one.number for one in entry[0]])

    def files(self) -> list[tuple[StateFile, list[LiveStack]]]:
        """Files of the newest checkpoint with enough live bytes to be kept, and the stacks in them, sorted by path."""
        inside: dict[StateFile, list[LiveStack]] = {}
        for one in self.stacks():
            if one.file is not None:
                inside.setdefault(one.file, []).append(one)
        worthy = [(f, ones) for f, ones in inside.items() if sum(one.live_bytes for one in ones) >= SPARSE * f.held]
        return sorted(worthy, key=lambda entry: entry[0].path)

    def shards(self, fetch: Callable[[Any], Stack], without: Collection[LiveStack] = ()) -> Iterator[StateShard]:
        """What clients have in each stack but some, fetched one at a time."""
        for one in self.stacks():
            if one not in without:
                yield from _shards(one, self.live(one), fetch(one.stack))

    def sparse(self) -> list[list[int]]:
        """Clients whose states should be rewritten, since their stacks keep too many dead bytes in memory.

        In parts no larger than the groups that made the stacks, so that an actor has room for one.
        """
        sparse = [one for one in self._stacks if one.is_sparse]
        dead = sum(one.bytes - one.live_bytes for one in sparse)
        if dead <= SLACK * sum(one.live_bytes for one in self._stacks):
            return []
        clients = sorted({one.clients[k] for one in sparse for k in self.live(one)})
        size = max(len(one.clients) for one in sparse)
        return [clients[first : first + size] for first in range(0, len(clients), size)]

    def _layers(self, client: int) -> Layers:
        return self._staged.get(client) or self._committed.get(client, ())

    def _hides(self, clients: Sequence[int], contents: Contents) -> bool:
        """Whether older stacks, or files of checkpoints, have something that these clients do not keep any more."""
        return contents.complete and any(
            one.hides or not one.held[slot].keys() <= names.keys()
            for client, names in zip(clients, contents.held, strict=True)
            for one, slot in self._layers(client)
        )

    def _count_in(self, layers: Layers, sign: int) -> None:
        for one, slot, names in _newest(layers):
            one.live += sign
            one.live_bytes += sign * sum(one.held[slot][name] for name in names)
            if one.live:
                self._stacks[one] = None
            else:
                del self._stacks[one]


def _needed(*layers: tuple[LiveStack, int]) -> Layers:
    """Those of a client's layers that are needed, the oldest first."""
    needed: list[tuple[LiveStack, int]] = []
    names: set[str] = set()
    for one, slot in sorted(layers, key=lambda layer: layer[0].number, reverse=True):
        if one.hides or not one.held[slot].keys() <= names:
            needed.append((one, slot))
        names |= one.held[slot].keys()
        if one.hides:
            break
    return tuple(reversed(needed))


def _newest(layers: Layers) -> Iterator[tuple[LiveStack, int, tuple[str, ...]]]:
    """A client's layers, the newest first, each with the names of which there is nothing newer."""
    newer: set[str] = set()
    for one, slot in reversed(layers):
        yield one, slot, tuple(name for name in one.held[slot] if name not in newer)
        newer |= one.held[slot].keys()


@dataclass(frozen=True)
class StateShard:
    """The states of some clients, or parts of them, of the same names.

    Attributes
    ----------
    clients : ``int64[k]``, ids.
    tensors : name -> ``[k, ...]``, row i belonging to ``clients[i]``.
    number : of its stack. Of a client in several shards, for each name the greatest counts.
    complete : whether smaller numbers do not count for these clients at all.
    source : its stack, on its way into a checkpoint. file : that it was read from.
    """

    clients: np.ndarray
    tensors: dict[str, np.ndarray]
    number: int = 0
    complete: bool = True
    source: LiveStack | None = None
    file: StateFile | None = None

    @property
    def nbytes(self) -> int:
        """Of the states."""
        return sum(rows.nbytes for rows in self.tensors.values())

    def stack(self) -> Stack:
        """The same as a stack."""
        return Stack(dict(self.tensors), {name: np.arange(len(self.clients)) for name in self.tensors})


def _shards(source: LiveStack, live: Mapping[int, tuple[str, ...]], stack: Stack) -> Iterator[StateShard]:
    """What clients still have in a stack: ``slot -> names``."""
    for pattern in sorted({tuple(sorted(names)) for names in live.values()}):
        slots = [slot for slot, names in live.items() if tuple(sorted(names)) == pattern]
        rows = {name: stack.rows[name][stack.index[name][slots]] for name in pattern}
        clients = np.array([source.clients[slot] for slot in slots])
        yield StateShard(clients, rows, source.number, source.hides, source)


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
