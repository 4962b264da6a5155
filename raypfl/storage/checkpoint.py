"""Checkpoints that survive a kill: safetensors, Parquet and JSON in a folder, complete only once its manifest is there.

A checkpoint is a folder ``<location>/<number>-round-<round>`` with ::

    server.safetensors                  the tensors of the server's state
    states-00000.safetensors, ...       the clients' states, as many shards of clients as fit in a file
    meta.json                           everything else
    manifest.json                       size and SHA-256 of every other file, written last

Numbers count up with every save, so a checkpoint never overwrites another, not even one of the same round. The tables
lie beside the checkpoints, in ``<location>/tables``, in files that several of them share
(:mod:`raypfl.storage.tables`); the manifests list those as well.

States that have not changed are not written again: a file of the checkpoint before of which most bytes still count
becomes one of the new checkpoint too (a hard link; in an object store, a copy made there). Of a name that a client has
in several files, the one of the greatest number counts (:class:`raypfl.storage.states.StateShard`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
import safetensors.numpy
import safetensors.torch
import torch

from raypfl.common.errors import CheckpointError
from raypfl.storage.columns import Columns
from raypfl.storage.states import Lot, Pack, StateShard
from raypfl.storage.tables import Part, Table
from raypfl.storage.tree import decoded, encoded

FORMAT = 3
TABLES = "tables"
STATES = "states-"
PACK = 64 << 20
"""Bytes of client states from which a file is full: what a save and a load hold in memory at a time."""
_MANIFEST = "manifest.json"
_NAME = re.compile(r"(\d+)-round-\d+")
_DRAFT = ".draft"
_CHUNK = 1 << 22


@dataclass(frozen=True)
class Snapshot:
    """All that a run needs to go on to the same bits.

    Attributes
    ----------
    round : rounds finished.
    server : nested dicts (keys str or int), lists and tuples of tensors, int, float, str, bool, None. Tensors come back
        on the CPU.
    states : the clients' states, read and written one shard at a time; after `load` it may be iterated more than once.
    packs : files of the newest checkpoint with further states, before those of `states`; for `save` alone.
    tables : name -> table, a name being the beginning of a file name; saving moves the rows that wait into a file.
    meta : what JSON can hold.
    """

    round: int
    server: dict[str, Any]
    states: Iterable[StateShard]
    tables: dict[str, Table]
    meta: dict[str, Any]
    packs: Sequence[tuple[Pack, list[Lot]]] = ()

    def state_of(self, client: int) -> dict[str, np.ndarray]:
        """What one client kept, by name, in a snapshot that was loaded; empty if it keeps nothing."""
        assert isinstance(self.states, StoredShards)
        return self.states.of(client)

    @property
    def states_bytes(self) -> int:
        """Of the files with the clients' states, in a snapshot that was loaded."""
        assert isinstance(self.states, StoredShards)
        return sum(size for _, size, _ in self.states.packs)


def save(location: str, snapshot: Snapshot, keep: int, permit: Callable[[], None] = lambda: None) -> str:
    """Write a checkpoint, then delete all but the `keep` newest.

    Parameters
    ----------
    location : a local path or any ``pyarrow.fs`` URI; belongs to one run, and one process writes to it at a time.
    permit : raises a CheckpointError if that is another one by now; asked before anything is written, and before the
        checkpoint counts.

    Returns
    -------
    path of the checkpoint inside the location's file system.

    Raises
    ------
    CheckpointError : if it cannot be written; the older checkpoints are then untouched.
    """
    files, root = resolve(location)
    local = isinstance(files, pafs.LocalFileSystem)
    permit()
    try:
        existing = _list(files, root)
        number = 1 + max((int(name.partition("-")[0]) for name in existing), default=0)
        path = f"{root}/{number:06d}-round-{snapshot.round}"
        draft = path + _DRAFT if local else path
        for name, table in snapshot.tables.items():
            table.flush(files, f"{root}/{TABLES}", name)
        written = _write(files, draft, snapshot, permit)
        if local:
            _publish(draft, path, [f"{root}/{name}" for name in _shared(snapshot)])
    except OSError as error:
        raise CheckpointError(
            f"The checkpoint of round {snapshot.round} cannot be written to {location}: {error}. Free some space "
            f"there, or set checkpoint.location to another place; `raypfl resume` goes on from the checkpoint before."
        ) from error
    _remember(path, written)
    # What cannot be deleted now is tried again after the next save: no reason to stop a run.
    with contextlib.suppress(OSError):
        _prune(files, root, keep)
    return path


def load(location: str, warn: Callable[[str], None], whole: bool = True) -> Snapshot | None:
    """The newest checkpoint that is intact, or None if none was ever completed.

    Parameters
    ----------
    warn : is told, in a sentence each, which checkpoints were skipped and why.
    whole : False: of the files, only those of the server's state must be intact; the others are not read.

    Raises
    ------
    CheckpointError : if there are checkpoints, but every one of them is damaged, or the location cannot be read.
    """
    files, root = resolve(location)
    damaged = []
    try:
        names = sorted(_list(files, root), reverse=True)
    except OSError as error:
        raise CheckpointError(f"The checkpoints in {location} cannot be listed: {error}.") from error
    for name in names:
        path = f"{root}/{name}"
        try:
            if not _is_complete(files, path):
                warn(
                    f"The checkpoint {path} is skipped: it was never finished, as if the run had been killed meanwhile."
                )
                continue
            return _read(files, root, path, whole)
        except (OSError, _Damaged) as error:
            damaged.append(f"{path} ({error})")
            warn(f"The checkpoint {path} is skipped: {error}.")
    if damaged:
        raise CheckpointError(
            f"No checkpoint in {location} is intact: {'; '.join(damaged)}. "
            f"Restore one of these folders from a copy, or delete them to start from the first round."
        )
    return None


def newest(location: str, whole: bool = True) -> Snapshot:
    """The newest checkpoint that is intact; `whole` as in :func:`load`.

    Raises
    ------
    CheckpointError : if there is none, or the location cannot be read.
    """
    snapshot = load(location, lambda text: None, whole)
    if snapshot is None:
        raise CheckpointError(f"There is no checkpoint in {location}.")
    return snapshot


def history(location: str) -> list[tuple[int, dict[str, Any]]]:
    """The server's state in each intact checkpoint that was kept, by round, in their order; see `Snapshot.server`.

    Raises
    ------
    CheckpointError : if the location cannot be read.
    """
    files, root = resolve(location)
    kept: dict[int, dict[str, Any]] = {}
    try:
        for name in sorted(_list(files, root)):
            with contextlib.suppress(_Damaged):
                if _is_complete(files, f"{root}/{name}"):
                    snapshot = _read(files, root, f"{root}/{name}", whole=False)
                    kept[snapshot.round] = snapshot.server
    except OSError as error:
        raise CheckpointError(f"The checkpoints in {location} cannot be read: {error}.") from error
    return sorted(kept.items())


def reached(location: str) -> int:
    """Rounds done at the newest checkpoint; 0 if there is none.

    Raises
    ------
    CheckpointError : if the location cannot be read.
    """
    files, root = resolve(location)
    try:
        done = [name for name in _list(files, root) if _is_complete(files, f"{root}/{name}")]
    except OSError as error:
        raise CheckpointError(f"The checkpoints in {location} cannot be listed: {error}.") from error
    return int(max(done).rpartition("-")[2]) if done else 0


def holds(location: str, pack: Pack) -> bool:
    """Whether a file of an earlier checkpoint is still there, and as long as it was."""
    files, _ = resolve(location)
    return files.get_file_info(pack.path).size == pack.bytes


def whole(location: str, table: Table) -> pa.Table:
    """All rows of a table whose files are in a location.

    Raises
    ------
    CheckpointError : if they cannot be read.
    """
    files, root = resolve(location)
    try:
        return table.load(files, f"{root}/{TABLES}")
    except OSError as error:
        raise CheckpointError(f"The tables in {location} cannot be read: {error}.") from error


def resolve(location: str) -> tuple[pafs.FileSystem, str]:
    """The file system of a location and the path in it."""
    if "://" not in location:
        return pafs.LocalFileSystem(), os.path.abspath(os.path.expanduser(location))
    try:
        files, path = pafs.FileSystem.from_uri(location)
    except (pa.ArrowException, OSError) as error:
        raise CheckpointError(
            f"checkpoint.location is {location!r}, which cannot be opened: {error}. "
            f"Expected is a folder, or a URI such as s3://bucket/folder or gs://bucket/folder."
        ) from error
    return files, path.rstrip("/")


class _Damaged(Exception):
    """Why a checkpoint cannot be used, as the end of a sentence."""


@dataclass(frozen=True)
class StoredShards:
    """The shards of a checkpoint, read one file at a time as they are asked for."""

    files: pafs.FileSystem
    packs: tuple[tuple[str, int, str], ...]

    def __iter__(self) -> Iterator[StateShard]:
        for number in range(len(self.packs)):
            yield from self._shards(number)

    def of(self, client: int) -> dict[str, np.ndarray]:
        """What one client kept, by name; empty if it keeps nothing. Only the first question reads all files."""
        shards = [shard for n in self._files.get(client, ()) for shard in self._shards(n) if client in shard.clients]
        state: dict[str, np.ndarray] = {}
        for shard in sorted(shards, key=lambda shard: shard.number):
            row = int((shard.clients == client).argmax())
            mine = {name: rows[row] for name, rows in shard.tensors.items()}
            state = mine if shard.whole else state | mine
        return state

    @cached_property
    def _files(self) -> dict[int, tuple[int, ...]]:
        """Client -> the files that have something of it."""
        found: dict[int, tuple[int, ...]] = {}
        for n in range(len(self.packs)):
            mine = {client for shard in self._shards(n) for client in shard.clients.tolist()}
            found |= {client: (*found.get(client, ()), n) for client in mine}
        return found

    def _shards(self, number: int) -> list[StateShard]:
        path, size, digest = self.packs[number]
        try:
            arrays = safetensors.numpy.load(_bytes(self.files, path))
        except (OSError, safetensors.SafetensorError) as error:
            raise CheckpointError(
                f"The client states in {path} were intact a moment ago and can no longer be read: {error}."
            ) from error
        shards = list(_unpacked(arrays))
        pack = Pack(path, size, digest, sum(shard.held for shard in shards))
        return [replace(shard, pack=pack) for shard in shards]


# ------------------------------------------------------------------------------------------------------------ writing


def _write(
    files: pafs.FileSystem, folder: str, snapshot: Snapshot, permit: Callable[[], None]
) -> list[tuple[Pack, list[Lot]]]:
    """Write a checkpoint's files into a folder; returns its packs of states, and the lots in them."""
    files.create_dir(folder, recursive=True)
    written: dict[str, dict[str, Any]] = {}
    packs: list[tuple[Pack, list[Lot]]] = []

    def put(name: str, content: bytes | pa.Buffer) -> None:
        with files.open_output_stream(f"{folder}/{name}", compression=None) as stream:
            stream.write(content)
        written[name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}

    tensors: dict[str, torch.Tensor] = {}
    server = encoded(snapshot.server, tensors)
    put("server.safetensors", safetensors.torch.save(tensors))
    for old, lots in snapshot.packs:
        name = _pack_name(len(packs))
        _link(files, old.path, f"{folder}/{name}")
        written[name] = {"bytes": old.bytes, "sha256": old.sha256}
        packs.append((replace(old, path=name), lots))
    for shards in _packs(snapshot.states):
        name = _pack_name(len(packs))
        put(name, safetensors.numpy.save(_packed(shards)))
        held = sum(shard.held for shard in shards)
        lots = [shard.lot for shard in shards if shard.lot is not None]
        packs.append((Pack(name, written[name]["bytes"], written[name]["sha256"], held), lots))
    tables = {
        name: {"kinds": table.waiting.kinds, "parts": [asdict(part) for part in table.parts]}
        for name, table in snapshot.tables.items()
    }
    meta = {"round": snapshot.round, "server": server, "packs": len(packs), "tables": tables}
    put("meta.json", json.dumps({**meta, "meta": snapshot.meta}).encode())
    manifest = {"format": FORMAT, "files": written, "shared": _shared(snapshot)}
    permit()
    put(_MANIFEST, json.dumps(manifest, indent=1).encode())
    return packs


def _pack_name(number: int) -> str:
    return f"{STATES}{number:05d}.safetensors"


def _link(files: pafs.FileSystem, old: str, new: str) -> None:
    """Have a file in another place too, without sending or writing it again if that can be."""
    if isinstance(files, pafs.LocalFileSystem):
        with contextlib.suppress(OSError):  # a file system without hard links
            os.link(old, new)
            return
    files.copy_file(old, new)


def _remember(folder: str, packs: list[tuple[Pack, list[Lot]]]) -> None:
    """Tell the lots where they are, so that the next checkpoint need not write them."""
    for pack, lots in packs:
        placed = replace(pack, path=f"{folder}/{pack.path}")
        for lot in lots:
            lot.pack = placed


def _packs(shards: Iterable[StateShard]) -> Iterator[list[StateShard]]:
    """The shards in lists that fill a file each; those of a lot are in the same one."""
    pack: list[StateShard] = []
    size = 0
    for shard in shards:
        if size >= PACK and (shard.lot is None or shard.lot is not pack[-1].lot):
            yield pack
            pack, size = [], 0
        pack.append(shard)
        size += shard.nbytes
    if pack:
        yield pack


def _packed(pack: list[StateShard]) -> dict[str, np.ndarray]:
    arrays = {}
    for i, shard in enumerate(pack):
        arrays[f"{i}/clients"] = shard.clients
        arrays[f"{i}/lot"] = np.array([shard.number, shard.whole])
        arrays |= {f"{i}/state/{name}": np.ascontiguousarray(array) for name, array in shard.tensors.items()}
    return arrays


def _unpacked(arrays: dict[str, np.ndarray]) -> Iterator[StateShard]:
    tensors: dict[int, dict[str, np.ndarray]] = {}
    clients: dict[int, np.ndarray] = {}
    lots: dict[int, np.ndarray] = {}
    for key, array in arrays.items():
        number, kind, name = (*key.split("/", 2), "")[:3]
        if kind == "state":
            tensors.setdefault(int(number), {})[name] = array
        else:
            (clients if kind == "clients" else lots)[int(number)] = array
    for i in sorted(clients):
        number, whole = lots[i].tolist()
        yield StateShard(clients[i], dict(sorted(tensors.get(i, {}).items())), number, bool(whole))


def _shared(snapshot: Snapshot) -> dict[str, dict[str, Any]]:
    """Files that other checkpoints may list as well -> bytes and sha256; paths from the location."""
    parts = [part for table in snapshot.tables.values() for part in table.parts]
    return {f"{TABLES}/{part.file}": {"bytes": part.bytes, "sha256": part.sha256} for part in parts}


def _publish(draft: str, path: str, shared: Iterable[str]) -> None:
    """Give a local checkpoint its final name once it is on the disk, also if the power fails."""
    files = [*(entry.path for entry in os.scandir(draft)), *shared]
    for file in files:
        _fsync(file)
    for folder in {os.path.dirname(file) for file in files}:
        _fsync(folder)
    os.rename(draft, path)
    _fsync(os.path.dirname(path))


def _fsync(path: str) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _prune(files: pafs.FileSystem, root: str, keep: int) -> None:
    """Delete unfinished checkpoints, and complete ones but the `keep` newest."""
    kept = 0
    for name in sorted(_list(files, root), reverse=True):
        if kept < max(keep, 1) and _is_complete(files, f"{root}/{name}"):
            kept += 1
        else:
            files.delete_dir(f"{root}/{name}")
    _prune_tables(files, root)


def _prune_tables(files: pafs.FileSystem, root: str) -> None:
    """Delete the tables' files that no checkpoint lists: merged into others since, or of a save that failed."""
    listed: set[str] = set()
    for name in _list(files, root):
        with contextlib.suppress(_Damaged):
            listed |= _manifest(files, f"{root}/{name}")["shared"].keys()
    for entry in files.get_file_info(pafs.FileSelector(f"{root}/{TABLES}", allow_not_found=True)):
        if f"{TABLES}/{entry.base_name}" not in listed:
            files.delete_file(entry.path)


# ------------------------------------------------------------------------------------------------------------ reading


def _list(files: pafs.FileSystem, root: str) -> list[str]:
    """Names of all checkpoints in a folder, unfinished ones included."""
    found = files.get_file_info(pafs.FileSelector(root, allow_not_found=True))
    return [
        entry.base_name
        for entry in found
        if entry.type == pafs.FileType.Directory and _NAME.fullmatch(entry.base_name.removesuffix(_DRAFT))
    ]


def _is_complete(files: pafs.FileSystem, path: str) -> bool:
    """Whether the save came to its end; what happened to the files since is another question."""
    if isinstance(files, pafs.LocalFileSystem):
        return not path.endswith(_DRAFT)
    return files.get_file_info(f"{path}/{_MANIFEST}").type == pafs.FileType.File


def _read(files: pafs.FileSystem, root: str, path: str, whole: bool) -> Snapshot:
    manifest = _verify(files, root, path, whole)
    meta = json.loads(_bytes(files, f"{path}/meta.json"))
    tensors = safetensors.torch.load(_bytes(files, f"{path}/server.safetensors"))
    return Snapshot(
        round=meta["round"],
        server=decoded(meta["server"], tensors),
        states=StoredShards(files, _stored_packs(path, meta["packs"], manifest)),
        tables={
            name: Table(Columns(table["kinds"]), [Part(**part) for part in table["parts"]])
            for name, table in meta["tables"].items()
        },
        meta=meta["meta"],
    )


def _stored_packs(path: str, count: int, manifest: dict[str, dict[str, Any]]) -> tuple[tuple[str, int, str], ...]:
    entries = [(name, manifest[name]) for name in map(_pack_name, range(count))]
    return tuple((f"{path}/{name}", entry["bytes"], entry["sha256"]) for name, entry in entries)


def _verify(files: pafs.FileSystem, root: str, path: str, whole: bool) -> dict[str, dict[str, Any]]:
    """Raise `_Damaged` unless files are as they were written; returns the checkpoint's own, as :func:`_manifest`."""
    manifest = _manifest(files, path)
    places = [(path, *file) for file in manifest["files"].items() if whole or not file[0].startswith(STATES)]
    places += [(root, *file) for file in manifest["shared"].items() if whole]
    for folder, name, expected in places:
        size = files.get_file_info(f"{folder}/{name}").size
        if size is None:
            raise _Damaged(f"its {name} is missing")
        if size != expected["bytes"]:
            raise _Damaged(f"its {name} has {size:,} bytes instead of {expected['bytes']:,}")
        if _sha256(files, f"{folder}/{name}") != expected["sha256"]:
            raise _Damaged(f"the content of its {name} has changed since it was written")
    return manifest["files"]


def _manifest(files: pafs.FileSystem, path: str) -> dict[str, dict[str, dict[str, Any]]]:
    """``files`` of its own and ``shared`` ones -> file name -> bytes and sha256."""
    try:
        manifest = json.loads(_bytes(files, f"{path}/{_MANIFEST}"))
        if manifest["format"] != FORMAT:
            age = "a newer" if manifest["format"] > FORMAT else "an older"
            raise _Damaged(f"it was written by {age} version of raypfl, which is needed to read it")
        return {
            kind: {name: {"bytes": entry["bytes"], "sha256": entry["sha256"]} for name, entry in manifest[kind].items()}
            for kind in ("files", "shared")
        }
    except FileNotFoundError:
        raise _Damaged(f"its {_MANIFEST} is missing") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise _Damaged(f"its {_MANIFEST} is damaged") from None


def _sha256(files: pafs.FileSystem, path: str) -> str:
    digest = hashlib.sha256()
    with files.open_input_stream(path, compression=None) as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _bytes(files: pafs.FileSystem, path: str) -> bytes:
    with files.open_input_stream(path, compression=None) as stream:
        return stream.read()
