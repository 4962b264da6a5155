"""The files of a checkpoint: their names, its manifest, and whether they are intact."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterator
from typing import Any

import pyarrow.fs as pafs

from raypfl.common.errors import CheckpointError
from raypfl.common.files import remedy
from raypfl.storage import filesystems
from raypfl.storage.filesystems import read_bytes

FORMAT = 4
"""Version of the format, recorded in the manifest; checkpoints of other versions are refused."""

TABLES = "tables"
STATES = "states"
SERVER = "server.safetensors"
META = "meta.json"
MANIFEST = "manifest.json"

DRAFT = ".draft"
"""Suffix of a local checkpoint's name while it is being written."""

_FOLDER_NAME = re.compile(r"(\d+)-round-\d+")


class Damaged(Exception):
    """Why a checkpoint cannot be used, as the end of a sentence."""


@contextlib.contextmanager
def explain_write_errors(round: int, location: str) -> Iterator[None]:
    """While active, a file system's error becomes a CheckpointError: a round's checkpoint cannot be written."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"The checkpoint of round {round} cannot be written to {location}: {error}. {remedy(error)} Or set "
            "checkpoint.location to another place; `raypfl resume` continues from the checkpoint before."
        ) from error


@contextlib.contextmanager
def explain_read_errors(what: str, location: str) -> Iterator[None]:
    """While active, a file system's error becomes a CheckpointError: `what` in a location cannot be read."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"The {what} in {location} cannot be read: {error}. Try again when they can.") from error


def find_checkpoints(location: str) -> tuple[pafs.FileSystem, str, list[str]]:
    """Return a location's file system, the path in it, and the names of all checkpoints there, the oldest first."""
    files, root = filesystems.open_location(location)
    with explain_read_errors("checkpoints", location):
        return files, root, sorted(checkpoint_names(files, root))


def checkpoint_names(files: pafs.FileSystem, root: str) -> list[str]:
    """Return the names of all checkpoints in a folder, unfinished ones included."""
    names = []
    for entry in files.get_file_info(pafs.FileSelector(root, allow_not_found=True)):
        is_folder = entry.type == pafs.FileType.Directory
        if is_folder and _FOLDER_NAME.fullmatch(entry.base_name.removesuffix(DRAFT)):
            names.append(entry.base_name)
    return names


def round_of(name: str) -> int:
    """Return the round of a checkpoint from its folder's name."""
    return int(name.removesuffix(DRAFT).rpartition("-")[2])


def is_complete(files: pafs.FileSystem, path: str) -> bool:
    """Return whether the save was completed; the files may have been damaged since."""
    if isinstance(files, pafs.LocalFileSystem):
        return not path.endswith(DRAFT)
    return files.get_file_info(f"{path}/{MANIFEST}").type == pafs.FileType.File


def read_manifest(files: pafs.FileSystem, path: str) -> dict[str, dict[str, dict[str, Any]]]:
    """Return ``files`` (the checkpoint's own) and ``shared`` (states and tables) -> file name -> bytes and sha256.

    Raises
    ------
    Damaged : if the manifest is missing or damaged, or of another version of raypfl.
    """
    try:
        manifest = json.loads(read_bytes(files, f"{path}/{MANIFEST}"))
        if manifest["format"] != FORMAT:
            age = "a newer" if manifest["format"] > FORMAT else "an older"
            raise Damaged(f"it was written by {age} version of raypfl, which is needed to read it")
        return {kind: _entries(manifest[kind]) for kind in ("files", "shared")}
    except FileNotFoundError:
        raise Damaged(f"its {MANIFEST} is missing") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise Damaged(f"its {MANIFEST} is damaged") from None


def read_intact(files: pafs.FileSystem, folder: str, name: str, bytes: int, sha256: str) -> bytes:
    """Return the content of a file; raises `Damaged` unless it has this size and hash."""
    try:
        content = read_bytes(files, f"{folder}/{name}")
    except FileNotFoundError:
        raise Damaged(f"its {name} is missing") from None
    if len(content) != bytes:
        raise Damaged(f"its {name} has {len(content):,} bytes instead of {bytes:,}")
    if hashlib.sha256(content).hexdigest() != sha256:
        raise Damaged(f"the content of its {name} has changed since it was written")
    return content


def _entries(entry_of_file: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: {"bytes": entry["bytes"], "sha256": entry["sha256"]} for name, entry in entry_of_file.items()}
