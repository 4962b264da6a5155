"""Write checkpoints, and delete the older ones."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs
import safetensors.numpy
import safetensors.torch
import torch

from raypfl.common import files as disk
from raypfl.common.errors import CheckpointError
from raypfl.storage import filesystems
from raypfl.storage.checkpoints.layout import (
    DRAFT,
    FORMAT,
    MANIFEST,
    META,
    SERVER,
    TABLES,
    Damaged,
    checkpoint_names,
    is_complete,
    read_manifest,
    state_file_name,
)
from raypfl.storage.checkpoints.snapshot import Snapshot, arrays_of
from raypfl.storage.states import LiveStack, StateFile, StateShard
from raypfl.storage.tree import encode

FILE_SIZE = 64 << 20
"""Bytes of client states from which a file is full: what a save and a load hold in memory at a time."""


def save(location: str, snapshot: Snapshot, keep: int, permit: Callable[[], None] = lambda: None) -> str:
    """Write a checkpoint, then delete all but the `keep` newest.

    Parameters
    ----------
    location : a local path or any ``pyarrow.fs`` URI of one run, to which one process writes at a time.
    permit : raises a CheckpointError if another process writes there now; called before anything is written, and
        before the checkpoint is complete.

    Returns
    -------
    path of the checkpoint inside the location's file system.

    Raises
    ------
    CheckpointError : if it cannot be written; the older checkpoints are then untouched.
    """
    files, root = filesystems.open_location(location)
    is_local = isinstance(files, pafs.LocalFileSystem)
    permit()
    try:
        numbers = [int(name.partition("-")[0]) for name in checkpoint_names(files, root)]
        path = f"{root}/{1 + max(numbers, default=0):06d}-round-{snapshot.round}"
        # An object store cannot rename: there a checkpoint counts once it has its manifest.
        draft = path + DRAFT if is_local else path

        for name, table in snapshot.tables.items():
            table.flush(files, f"{root}/{TABLES}", name)
        state_files = _write(files, draft, path, snapshot, permit)
        if is_local:
            _publish(draft, path, [f"{root}/{name}" for name in _shared_entries(snapshot)])
    except OSError as error:
        raise CheckpointError(
            f"The checkpoint of round {snapshot.round} cannot be written to {location}: {error}. {disk.remedy(error)} "
            f"Or set checkpoint.location to another place; `raypfl resume` continues from the checkpoint before."
        ) from error

    for file, stacks in state_files:
        for stack in stacks:
            stack.file = file

    # The next save tries again to delete what cannot be deleted now.
    with contextlib.suppress(OSError):
        _prune(files, root, keep)
    return path


def _write(
    files: pafs.FileSystem, folder: str, final: str, snapshot: Snapshot, permit: Callable[[], None]
) -> list[tuple[StateFile, list[LiveStack]]]:
    """Write a checkpoint into a folder that will be called `final`; return its files of states and their stacks."""
    files.create_dir(folder, recursive=True)
    entries: dict[str, dict[str, Any]] = {}
    state_files: list[tuple[StateFile, list[LiveStack]]] = []

    def put(name: str, content: bytes | pa.Buffer) -> None:
        with files.open_output_stream(f"{folder}/{name}", compression=None) as stream:
            stream.write(content)
        entries[name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}

    tensors: dict[str, torch.Tensor] = {}
    server = encode(snapshot.server, tensors)
    put(SERVER, safetensors.torch.save(tensors))

    for unchanged, stacks in snapshot.files:
        name = state_file_name(len(state_files))
        _link(files, unchanged.path, f"{folder}/{name}")
        entries[name] = {"bytes": unchanged.bytes, "sha256": unchanged.sha256}
        state_files.append((replace(unchanged, path=f"{final}/{name}"), stacks))

    for shards in _split_into_files(snapshot.states):
        name = state_file_name(len(state_files))
        put(name, safetensors.numpy.save(arrays_of(shards)))
        file = StateFile(f"{final}/{name}", **entries[name], state_bytes=sum(shard.nbytes for shard in shards))
        state_files.append((file, [shard.source for shard in shards if shard.source is not None]))

    tables = {}
    for name, table in snapshot.tables.items():
        tables[name] = {"kinds": table.waiting.kinds, "parts": [asdict(part) for part in table.parts]}
    meta = {
        "round": snapshot.round,
        "server": server,
        "state_files": len(state_files),
        "tables": tables,
        "meta": snapshot.meta,
    }
    put(META, json.dumps(meta).encode())

    manifest = {"format": FORMAT, "files": entries, "shared": _shared_entries(snapshot)}
    permit()
    put(MANIFEST, json.dumps(manifest, indent=1).encode())
    return state_files


def _split_into_files(shards: Iterable[StateShard]) -> Iterator[list[StateShard]]:
    """Yield the shards in lists that fill a file each; those of one stack are in the same list."""
    file_shards: list[StateShard] = []
    size = 0
    for shard in shards:
        if size >= FILE_SIZE and (shard.source is None or shard.source is not file_shards[-1].source):
            yield file_shards
            file_shards = []
            size = 0

        file_shards.append(shard)
        size += shard.nbytes
    if file_shards:
        yield file_shards


def _shared_entries(snapshot: Snapshot) -> dict[str, dict[str, Any]]:
    """Return files that other checkpoints may list as well -> bytes and sha256; paths start at the location."""
    entries = {}
    for table in snapshot.tables.values():
        for part in table.parts:
            entries[f"{TABLES}/{part.file}"] = {"bytes": part.bytes, "sha256": part.sha256}
    return entries


def _link(files: pafs.FileSystem, source: str, target: str) -> None:
    """Give a file a second path, without sending or writing it again if possible."""
    if isinstance(files, pafs.LocalFileSystem):
        # Some file systems have no hard links.
        with contextlib.suppress(OSError):
            os.link(source, target)
            return
    files.copy_file(source, target)


def _publish(draft: str, path: str, shared: Iterable[str]) -> None:
    """Give a local checkpoint its final name once its files are on the disk, so that it survives a power failure."""
    files = [*(entry.path for entry in os.scandir(draft)), *shared]
    folders = {os.path.dirname(file) for file in files}
    for written in [*files, *folders]:
        disk.sync(written)

    os.rename(draft, path)
    disk.sync(os.path.dirname(path))


def _prune(files: pafs.FileSystem, root: str, keep: int) -> None:
    """Delete unfinished checkpoints, and complete ones except the `keep` newest."""
    num_kept = 0
    for name in sorted(checkpoint_names(files, root), reverse=True):
        if num_kept < max(keep, 1) and is_complete(files, f"{root}/{name}"):
            num_kept += 1
        else:
            files.delete_dir(f"{root}/{name}")
    _prune_tables(files, root)


def _prune_tables(files: pafs.FileSystem, root: str) -> None:
    """Delete the tables' files that no checkpoint lists: they were merged into others, or their save failed."""
    listed: set[str] = set()
    for name in checkpoint_names(files, root):
        with contextlib.suppress(Damaged):
            listed |= read_manifest(files, f"{root}/{name}")["shared"].keys()

    for entry in files.get_file_info(pafs.FileSelector(f"{root}/{TABLES}", allow_not_found=True)):
        if f"{TABLES}/{entry.base_name}" not in listed:
            files.delete_file(entry.path)
