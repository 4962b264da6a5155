"""Checkpoints that survive a kill: safetensors, Parquet and JSON in a folder, complete only once its manifest is there.

A checkpoint is a folder ``<location>/<number>-round-<round>`` with ::

    server.safetensors                  the tensors of the server's state
    states-00000.safetensors, ...       the clients' states, as many shards of clients as fit in a file
    meta.json                           everything else
    manifest.json                       size and SHA-256 of every other file, written last

Numbers count up with every save, so no checkpoint overwrites another, even of the same round. The tables are in
``<location>/tables``, in files that several checkpoints share (:mod:`raypfl.storage.tables`); manifests list those too.

States that have not changed are not written again: a file of the checkpoint before of which most bytes still count
becomes one of the new checkpoint too (a hard link, or a copy made by the object store). If several files have a name of
a client, the one of the greatest number counts (:class:`raypfl.storage.states.StateShard`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
import safetensors.numpy
import safetensors.torch
import torch

from raypfl.common import files as disk
from raypfl.common.errors import CheckpointError, NoRun
from raypfl.storage.columns import Columns
from raypfl.storage.states import LiveStack, StateFile, StateShard
from raypfl.storage.tables import RunTable, TablePart, restore_part
from raypfl.storage.tree import decode, encode

FORMAT = 3
TABLES = "tables"
STATES = "states-"
FILE_SIZE = 64 << 20
"""Bytes of client states from which a file is full: what a save and a load hold in memory at a time."""
_MANIFEST = "manifest.json"
_META = "meta.json"
_NAME = re.compile(r"(\d+)-round-\d+")
_DRAFT = ".draft"
_CHUNK = 1 << 22

Copies = Callable[[str], pa.Table | None] | None


@dataclass(frozen=True)
class Snapshot:
    """All that a run needs to continue to the same bits.

    Attributes
    ----------
    round : rounds finished.
    server : nested dicts (keys str or int), lists and tuples of tensors, int, float, str, bool, None. Tensors come back
        on the CPU.
    states : the clients' states, read and written one shard at a time; after `load` it may be iterated more than once.
    files : for `save`: files of the newest checkpoint with further, unchanged states, and the stacks in each.
    tables : name -> table, a name being the beginning of a file name; saving moves the rows that wait into a file.
    meta : what JSON can hold.
    """

    round: int
    server: dict[str, Any]
    states: Iterable[StateShard]
    tables: dict[str, RunTable]
    meta: dict[str, Any]
    files: Sequence[tuple[StateFile, list[LiveStack]]] = ()

    def state_of(self, client: int) -> dict[str, np.ndarray]:
        """What one client keeps, by name, in a loaded snapshot; empty if it keeps nothing."""
        assert isinstance(self.states, StoredShards)
        return self.states.of(client)

    @property
    def states_bytes(self) -> int:
        """Of the files with the clients' states, in a loaded snapshot."""
        assert isinstance(self.states, StoredShards)
        return sum(file.bytes for file in self.states.state_files)


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
        written = _write(files, draft, path, snapshot, permit)
        if local:
            _publish(draft, path, [f"{root}/{name}" for name in _shared(snapshot)])
    except OSError as error:
        raise CheckpointError(
            f"The checkpoint of round {snapshot.round} cannot be written to {location}: {error}. {disk.remedy(error)} "
            f"Or set checkpoint.location to another place; `raypfl resume` continues from the checkpoint before."
        ) from error
    for file, stacks in written:
        for stack in stacks:
            stack.file = file
    # The next save tries again to delete what cannot be deleted now.
    with contextlib.suppress(OSError):
        _prune(files, root, keep)
    return path


def load(
    location: str, warn: Callable[[str], None], whole: bool = True, needed: Collection[str] = (), copies: Copies = None
) -> Snapshot | None:
    """The newest checkpoint that is intact, or None if none was ever completed.

    A table only records what was done, so a file of it that is damaged costs no checkpoint: it is written again from a
    copy of the table, or else its rows are left out.

    Parameters
    ----------
    warn : called with a sentence for each checkpoint that is skipped, and each file of a table that is damaged.
    whole : False: only the files of the server's state must be intact; the others are not read.
    needed : names of tables without which a run cannot continue: a checkpoint that lacks rows of them is damaged.
    copies : name of a table -> a copy of all its rows, or None; without it, nothing is written.

    Raises
    ------
    CheckpointError : if there are checkpoints, but every one of them is damaged, or the location cannot be read.
    """
    files, root, names = _found(location)
    damaged = []
    for name in reversed(names):
        path = f"{root}/{name}"
        try:
            if not _is_complete(files, path):
                warn(f"The checkpoint {path} is skipped: it is unfinished; the run was probably killed while saving.")
                continue
            return _read(files, root, path, whole, warn, needed, copies)
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
    files, root, names = _found(location)
    kept: dict[int, dict[str, Any]] = {}
    with _reading("checkpoints", location):
        for name in names:
            with contextlib.suppress(_Damaged):
                if _is_complete(files, f"{root}/{name}"):
                    snapshot = _read(files, root, f"{root}/{name}", whole=False)
                    kept[snapshot.round] = snapshot.server
    return sorted(kept.items())


def adopt(source: str, round: int, location: str) -> None:
    """Replace all checkpoints of a location by a copy of another location's newest intact one of a round.

    Raises
    ------
    CheckpointError : if there is none, or it cannot be copied.
    """
    theirs, there, _ = _found(source)
    ours, here = resolve(location)
    with _reading("checkpoints", source):
        name = _intact(theirs, there, round)
        if name is None:
            raise NoRun(
                f"{source} has no checkpoint of round {round}; it has {_listed(rounds(source))}. checkpoint.every and "
                "checkpoint.keep say which ones a run keeps."
            )
        if ours.get_file_info(here).type != pafs.FileType.NotFound:
            ours.delete_dir_contents(here)
        ours.create_dir(f"{here}/{TABLES}")
        ours.create_dir(f"{here}/{name}")
        for file in (name, *_manifest(theirs, f"{there}/{name}")["shared"]):
            with contextlib.suppress(FileNotFoundError):  # a table that is lost is told when the checkpoint is loaded
                pafs.copy_files(f"{there}/{file}", f"{here}/{file}", theirs, ours)


def forget(location: str) -> None:
    """Delete all checkpoints of a location, if there are any."""
    files, root = resolve(location)
    if files.get_file_info(root).type != pafs.FileType.NotFound:
        files.delete_dir(root)


def rounds(location: str) -> list[int]:
    """The rounds of which there are complete checkpoints, ascending.

    Raises
    ------
    CheckpointError : if the location cannot be read.
    """
    files, root, names = _found(location)
    with _reading("checkpoints", location):
        return sorted({_round_of(name) for name in names if _is_complete(files, f"{root}/{name}")})


def reached(location: str) -> int:
    """Rounds done at the newest checkpoint; 0 if there is none.

    Raises
    ------
    CheckpointError : if the location cannot be read.
    """
    files, root, names = _found(location)
    with _reading("checkpoints", location):
        done = [name for name in names if _is_complete(files, f"{root}/{name}")]
    return _round_of(done[-1]) if done else 0


def holds(location: str, file: StateFile) -> bool:
    """Whether a file of an earlier checkpoint still exists and has its size.

    Raises
    ------
    CheckpointError : if the location cannot be read.
    """
    files, _ = resolve(location)
    with _reading("checkpoints", location):
        return files.get_file_info(file.path).size == file.bytes


def whole(location: str, table: RunTable) -> pa.Table:
    """All rows of a table whose files are in a location.

    Raises
    ------
    CheckpointError : if they cannot be read.
    """
    files, root = resolve(location)
    with _reading("tables", location):
        return table.load(files, f"{root}/{TABLES}")


def resolve(location: str) -> tuple[pafs.FileSystem, str]:
    """The file system of a location and the path in it."""
    if "://" not in location:
        return pafs.LocalFileSystem(), os.path.abspath(os.path.expanduser(location))
    try:
        files, path = pafs.FileSystem.from_uri(location)
    except (pa.ArrowException, OSError) as error:
        raise CheckpointError(
            f"checkpoint.location is {location!r}, which cannot be opened: {error}. "
            f"Give a folder, or a URI such as s3://bucket/folder or gs://bucket/folder."
        ) from error
    return files, path.rstrip("/")


class _Damaged(Exception):
    """Why a checkpoint cannot be used, as the end of a sentence."""


@dataclass(frozen=True)
class StoredShards:
    """The shards of a checkpoint, read one file at a time when they are iterated."""

    files: pafs.FileSystem
    state_files: tuple[StateFile, ...]

    def __iter__(self) -> Iterator[StateShard]:
        for file in self.state_files:
            yield from self._shards(file)

    def of(self, client: int) -> dict[str, np.ndarray]:
        """What one client keeps, by name; empty if it keeps nothing. Only the first call reads all files."""
        shards = [shard for file in self._owned.get(client, ()) for shard in self._shards(file)]
        state: dict[str, np.ndarray] = {}
        for shard in sorted((shard for shard in shards if client in shard.clients), key=lambda shard: shard.number):
            row = int((shard.clients == client).argmax())
            mine = {name: rows[row] for name, rows in shard.tensors.items()}
            state = mine if shard.complete else state | mine
        return state

    @cached_property
    def _owned(self) -> dict[int, list[StateFile]]:
        """Client -> the files that have something of it."""
        found: dict[int, list[StateFile]] = {}
        for file in self.state_files:
            for client in {client for shard in self._shards(file) for client in shard.clients.tolist()}:
                found.setdefault(client, []).append(file)
        return found

    def _shards(self, file: StateFile) -> list[StateShard]:
        try:
            arrays = safetensors.numpy.load(_bytes(self.files, file.path))
        except (OSError, safetensors.SafetensorError) as error:
            raise CheckpointError(
                f"The client states in {file.path} were intact when the checkpoint was opened, but can no longer be "
                f"read: {error}."
            ) from error
        shards = _from_arrays(arrays)
        file = replace(file, state_bytes=sum(shard.nbytes for shard in shards))
        return [replace(shard, file=file) for shard in shards]


def _write(
    files: pafs.FileSystem, folder: str, final: str, snapshot: Snapshot, permit: Callable[[], None]
) -> list[tuple[StateFile, list[LiveStack]]]:
    """Write a checkpoint into a folder that will be called `final`; returns its files of states and their stacks."""
    files.create_dir(folder, recursive=True)
    written: dict[str, dict[str, Any]] = {}
    state_files: list[tuple[StateFile, list[LiveStack]]] = []

    def put(name: str, content: bytes | pa.Buffer) -> None:
        with files.open_output_stream(f"{folder}/{name}", compression=None) as stream:
            stream.write(content)
        written[name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}

    tensors: dict[str, torch.Tensor] = {}
    server = encode(snapshot.server, tensors)
    put("server.safetensors", safetensors.torch.save(tensors))
    for old, stacks in snapshot.files:
        name = _state_file_name(len(state_files))
        _link(files, old.path, f"{folder}/{name}")
        written[name] = {"bytes": old.bytes, "sha256": old.sha256}
        state_files.append((replace(old, path=f"{final}/{name}"), stacks))
    for shards in _full_files(snapshot.states):
        name = _state_file_name(len(state_files))
        put(name, safetensors.numpy.save(_to_arrays(shards)))
        file = StateFile(f"{final}/{name}", **written[name], state_bytes=sum(shard.nbytes for shard in shards))
        state_files.append((file, [shard.source for shard in shards if shard.source is not None]))
    tables = {
        name: {"kinds": table.waiting.kinds, "parts": [asdict(part) for part in table.parts]}
        for name, table in snapshot.tables.items()
    }
    meta = {"round": snapshot.round, "server": server, "state_files": len(state_files), "tables": tables}
    put(_META, json.dumps({**meta, "meta": snapshot.meta}).encode())
    manifest = {"format": FORMAT, "files": written, "shared": _shared(snapshot)}
    permit()
    put(_MANIFEST, json.dumps(manifest, indent=1).encode())
    return state_files


def _state_file_name(number: int) -> str:
    return f"{STATES}{number:05d}.safetensors"


def _link(files: pafs.FileSystem, old: str, new: str) -> None:
    """Give a file a second path, without sending or writing it again if possible."""
    if isinstance(files, pafs.LocalFileSystem):
        with contextlib.suppress(OSError):  # a file system without hard links
            os.link(old, new)
            return
    files.copy_file(old, new)


def _full_files(shards: Iterable[StateShard]) -> Iterator[list[StateShard]]:
    """The shards in lists that fill a file each; those of one stack are in the same one."""
    full: list[StateShard] = []
    size = 0
    for shard in shards:
        if size >= FILE_SIZE and (shard.source is None or shard.source is not full[-1].source):
            yield full
            full, size = [], 0
        full.append(shard)
        size += shard.nbytes
    if full:
        yield full


def _to_arrays(shards: list[StateShard]) -> dict[str, np.ndarray]:
    arrays = {}
    for i, shard in enumerate(shards):
        arrays[f"{i}/clients"] = shard.clients
        arrays[f"{i}/stack"] = np.array([shard.number, shard.complete])
        arrays |= {f"{i}/state/{name}": np.ascontiguousarray(array) for name, array in shard.tensors.items()}
    return arrays


def _from_arrays(arrays: dict[str, np.ndarray]) -> list[StateShard]:
    shards: dict[int, StateShard] = {}
    for i in sorted({int(key.partition("/")[0]) for key in arrays}):
        number, complete = arrays[f"{i}/stack"].tolist()
        shards[i] = StateShard(arrays[f"{i}/clients"], {}, number, bool(complete))
    for key, array in sorted(arrays.items()):
        number, kind, name = (*key.split("/", 2), "")[:3]
        if kind == "state":
            shards[int(number)].tensors[name] = array
    return list(shards.values())


def _shared(snapshot: Snapshot) -> dict[str, dict[str, Any]]:
    """Files that other checkpoints may list as well -> bytes and sha256; paths from the location."""
    parts = [part for table in snapshot.tables.values() for part in table.parts]
    return {f"{TABLES}/{part.file}": {"bytes": part.bytes, "sha256": part.sha256} for part in parts}


def _publish(draft: str, path: str, shared: Iterable[str]) -> None:
    """Give a local checkpoint its final name once its files are on the disk, so that it survives a power failure."""
    files = [*(entry.path for entry in os.scandir(draft)), *shared]
    for written in [*files, *{os.path.dirname(file) for file in files}]:
        disk.sync(written)
    os.rename(draft, path)
    disk.sync(os.path.dirname(path))


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
    """Delete the tables' files that no checkpoint lists: they were merged into others, or their save failed."""
    listed: set[str] = set()
    for name in _list(files, root):
        with contextlib.suppress(_Damaged):
            listed |= _manifest(files, f"{root}/{name}")["shared"].keys()
    for entry in files.get_file_info(pafs.FileSelector(f"{root}/{TABLES}", allow_not_found=True)):
        if f"{TABLES}/{entry.base_name}" not in listed:
            files.delete_file(entry.path)


@contextlib.contextmanager
def _reading(what: str, location: str) -> Iterator[None]:
    """A context in which a file system's error becomes a sentence."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"The {what} in {location} cannot be read: {error}. Try again when they can.") from error


def _found(location: str) -> tuple[pafs.FileSystem, str, list[str]]:
    """The file system of a location, the path in it, and the names of all checkpoints there, the oldest first."""
    files, root = resolve(location)
    with _reading("checkpoints", location):
        return files, root, sorted(_list(files, root))


def _list(files: pafs.FileSystem, root: str) -> list[str]:
    """Names of all checkpoints in a folder, unfinished ones included."""
    found = files.get_file_info(pafs.FileSelector(root, allow_not_found=True))
    return [
        entry.base_name
        for entry in found
        if entry.type == pafs.FileType.Directory and _NAME.fullmatch(entry.base_name.removesuffix(_DRAFT))
    ]


def _round_of(name: str) -> int:
    return int(name.removesuffix(_DRAFT).rpartition("-")[2])


def _listed(rounds: Sequence[int]) -> str:
    """``those of rounds 2, 4 and 6``."""
    if not rounds:
        return "none"
    *first, last = map(str, rounds)
    return f"those of rounds {', '.join(first)} and {last}" if first else f"that of round {last}"


def _intact(files: pafs.FileSystem, root: str, round: int) -> str | None:
    """The name of the newest intact checkpoint of a round."""
    for name in sorted(_list(files, root), reverse=True):
        if _round_of(name) == round and _is_complete(files, f"{root}/{name}"):
            with contextlib.suppress(_Damaged):
                _verify(files, f"{root}/{name}", whole=True)
                return name
    return None


def _is_complete(files: pafs.FileSystem, path: str) -> bool:
    """Whether the save was completed; the files may have been damaged since."""
    if isinstance(files, pafs.LocalFileSystem):
        return not path.endswith(_DRAFT)
    return files.get_file_info(f"{path}/{_MANIFEST}").type == pafs.FileType.File


def _read(
    files: pafs.FileSystem,
    root: str,
    path: str,
    whole: bool,
    warn: Callable[[str], None] = lambda text: None,
    needed: Collection[str] = (),
    copies: Copies = None,
) -> Snapshot:
    manifest = _verify(files, path, whole)
    try:
        meta = json.loads(_bytes(files, f"{path}/{_META}"))
        tensors = safetensors.torch.load(_bytes(files, f"{path}/server.safetensors"))
        names = map(_state_file_name, range(meta["state_files"]))
        snapshot = Snapshot(
            round=meta["round"],
            server=decode(meta["server"], tensors),
            states=StoredShards(files, tuple(StateFile(f"{path}/{name}", **manifest[name]) for name in names)),
            tables={
                name: RunTable(Columns(table["kinds"]), [TablePart(**part) for part in table["parts"]])
                for name, table in meta["tables"].items()
            },
            meta=meta["meta"],
        )
    except (ValueError, LookupError, TypeError, AttributeError, safetensors.SafetensorError) as error:
        raise _Damaged(f"its {_META} is not what raypfl writes ({type(error).__name__}: {error})") from error
    for name, table in snapshot.tables.items() if whole else ():
        table.parts = tuple(_intact_parts(files, root, name, table, warn, name in needed, copies))
    return snapshot


def _verify(files: pafs.FileSystem, path: str, whole: bool) -> dict[str, dict[str, Any]]:
    """The checkpoint's own files, as in the manifest; raises `_Damaged` unless files are as they were written."""
    manifest = _manifest(files, path)["files"]
    for name, expected in manifest.items():
        if whole or not name.startswith(STATES):
            _refuse_damaged(files, path, name, **expected)
    return manifest


def _refuse_damaged(files: pafs.FileSystem, folder: str, name: str, bytes: int, sha256: str) -> None:
    size = files.get_file_info(f"{folder}/{name}").size
    if size is None:
        raise _Damaged(f"its {name} is missing")
    if size != bytes:
        raise _Damaged(f"its {name} has {size:,} bytes instead of {bytes:,}")
    if _sha256(files, f"{folder}/{name}") != sha256:
        raise _Damaged(f"the content of its {name} has changed since it was written")


def _intact_parts(
    files: pafs.FileSystem,
    root: str,
    name: str,
    table: RunTable,
    warn: Callable[[str], None],
    needed: bool,
    copies: Copies,
) -> Iterator[TablePart]:
    """The parts of a table whose files are as they were written, or can be restored."""
    start = 0
    for part in table.parts:
        try:
            _refuse_damaged(files, root, f"{TABLES}/{part.file}", part.bytes, part.sha256)
            yield part
        except _Damaged as problem:
            copy = copies(name) if copies else None
            if copy is not None and restore_part(files, f"{root}/{TABLES}", part, copy.slice(start, part.rows)):
                warn(f"{part.rows:,} rows of the table {name} were written again from its copy: {problem}.")
                yield part
            elif needed:
                raise
            else:
                warn(f"{part.rows:,} rows of the table {name} are lost, and the run continues without them: {problem}.")
        start += part.rows


def _manifest(files: pafs.FileSystem, path: str) -> dict[str, dict[str, dict[str, Any]]]:
    """``files`` (its own) and ``shared`` -> file name -> bytes and sha256."""
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
