"""The clients' states of a run, between the nodes that hold them and the files of its checkpoints.

A location that all nodes reach is written and read by the nodes themselves, another one by the server's process. Both
give the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from raypfl.federation.exchange.backend import Backend
from raypfl.storage.checkpoints import StoredStates, has_file, save_states, write_file
from raypfl.storage.checkpoints.state_files import FILE_SIZE, WriteFiles
from raypfl.storage.filesystems import is_shared
from raypfl.storage.stacks import Fetch, digests, merged
from raypfl.storage.states import LiveRows, LiveStack, StateFile, StateTable, batched_by_bytes

_ClientsOfStacks = tuple[list[Any], dict[int, tuple[int, ...]]]
"""References to stacks, and the clients whose states are made of those, each with its slot in every one of them."""


def save(
    states: StateTable, backend: Backend, location: str, permit: Callable[[], None], warn: Callable[[str], None]
) -> StoredStates:
    """Write the states that are in no file yet; the errors are those of :func:`raypfl.storage.checkpoints.save_states`.

    If a node cannot write to the location, or to another folder of this name, the server's process does, with a
    warning.
    """
    write: WriteFiles
    if is_shared(location):
        write = partial(_write_on_nodes, backend, location, warn)
    else:
        write = partial(_write_here, backend, location)
    return save_states(location, states, write, permit)


def restored(stored: StoredStates, backend: Backend) -> StateTable:
    """Return a checkpoint's states; the errors are those of :func:`raypfl.storage.checkpoints.read_file`."""
    states = StateTable()
    for shard, stack, contents, node in backend.read_states(stored.location, stored.state_files):
        states.stage(shard.clients.tolist(), stack, node, contents, shard)
    states.commit()
    return states


def all_digests(states: StateTable, backend: Backend) -> dict[int, bytes]:
    """Return client -> SHA-256 of its state, computed on the nodes that hold the newest parts."""
    entries_of_node: dict[str, list[tuple[tuple[LiveStack, ...], dict[int, tuple[int, ...]]]]] = {}
    for stacks, slots_by_client in states.clients_by_stacks():
        entries_of_node.setdefault(stacks[-1].node, []).append((stacks, slots_by_client))

    jobs = []
    for node, entries in entries_of_node.items():
        for batch in batched_by_bytes(entries, lambda entry: sum(stack.live_bytes for stack in entry[0]), FILE_SIZE):
            jobs.append((node, [([stack.handle for stack in stacks], slots) for stacks, slots in batch]))

    digest_of_client: dict[int, bytes] = {}
    for batch_digests in backend.map_states(_digests, jobs):
        digest_of_client |= batch_digests
    return digest_of_client


def _write_here(backend: Backend, location: str, files: Sequence[Sequence[LiveRows]]) -> list[StateFile]:
    return backend.map_states(partial(write_file, location), [("", rows) for rows in files])


def _write_on_nodes(
    backend: Backend, location: str, warn: Callable[[str], None], files: Sequence[Sequence[LiveRows]]
) -> list[StateFile]:
    """Write each file on the node that holds its stacks or, if that fails, here."""
    jobs = [(rows[0].node, rows) for rows in files]
    written = []
    for result, rows in zip(backend.map_states(partial(_try_to_write, location), jobs), files, strict=True):
        problem = ""
        if isinstance(result, OSError):
            problem = str(result)
        elif not has_file(location, result):
            problem = "what is written there does not arrive where the server is"

        if problem:
            warn(
                f"A node cannot write clients' states to {location}: {problem}. The server's process writes them, "
                "which takes longer."
            )
            written += _write_here(backend, location, [rows])
        else:
            written.append(result)
    return written


def _try_to_write(location: str, fetch: Fetch, rows: Sequence[LiveRows]) -> StateFile | OSError:
    """Write a file, or return the error: the server then tries it."""
    try:
        return write_file(location, fetch, rows)
    except OSError as error:
        return error


def _digests(fetch: Fetch, entries: Iterable[_ClientsOfStacks]) -> dict[int, bytes]:
    """Return client -> SHA-256 of its state. One entry's stacks are fetched at a time: all may not fit into memory."""
    digest_of_client: dict[int, bytes] = {}
    for references, slots_by_client in entries:
        stacks = fetch(references)
        parts_by_client = {}
        for client, slots in slots_by_client.items():
            parts_by_client[client] = [stack.state_of(slot) for stack, slot in zip(stacks, slots, strict=True)]
        digest_of_client |= digests((client, merged(parts)) for client, parts in parts_by_client.items())
    return digest_of_client
