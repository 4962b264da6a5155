"""The checkpoints that a location has: of which rounds, copied to another location, or deleted."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import pyarrow.fs as pafs

from raypfl.common.counting import series
from raypfl.common.errors import NoRun
from raypfl.storage import filesystems
from raypfl.storage.checkpoints.layout import (
    STATES,
    TABLES,
    Damaged,
    explain_read_errors,
    explain_write_errors,
    find_checkpoints,
    is_complete,
    read_manifest,
    round_of,
)
from raypfl.storage.checkpoints.reading import read_checkpoint


def rounds(location: str) -> list[int]:
    """Return the rounds of which there are complete checkpoints, ascending.

    Raises
    ------
    CheckpointError : if the location cannot be read.
    """
    files, root, names = find_checkpoints(location)
    with explain_read_errors("checkpoints", location):
        return sorted({round_of(name) for name in names if is_complete(files, f"{root}/{name}")})


def last_round(location: str) -> int:
    """Return the number of rounds done at the newest checkpoint; 0 if there is none.

    Raises
    ------
    CheckpointError : if the location cannot be read.
    """
    files, root, names = find_checkpoints(location)
    with explain_read_errors("checkpoints", location):
        complete = [name for name in names if is_complete(files, f"{root}/{name}")]
    return round_of(complete[-1]) if complete else 0


def copy_round(source: str, round: int, location: str) -> None:
    """Replace all checkpoints of a location by a copy of the newest intact one that `source` has of a round.

    Raises
    ------
    NoRun : if there is none.
    CheckpointError : if a location cannot be read, or the checkpoint cannot be copied.
    """
    source_files, source_root = filesystems.open_location(source)
    with explain_read_errors("checkpoints", source):
        name = _newest_intact(source, round)
        if name is None:
            raise NoRun(
                f"{source} has no checkpoint of round {round}; it has {_list_rounds(rounds(source))}. checkpoint.every "
                "and checkpoint.keep say which ones a run keeps."
            )
        shared = read_manifest(source_files, f"{source_root}/{name}")["shared"]

    files, root = filesystems.open_location(location)
    with explain_write_errors(round, location):
        if files.get_file_info(root).type != pafs.FileType.NotFound:
            files.delete_dir_contents(root)
        for folder in (STATES, TABLES, name):
            filesystems.make_folder(files, f"{root}/{folder}")

        # The checkpoint's own folder comes last: it needs the others.
        for path in (*shared, name):
            # A table's file that is missing is reported when the checkpoint is loaded.
            with contextlib.suppress(FileNotFoundError):
                pafs.copy_files(f"{source_root}/{path}", f"{root}/{path}", source_files, files)


def delete_all(location: str) -> None:
    """Delete all checkpoints of a location, if there are any."""
    files, root = filesystems.open_location(location)
    if files.get_file_info(root).type != pafs.FileType.NotFound:
        files.delete_dir(root)


def _newest_intact(location: str, round: int) -> str | None:
    """Return the name of the newest intact checkpoint of a round."""
    files, root, names = find_checkpoints(location)
    for name in reversed(names):
        if round_of(name) == round and is_complete(files, f"{root}/{name}"):
            with contextlib.suppress(Damaged):
                snapshot = read_checkpoint(location, name)
                snapshot.states.verify()
                snapshot.held.verify()
                return name
    return None


def _list_rounds(rounds: Sequence[int]) -> str:
    """Return ``those of rounds 2, 4 and 6``."""
    if not rounds:
        return "none"
    if len(rounds) == 1:
        return f"that of round {rounds[0]}"
    return f"those of rounds {series(map(str, rounds))}"
