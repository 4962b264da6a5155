"""Read checkpoints: the newest that is intact, the server's state in each, and a run's tables."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs
import safetensors.torch

from raypfl.common.errors import CheckpointError
from raypfl.storage import filesystems
from raypfl.storage.checkpoints.layout import (
    META,
    SERVER,
    TABLES,
    Damaged,
    explain_read_errors,
    find_checkpoints,
    is_complete,
    read_intact,
    read_manifest,
)
from raypfl.storage.checkpoints.snapshot import Snapshot
from raypfl.storage.checkpoints.state_files import StoredStates
from raypfl.storage.columns import Columns
from raypfl.storage.states import StateFile
from raypfl.storage.tables import RunTable, TablePart, restore_part
from raypfl.storage.tree import decode

CopyOfTable = Callable[[str], pa.Table | None]
"""Returns a copy of all rows of a table, given its name; None if there is no copy."""

UseStates = Callable[[StoredStates], None]
"""Takes the clients' states of a checkpoint; raises `Damaged` or an OSError if they cannot be used."""


def load(
    location: str,
    warn: Callable[[str], None],
    whole: bool = True,
    needed: Collection[str] = (),
    copy_of: CopyOfTable | None = None,
    use_states: UseStates = StoredStates.verify,
) -> Snapshot | None:
    """Return the newest checkpoint that is intact, or None if none was ever completed.

    A table only records what was done, so a file of it that is damaged costs no checkpoint: it is written again from a
    copy of the table, or else its rows are left out.

    Parameters
    ----------
    warn : called with a sentence for each checkpoint that is skipped, and each file of a table that is damaged.
    whole : False: only the files of the server's state must be intact; the others are not read.
    needed : names of tables without which a run cannot continue: a checkpoint that lacks rows of them is damaged.
    copy_of : returns the copies from which damaged files of tables are written again; None: none are.
    use_states : called for each checkpoint whose own files are intact; if it raises, an older checkpoint is loaded.

    Raises
    ------
    CheckpointError : if there are checkpoints, but every one of them is damaged, or the location cannot be read.
    """
    files, root, names = find_checkpoints(location)
    problems = []
    for name in reversed(names):
        path = f"{root}/{name}"
        try:
            if not is_complete(files, path):
                warn(f"The checkpoint {path} is skipped: it is unfinished; the run was probably killed while saving.")
                continue
            snapshot = read_checkpoint(location, name)
            if whole:
                use_states(snapshot.states)
                snapshot.held.verify()
                _keep_intact_parts(files, root, snapshot.tables, warn, needed, copy_of)
            return snapshot
        except (OSError, Damaged) as error:
            problems.append(f"{path} ({error})")
            warn(f"The checkpoint {path} is skipped: {error}.")

    if problems:
        raise CheckpointError(
            f"No checkpoint in {location} is intact: {'; '.join(problems)}. "
            f"Restore one of these folders from a copy, or delete them to start from the first round."
        )
    return None


def newest(location: str, whole: bool = True) -> Snapshot:
    """Return the newest checkpoint that is intact; `whole` as in :func:`load`.

    Raises
    ------
    CheckpointError : if there is none, or the location cannot be read.
    """
    snapshot = load(location, lambda text: None, whole)
    if snapshot is None:
        raise CheckpointError(f"There is no checkpoint in {location}.")
    return snapshot


def server_states(location: str) -> list[tuple[int, dict[str, Any]]]:
    """Return the server's state in each intact checkpoint that was kept, by round; see `Snapshot.server`.

    Raises
    ------
    CheckpointError : if the location cannot be read.
    """
    files, root, names = find_checkpoints(location)
    state_of_round: dict[int, dict[str, Any]] = {}
    with explain_read_errors("checkpoints", location):
        for name in names:
            with contextlib.suppress(Damaged):
                if is_complete(files, f"{root}/{name}"):
                    snapshot = read_checkpoint(location, name)
                    state_of_round[snapshot.round] = snapshot.server
    return sorted(state_of_round.items())


def read_table(location: str, table: RunTable) -> pa.Table:
    """Return all rows of a table whose files are in a location.

    Raises
    ------
    CheckpointError : if they cannot be read.
    """
    files, root = filesystems.open_location(location)
    with explain_read_errors("tables", location):
        return table.load(files, f"{root}/{TABLES}")


def read_checkpoint(location: str, name: str) -> Snapshot:
    """Read the checkpoint in the folder `name`, without its files of states and tables, which may be damaged.

    Raises
    ------
    Damaged : if it is not as it was written.
    OSError : if it cannot be read.
    """
    files, root = filesystems.open_location(location)
    path = f"{root}/{name}"
    entries = read_manifest(files, path)["files"]
    contents = {file: read_intact(files, path, file, **entry) for file, entry in entries.items()}
    try:
        meta = json.loads(contents[META])
        tensors = safetensors.torch.load(contents[SERVER])
        return Snapshot(
            round=meta["round"],
            server=decode(meta["server"], tensors),
            states=_stored_states(location, meta["states"]),
            tables={table_name: _table(table) for table_name, table in meta["tables"].items()},
            meta=meta["meta"],
            pending=decode(meta["pending"], tensors),
            held=_stored_states(location, meta["held"]),
        )
    except (ValueError, LookupError, TypeError, AttributeError, safetensors.SafetensorError) as error:
        raise Damaged(f"its {META} is not what raypfl writes ({type(error).__name__}: {error})") from error


def _table(table: Mapping[str, Any]) -> RunTable:
    """Return the table whose columns and files a checkpoint describes."""
    return RunTable(Columns(table["kinds"]), [TablePart(**part) for part in table["parts"]])


def _stored_states(location: str, state_files: Iterable[Mapping[str, Any]]) -> StoredStates:
    """Return the states in the files that a checkpoint describes."""
    return StoredStates(location, tuple(StateFile(**file) for file in state_files))


def _keep_intact_parts(
    files: pafs.FileSystem,
    root: str,
    tables: Mapping[str, RunTable],
    warn: Callable[[str], None],
    needed: Collection[str],
    copy_of: CopyOfTable | None,
) -> None:
    """Leave out of tables the files that are not as they were written, and cannot be restored."""
    for name, table in tables.items():
        table.parts = tuple(_intact_parts(files, root, name, table, warn, name in needed, copy_of))


def _intact_parts(
    files: pafs.FileSystem,
    root: str,
    name: str,
    table: RunTable,
    warn: Callable[[str], None],
    needed: bool,
    copy_of: CopyOfTable | None,
) -> Iterator[TablePart]:
    """Yield the parts of a table whose files are as they were written, or can be restored."""
    first_row = 0
    for part in table.parts:
        try:
            read_intact(files, root, f"{TABLES}/{part.file}", part.bytes, part.sha256)
            yield part
        except Damaged as problem:
            copy = copy_of(name) if copy_of else None
            if copy is not None and restore_part(files, f"{root}/{TABLES}", part, copy.slice(first_row, part.rows)):
                warn(f"{part.rows:,} rows of the table {name} were written again from its copy: {problem}.")
                yield part
            elif needed:
                raise
            else:
                warn(f"{part.rows:,} rows of the table {name} are lost, and the run continues without them: {problem}.")
        first_row += part.rows
