"""Files of clients' states: named by their content, never changed, and listed by every checkpoint that needs them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np
import pyarrow.fs as pafs
import safetensors.numpy

from raypfl.common.errors import CheckpointError
from raypfl.common.files import replacing
from raypfl.storage import filesystems
from raypfl.storage.checkpoints.layout import STATES, Damaged, explain_read_errors, read_intact
from raypfl.storage.filesystems import read_bytes
from raypfl.storage.stacks import Fetch
from raypfl.storage.states import LiveRows, LiveStack, StateFile, StateShard, StateTable

FILE_SIZE = 64 << 20
"""Bytes of client states from which a file is full: what a save and a load hold in memory at a time."""

WriteFiles = Callable[[Sequence[Sequence[LiveRows]]], Sequence[StateFile]]
"""Writes a file for each list of rows."""


@dataclass(frozen=True)
class StoredStates:
    """The clients' states of a checkpoint, read one file at a time when they are iterated.

    Attributes
    ----------
    location : a local path or any ``pyarrow.fs`` URI.
    state_files : the files, whose paths begin there.
    """

    location: str
    state_files: tuple[StateFile, ...] = ()

    def __iter__(self) -> Iterator[StateShard]:
        for file in self.state_files:
            yield from self._shards(file)

    def state_of(self, client: int) -> dict[str, np.ndarray]:
        """Return what one client keeps, by name; empty if it keeps nothing.

        Only the first call reads all files. The last file that was read stays in memory, for others of its clients.
        """
        shards = []
        for file in self._files_of_client.get(client, ()):
            shards += [shard for shard in self._shards_once(file) if client in shard.clients]

        state: dict[str, np.ndarray] = {}
        for shard in sorted(shards, key=lambda shard: shard.number):
            row = int((shard.clients == client).argmax())
            part = {name: rows[row].copy() for name, rows in shard.tensors.items()}
            state = part if shard.complete else state | part
        return state

    def verify(self) -> None:
        """Raise `Damaged` unless all files are as they were written."""
        files, root = self._place
        for file in self.state_files:
            read_intact(files, root, file.path, file.bytes, file.sha256)

    def copied_to(self, location: str) -> StoredStates:
        """Copy the files to another location, one at a time.

        Raises
        ------
        CheckpointError : if one is not as it was written.
        OSError : if one cannot be read or written.
        """
        files, root = self._place
        copies = []
        for file in self.state_files:
            try:
                content = read_intact(files, root, file.path, file.bytes, file.sha256)
            except Damaged as error:
                raise CheckpointError(f"The checkpoint in {self.location} is damaged: {error}.") from error
            copies.append(_write_content(location, content, file.state_bytes))
        return StoredStates(location, tuple(copies))

    @cached_property
    def _place(self) -> tuple[pafs.FileSystem, str]:
        return filesystems.open_location(self.location)

    @cached_property
    def _files_of_client(self) -> dict[int, list[StateFile]]:
        """Client -> the files with parts of its state."""
        files_of_client: dict[int, list[StateFile]] = {}
        for file in self.state_files:
            clients = {client for shard in self._shards(file) for client in shard.clients.tolist()}
            for client in clients:
                files_of_client.setdefault(client, []).append(file)
        return files_of_client

    @cached_property
    def _shards_once(self) -> Callable[[StateFile], list[StateShard]]:
        return lru_cache(maxsize=1)(self._shards)

    def _shards(self, file: StateFile) -> list[StateShard]:
        files, root = self._place
        try:
            return _shards_of_file(file, read_bytes(files, f"{root}/{file.path}"))
        except (OSError, safetensors.SafetensorError) as error:
            raise CheckpointError(
                f"The client states in {self.location}/{file.path} were intact when the checkpoint was opened, but can "
                f"no longer be read: {error}."
            ) from error


def save_states(
    location: str, states: StateTable, write: WriteFiles, permit: Callable[[], None] = lambda: None
) -> StoredStates:
    """Write the states that are in no file yet. Stacks whose file still counts for enough are not written again.

    Parameters
    ----------
    write : writes files into the location; see :func:`write_file`.
    permit : as in :func:`raypfl.storage.checkpoints.save`.

    Raises
    ------
    CheckpointError : if the location cannot be read.
    OSError : if a file cannot be written.
    """
    reusable = states.reusable_files()
    sizes = _file_sizes(location) if reusable else {}
    state_files = []
    saved: set[LiveStack] = set()
    for file, stacks in reusable.items():
        if sizes.get(file.path) == file.bytes:
            state_files.append(file)
            saved.update(stacks)

    permit()
    unsaved = list(states.by_file(FILE_SIZE, without=saved))
    new_files = write([[states.live_rows(stack) for stack in stacks] for stacks in unsaved])
    for file, stacks in zip(new_files, unsaved, strict=True):
        for stack in stacks:
            stack.file = file
            stack.filed = frozenset(states.live_names(stack))
    return StoredStates(location, (*state_files, *new_files))


def write_file(location: str, fetch: Fetch, rows: Sequence[LiveRows]) -> StateFile:
    """Write a file with clients' live rows of some stacks."""
    shards: list[StateShard] = []
    for part, stack in zip(rows, fetch([part.stack for part in rows]), strict=True):
        shards += part.shards(stack)
    return write_shards(location, shards)


def has_file(location: str, file: StateFile) -> bool:
    """Return whether a file that was written elsewhere is here, too."""
    files, root = filesystems.open_location(location)
    return files.get_file_info(f"{root}/{file.path}").size == file.bytes


def read_file(location: str, file: StateFile) -> list[StateShard]:
    """Return the shards in a file.

    Raises
    ------
    Damaged : if it is not as it was written.
    OSError : if it cannot be read.
    """
    files, root = filesystems.open_location(location)
    return _shards_of_file(file, read_intact(files, root, file.path, file.bytes, file.sha256))


def write_shards(location: str, shards: Sequence[StateShard]) -> StateFile:
    """Write a file with some shards."""
    content = safetensors.numpy.save(arrays_of(shards))
    return _write_content(location, content, sum(shard.nbytes for shard in shards))


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


def _shards_of_file(file: StateFile, content: bytes) -> list[StateShard]:
    shards = shards_of(safetensors.numpy.load(content))
    return [replace(shard, file=file) for shard in shards]


def _write_content(location: str, content: bytes, state_bytes: int) -> StateFile:
    """Write a file named after the hash of its content, atomically."""
    files, root = filesystems.open_location(location)
    sha256 = hashlib.sha256(content).hexdigest()
    file = StateFile(f"{STATES}/{sha256[:32]}.safetensors", len(content), sha256, state_bytes)
    filesystems.make_folder(files, f"{root}/{STATES}")

    # A checkpoint may list a file of this name already, so replace it atomically. Uploads to object stores are atomic.
    path = f"{root}/{file.path}"
    if isinstance(files, pafs.LocalFileSystem):
        with replacing(Path(path)) as unfinished:
            unfinished.write_bytes(content)
    else:
        filesystems.write_bytes(files, path, content)
    return file


def _file_sizes(location: str) -> dict[str, int]:
    """Return the path of each file of states in a location -> its bytes."""
    files, root = filesystems.open_location(location)
    with explain_read_errors("checkpoints", location):
        entries = files.get_file_info(pafs.FileSelector(f"{root}/{STATES}", allow_not_found=True))
    return {f"{STATES}/{entry.base_name}": entry.size for entry in entries}
