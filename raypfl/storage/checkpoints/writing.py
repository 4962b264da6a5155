"""Write checkpoints, and delete the older ones."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs
import safetensors.torch
import torch

from raypfl.common import files as disk
from raypfl.storage import filesystems
from raypfl.storage.checkpoints.layout import (
    DRAFT,
    FORMAT,
    MANIFEST,
    META,
    SERVER,
    STATES,
    TABLES,
    Damaged,
    checkpoint_names,
    explain_write_errors,
    is_complete,
    read_manifest,
)
from raypfl.storage.checkpoints.snapshot import Snapshot
from raypfl.storage.tree import encode


def save(location: str, snapshot: Snapshot, keep: int, permit: Callable[[], None] = lambda: None) -> str:
    """Write a checkpoint, then delete all but the `keep` newest.

    Parameters
    ----------
    location : a local path or any ``pyarrow.fs`` URI of one run, to which one process writes at a time.
    permit : raises a CheckpointError if another process writes there now; called before anything is written, and
        before the checkpoint is complete.

    Returns
    -------
    the location of the checkpoint.

    Raises
    ------
    CheckpointError : if it cannot be written; the older checkpoints are then untouched.
    """
    files, root = filesystems.open_location(location)
    is_local = isinstance(files, pafs.LocalFileSystem)
    permit()
    with explain_write_errors(snapshot.round, location):
        numbers = [int(name.partition("-")[0]) for name in checkpoint_names(files, root)]
        checkpoint = f"{1 + max(numbers, default=0):06d}-round-{snapshot.round}"
        path = f"{root}/{checkpoint}"
        # An object store cannot rename: there a checkpoint counts once it has its manifest.
        draft = path + DRAFT if is_local else path

        for name, table in snapshot.tables.items():
            table.flush(files, f"{root}/{TABLES}", name)
        _write(files, draft, snapshot, permit)
        if is_local:
            _publish(draft, path, [f"{root}/{name}" for name in _table_entries(snapshot)])

    # The next save tries again to delete what cannot be deleted now.
    with contextlib.suppress(OSError):
        _prune(files, root, keep)
    return filesystems.join(filesystems.absolute(location), checkpoint)


def _write(files: pafs.FileSystem, folder: str, snapshot: Snapshot, permit: Callable[[], None]) -> None:
    """Write a checkpoint's own files into a folder."""
    filesystems.make_folder(files, folder)
    entries: dict[str, dict[str, Any]] = {}

    def put(name: str, content: bytes | pa.Buffer) -> None:
        filesystems.write_bytes(files, f"{folder}/{name}", content)
        entries[name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}

    tensors: dict[str, torch.Tensor] = {}
    server = encode(snapshot.server, tensors)
    pending = encode(snapshot.pending, tensors)
    # Copies: safetensors refuses tensors that share memory, as views of one flat vector do.
    copies = {name: tensor.to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    put(SERVER, safetensors.torch.save(copies))

    tables = {}
    for name, table in snapshot.tables.items():
        tables[name] = {"kinds": table.waiting.kinds, "parts": [asdict(part) for part in table.parts]}
    meta = {
        "round": snapshot.round,
        "server": server,
        "pending": pending,
        "states": [asdict(file) for file in snapshot.states.state_files],
        "held": [asdict(file) for file in snapshot.held.state_files],
        "tables": tables,
        "meta": snapshot.meta,
    }
    put(META, json.dumps(meta).encode())

    shared = _table_entries(snapshot)
    for file in (*snapshot.states.state_files, *snapshot.held.state_files):
        shared[file.path] = {"bytes": file.bytes, "sha256": file.sha256}
    manifest = {"format": FORMAT, "files": entries, "shared": shared}
    permit()
    put(MANIFEST, json.dumps(manifest, indent=1).encode())


def _table_entries(snapshot: Snapshot) -> dict[str, dict[str, Any]]:
    """Return the tables' files -> bytes and sha256; paths start at the location."""
    entries = {}
    for table in snapshot.tables.values():
        for part in table.parts:
            entries[f"{TABLES}/{part.file}"] = {"bytes": part.bytes, "sha256": part.sha256}
    return entries


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
        if num_kept < keep and is_complete(files, f"{root}/{name}"):
            num_kept += 1
        else:
            files.delete_dir(f"{root}/{name}")
    _prune_shared(files, root)


def _prune_shared(files: pafs.FileSystem, root: str) -> None:
    """Delete files of states and tables that no checkpoint lists: others replace them, or their save failed."""
    listed: set[str] = set()
    for name in checkpoint_names(files, root):
        with contextlib.suppress(Damaged):
            listed |= read_manifest(files, f"{root}/{name}")["shared"].keys()

    for folder in (STATES, TABLES):
        for entry in files.get_file_info(pafs.FileSelector(f"{root}/{folder}", allow_not_found=True)):
            if f"{folder}/{entry.base_name}" not in listed:
                files.delete_file(entry.path)
