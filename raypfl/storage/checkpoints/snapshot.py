"""What a checkpoint holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow.fs as pafs
import safetensors.numpy

from raypfl.common.errors import CheckpointError
from raypfl.storage.filesystems import read_bytes
from raypfl.storage.states import LiveStack, StateFile, StateShard
from raypfl.storage.tables import RunTable


@dataclass(frozen=True)
class Snapshot:
    """All that a run needs to continue to the same bits.

    Attributes
    ----------
    round : the number of rounds finished.
    server : nested dicts (keys str or int), lists and tuples of tensors, int, float, str, bool, None. Tensors come back
        on the CPU.
    states : the clients' states, read and written one shard at a time; after `load` it may be iterated more than once.
    tables : name -> table, a name being the beginning of a file name; saving moves the rows that wait into a file.
    meta : anything that JSON can hold.
    files : for `save`: files of the newest checkpoint with further, unchanged states, and the stacks in each.
    """

    round: int
    server: dict[str, Any]
    states: Iterable[StateShard]
    tables: dict[str, RunTable]
    meta: dict[str, Any]
    files: Sequence[tuple[StateFile, list[LiveStack]]] = ()

    def state_of(self, client: int) -> dict[str, np.ndarray]:
        """Return what one client keeps, by name, in a loaded snapshot; empty if it keeps nothing."""
        assert isinstance(self.states, StoredShards)
        return self.states.state_of(client)

    @property
    def states_bytes(self) -> int:
        """Bytes of the files with the clients' states, in a loaded snapshot."""
        assert isinstance(self.states, StoredShards)
        return sum(file.bytes for file in self.states.state_files)


@dataclass(frozen=True)
class StoredShards:
    """The shards of a checkpoint, read one file at a time when they are iterated."""

    files: pafs.FileSystem
    state_files: tuple[StateFile, ...]

    def __iter__(self) -> Iterator[StateShard]:
        for file in self.state_files:
            yield from self._shards(file)

    def state_of(self, client: int) -> dict[str, np.ndarray]:
        """Return what one client keeps, by name; empty if it keeps nothing. Only the first call reads all files."""
        shards = []
        for file in self._files_of_client.get(client, ()):
            shards += [shard for shard in self._shards(file) if client in shard.clients]

        state: dict[str, np.ndarray] = {}
        for shard in sorted(shards, key=lambda shard: shard.number):
            row = int((shard.clients == client).argmax())
            part = {name: rows[row] for name, rows in shard.tensors.items()}
            state = part if shard.complete else state | part
        return state

    @cached_property
    def _files_of_client(self) -> dict[int, list[StateFile]]:
        """Client -> the files that have something of it."""
        files_of_client: dict[int, list[StateFile]] = {}
        for file in self.state_files:
            clients = {client for shard in self._shards(file) for client in shard.clients.tolist()}
            for client in clients:
                files_of_client.setdefault(client, []).append(file)
        return files_of_client

    def _shards(self, file: StateFile) -> list[StateShard]:
        try:
            arrays = safetensors.numpy.load(read_bytes(self.files, file.path))
        except (OSError, safetensors.SafetensorError) as error:
            raise CheckpointError(
                f"The client states in {file.path} were intact when the checkpoint was opened, but can no longer be "
                f"read: {error}."
            ) from error

        shards = shards_of(arrays)
        file = replace(file, state_bytes=sum(shard.nbytes for shard in shards))
        return [replace(shard, file=file) for shard in shards]


def arrays_of(shards: Sequence[StateShard]) -> dict[str, np.ndarray]:
    """Return the arrays of a file with these shards; the inverse of :func:`shards_of`."""
    arrays = {}
    for i, shard in enumerate(shards):
        arrays[f"{i}/clients"] = shard.clients
        arrays[f"{i}/stack"] = np.array([shard.number, shard.complete])
        for name, rows in shard.tensors.items():
            arrays[f"{i}/state/{name}"] = np.ascontiguousarray(rows)
    return arrays


def shards_of(arrays: dict[str, np.ndarray]) -> list[StateShard]:
    """Return the shards in a file with these arrays."""
    shards: dict[int, StateShard] = {}
    for i in sorted({int(key.partition("/")[0]) for key in arrays}):
        number, complete = arrays[f"{i}/stack"].tolist()
        shards[i] = StateShard(arrays[f"{i}/clients"], {}, number, bool(complete))

    for key, array in sorted(arrays.items()):
        number_in_file, _, array_name = key.partition("/")
        if array_name.startswith("state/"):
            shards[int(number_in_file)].tensors[array_name.removeprefix("state/")] = array
    return list(shards.values())
