"""Where each client's state is: rows of stacks, one or more for every finished group.

A stack holds what its clients changed. What they keep besides stays in older stacks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from raypfl.storage.stacks import Contents, Stack, StackRef

T = TypeVar("T")

SPARSE = 2 / 3
"""A stack stays in memory while any of its rows is live, so one whose share of live bytes is below this is worth
rewriting. Memory is then about 1.2 times the live states, and a row is rewritten twice in its life on average."""

SLACK = 1 / 8
"""Sparse stacks are rewritten once their dead bytes exceed this share of all live bytes, so not in every round."""


@dataclass(frozen=True)
class StateFile:
    """A file with states, which never changes and which several checkpoints may list.

    Attributes
    ----------
    path : the path in the location of the checkpoints.
    bytes : the file's size.
    sha256 : the hash of the file's content.
    state_bytes : the bytes of the states alone.
    """

    path: str
    bytes: int
    sha256: str
    state_bytes: int


@dataclass(eq=False)
class LiveStack:
    """A stack in use.

    Attributes
    ----------
    number : the stack's place in the order in which stacks came.
    handle : a :class:`Stack`, or a Ray reference to one.
    clients : the clients whose states it was made of.
    node : the node on which it was made.
    sizes : for each client, name -> bytes.
    hides_older : whether older stacks still have names that its clients no longer keep.
    file : the file that holds its states, once they have been written.
    filed : the slots whose states are in the file; a client whose change was held, and counts only now, is not there.
    num_live : the number of clients that still have something in it.
    live_bytes : the bytes that have not been replaced by newer stacks.
    """

    number: int
    handle: Any
    clients: tuple[int, ...]
    node: str
    sizes: tuple[Mapping[str, int], ...]
    hides_older: bool
    file: StateFile | None = None
    filed: Container[int] = ()
    num_live: int = 0
    live_bytes: int = 0

    @cached_property
    def bytes(self) -> int:
        """Bytes of all rows."""
        return sum(sum(size_of_name.values()) for size_of_name in self.sizes)

    @property
    def is_sparse(self) -> bool:
        """Whether much of it has been replaced, so that rewriting it is worthwhile."""
        return self.live_bytes < SPARSE * self.bytes


Layers = tuple[tuple[LiveStack, int], ...]
"""A client's state: stacks and the client's slot in each, the oldest first; of a name in several, the newest counts."""


class StateTable:
    """Client -> its slots in stacks; a round's changes count only once it is committed."""

    def __init__(self) -> None:
        self._committed: dict[int, Layers] = {}
        self._staged: dict[int, Layers] = {}
        self._held: dict[int, Layers] = {}
        # The stacks in use, as a set that keeps their order.
        self._stacks: dict[LiveStack, None] = {}
        self._next_number = 0

    def refs(self, client: int) -> tuple[StackRef, ...]:
        """Return where a client's state is, the oldest part first; empty if it has none."""
        layers = self._layers(client)
        return tuple(StackRef(stack.handle, slot, stack.node) for stack, slot in layers) if layers else ()

    def stage(
        self,
        clients: Sequence[int],
        stack: Any,
        node: str = "",
        contents: Contents | None = None,
        shard: StateShard | None = None,
    ) -> None:
        """Stage a new stack on top of its clients' states.

        Parameters
        ----------
        stack : a :class:`Stack`, or a Ray reference to one.
        contents : the contents of the stack; may be left out if `stack` is no reference.
        shard : the checkpoint's shard that the stack was made of, if it was.
        """
        contents = contents or stack.contents(len(clients))
        if shard is None:
            number = self._next_number
            hides_older = self._hides_older(clients, contents)
            file = None
        else:
            number = shard.number
            hides_older = shard.complete
            file = shard.file

        new = LiveStack(
            number=number,
            handle=stack,
            clients=tuple(clients),
            node=node,
            sizes=contents.sizes,
            hides_older=hides_older,
            file=file,
            filed=range(len(clients)),
        )
        self._next_number = max(self._next_number, number + 1)
        for slot, client in enumerate(clients):
            self._staged[client] = _needed(*self._layers(client), (new, slot))

    def commit(self) -> None:
        """Let the staged changes count; those of them that were held no longer are."""
        for client, layers in self._staged.items():
            if self._held.get(client) is layers:
                del self._held[client]
            self._count_uses(layers, 1)
            self._count_uses(self._committed.pop(client, ()), -1)
            if layers:
                self._committed[client] = layers
        self._staged.clear()

    def abandon(self) -> None:
        """Drop the staged changes."""
        self._staged.clear()

    def hold(self) -> None:
        """Set the staged changes aside, until :meth:`release` stages those of some clients again."""
        self._held |= self._staged
        self._staged.clear()

    def release(self, clients: Iterable[int]) -> None:
        """Stage the changes of these clients that are held; a client may have none."""
        for client in clients:
            if client in self._held:
                self._staged[client] = self._held[client]

    def held(self, clients: Iterable[int]) -> StateTable:
        """Return the held changes of these clients as a table of their own, in which they are committed."""
        table = StateTable()
        table._committed = _copied({client: self._held[client] for client in clients if client in self._held})
        for layers in table._committed.values():
            table._count_uses(layers, 1)
        return table

    def hold_again(self, held: StateTable) -> None:
        """Hold what another table, the one that :meth:`held` returned, has committed."""
        self._held = _copied(held._committed)
        self._next_number = max(self._next_number, held._next_number)

    def __len__(self) -> int:
        """Return the number of clients that have a state."""
        return len(self._committed)

    def stacks(self) -> list[LiveStack]:
        """Return the stacks in use, in the order in which they came."""
        return sorted(self._stacks, key=lambda stack: stack.number)

    def live_names(self, stack: LiveStack) -> dict[int, tuple[str, ...]]:
        """Return the slots of a stack that are in use, each with the names of which there is nothing newer."""
        names_by_slot = {}
        for client in stack.clients:
            for layer_stack, slot, names in _newest(self._committed.get(client, ())):
                if layer_stack is stack:
                    names_by_slot[slot] = names
        return names_by_slot

    def clients_by_stacks(self) -> Iterator[tuple[tuple[LiveStack, ...], dict[int, tuple[int, ...]]]]:
        """Yield stacks, and the clients whose states are made of those, each with its slot in every one of them."""
        slots_by_stacks: dict[tuple[LiveStack, ...], dict[int, tuple[int, ...]]] = {}
        for client, layers in self._committed.items():
            stacks = tuple(stack for stack, _ in layers)
            slots_by_stacks.setdefault(stacks, {})[client] = tuple(slot for _, slot in layers)
        yield from sorted(slots_by_stacks.items(), key=lambda entry: [stack.number for stack in entry[0]])

    def reusable_files(self) -> dict[StateFile, list[LiveStack]]:
        """Return the files with enough live bytes to be kept, each with its stacks, in the order of the stacks."""
        stacks_in_file: dict[StateFile, list[LiveStack]] = {}
        for stack in self.stacks():
            if stack.file is not None:
                stacks_in_file.setdefault(stack.file, []).append(stack)

        reusable = {}
        for file, stacks in stacks_in_file.items():
            live_bytes = sum(stack.live_bytes for stack in stacks)
            if live_bytes >= SPARSE * file.state_bytes:
                reusable[file] = stacks
        return reusable

    def by_file(self, size: int, without: Collection[LiveStack]) -> Iterator[list[LiveStack]]:
        """Yield the stacks, except those `without`, in lists that each fill a file with `size` bytes of live states.

        The stacks of a list are on the same node.
        """
        stacks_of_node: dict[str, list[LiveStack]] = {}
        for stack in self.stacks():
            if stack not in without:
                stacks_of_node.setdefault(stack.node, []).append(stack)

        for stacks in stacks_of_node.values():
            yield from batched_by_bytes(stacks, lambda stack: stack.live_bytes, size)

    def live_rows(self, stack: LiveStack) -> LiveRows:
        """Return the rows of a stack that clients still use."""
        names = self.live_names(stack)
        return LiveRows(stack.handle, stack.node, stack.clients, names, stack.number, stack.hides_older)

    def clients_to_rewrite(self) -> list[list[int]]:
        """Return the clients whose states should be rewritten, since their stacks keep too many dead bytes in memory.

        They come in lists no longer than the groups that made the stacks, so that an actor has room for one list.
        """
        sparse = [stack for stack in self._stacks if stack.is_sparse]
        dead_bytes = sum(stack.bytes - stack.live_bytes for stack in sparse)
        if dead_bytes <= SLACK * sum(stack.live_bytes for stack in self._stacks):
            return []

        clients = sorted({stack.clients[slot] for stack in sparse for slot in self.live_names(stack)})
        size = max(len(stack.clients) for stack in sparse)
        return [clients[first : first + size] for first in range(0, len(clients), size)]

    def _layers(self, client: int) -> Layers:
        return self._staged.get(client) or self._committed.get(client, ())

    def _hides_older(self, clients: Sequence[int], contents: Contents) -> bool:
        """Return whether older stacks or checkpoints' files have something that these clients no longer keep."""
        return contents.complete and any(
            stack.hides_older or not stack.sizes[slot].keys() <= names.keys()
            for client, names in zip(clients, contents.sizes, strict=True)
            for stack, slot in self._layers(client)
        )

    def _count_uses(self, layers: Layers, sign: int) -> None:
        """Add a client to its stacks (`sign` 1), or take it away from them (-1); stacks without clients are dropped."""
        for stack, slot, names in _newest(layers):
            if sign > 0 and slot not in stack.filed:
                stack.file = None
            stack.num_live += sign
            stack.live_bytes += sign * sum(stack.sizes[slot][name] for name in names)
            if stack.num_live:
                self._stacks[stack] = None
            else:
                del self._stacks[stack]


def batched_by_bytes(items: Iterable[T], bytes_of: Callable[[T], int], size: int) -> Iterator[list[T]]:
    """Yield lists of consecutive items that have `size` bytes or a little more each, except for the last one."""
    batch: list[T] = []
    batch_bytes = 0
    for item in items:
        batch.append(item)
        batch_bytes += bytes_of(item)
        if batch_bytes >= size:
            yield batch
            batch = []
            batch_bytes = 0
    if batch:
        yield batch


def _needed(*layers: tuple[LiveStack, int]) -> Layers:
    """Return those of a client's layers that are needed, the oldest first."""
    needed: list[tuple[LiveStack, int]] = []
    newer_names: set[str] = set()
    for stack, slot in sorted(layers, key=lambda layer: layer[0].number, reverse=True):
        names = stack.sizes[slot].keys()
        if stack.hides_older or not names <= newer_names:
            needed.append((stack, slot))

        newer_names |= names
        if stack.hides_older:
            break
    return tuple(reversed(needed))


def _copied(layers_of_client: Mapping[int, Layers]) -> dict[int, Layers]:
    """Return the same layers with stacks that no table counts yet."""
    copies: dict[LiveStack, LiveStack] = {}
    copied = {}
    for client, layers in layers_of_client.items():
        for stack, _ in layers:
            if stack not in copies:
                copies[stack] = replace(stack, file=None, num_live=0, live_bytes=0)
        copied[client] = tuple((copies[stack], slot) for stack, slot in layers)
    return copied


def _newest(layers: Layers) -> Iterator[tuple[LiveStack, int, tuple[str, ...]]]:
    """Yield a client's layers, the newest first, each with the names of which there is nothing newer."""
    newer_names: set[str] = set()
    for stack, slot in reversed(layers):
        names = stack.sizes[slot]
        yield stack, slot, tuple(name for name in names if name not in newer_names)
        newer_names |= names.keys()


@dataclass(frozen=True)
class StateShard:
    """The states of some clients, or parts of them, of the same names.

    Attributes
    ----------
    clients : ``int64[k]``, the clients' ids.
    tensors : name -> ``[k, ...]``, row i belonging to ``clients[i]``.
    number : the number of its stack. Of a client in several shards, for each name the greatest counts.
    complete : whether smaller numbers do not count for these clients at all.
    file : the file that the shard was read from, if later checkpoints may list it.
    """

    clients: np.ndarray
    tensors: dict[str, np.ndarray]
    number: int = 0
    complete: bool = True
    file: StateFile | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the states."""
        return sum(rows.nbytes for rows in self.tensors.values())

    def outline(self) -> StateShard:
        """Return the shard without its tensors."""
        return replace(self, tensors={})

    def stack(self) -> Stack:
        """Return the states as a stack."""
        return Stack(dict(self.tensors), {name: np.arange(len(self.clients)) for name in self.tensors})


@dataclass(frozen=True)
class LiveRows:
    """The rows of a stack that clients still use, for the process that writes them into a file.

    Attributes
    ----------
    stack : a :class:`Stack`, or a Ray reference to one.
    node : the node that holds it.
    clients : the clients whose states the stack was made of.
    live_names : slot -> names of which there is nothing newer.
    number : the stack's number.
    complete : whether smaller numbers do not count for these clients at all.
    """

    stack: Any
    node: str
    clients: tuple[int, ...]
    live_names: Mapping[int, tuple[str, ...]]
    number: int
    complete: bool

    def shards(self, stack: Stack) -> Iterator[StateShard]:
        """Yield a shard for all clients with the same names; `stack` is the one behind a reference."""
        sorted_names = {slot: tuple(sorted(names)) for slot, names in self.live_names.items()}
        for shared_names in sorted(set(sorted_names.values())):
            slots = [slot for slot, names in sorted_names.items() if names == shared_names]
            rows = {name: _take(stack.rows[name], stack.index[name][slots]) for name in shared_names}
            clients = np.array([self.clients[slot] for slot in slots])
            yield StateShard(clients, rows, self.number, self.complete)


def _take(rows: np.ndarray, index: np.ndarray) -> np.ndarray:
    """Return ``rows[index]``, without a copy if these are all rows in their order."""
    if np.array_equal(index, np.arange(len(rows))):
        return rows
    return rows[index]
