"""Atomic writes, and locks between the processes of a machine."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

from raypfl.common.errors import Unwritable


def write(path: Path, content: str | bytes) -> None:
    """Write a file atomically; see :func:`draft`."""
    with draft(path) as unfinished:
        unfinished.write_bytes(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def draft(path: Path) -> Iterator[Path]:
    """Yield a temporary path as :func:`replacing` does, but raise errors that are written for the user.

    Raises
    ------
    Unwritable : if the file cannot be written; one that existed before is unchanged.
    """
    try:
        with replacing(path) as unfinished:
            yield unfinished
    except OSError as error:
        raise Unwritable(f"{path} cannot be written: {error.strerror or error}. {remedy(error)}") from error


def make_folder(folder: Path) -> None:
    """Make a folder, and those above it, unless they exist.

    Raises
    ------
    Unwritable : if it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Unwritable(f"The folder {folder} cannot be made: {error.strerror}. {remedy(error)}") from error


def append_line(path: Path, line: str) -> None:
    """Add a line to a file, which need not exist; a last line that a kill cut off is ended first."""
    with path.open("ab+") as file:
        text = f"{line}\n"
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                text = f"\n{text}"
        # One write, since other processes may be reading.
        file.write(text.encode())


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to. At the end, the file is flushed to the disk, then renamed to `path`.

    Raises
    ------
    OSError : if the file cannot be written; one that existed before is unchanged.
    """
    # Hidden, so that no listing of the folder shows it; with the suffix, since some writers go by it.
    unfinished = path.with_name(f".{uuid.uuid4().hex}{path.suffix}")
    try:
        yield unfinished
        sync(unfinished)
        unfinished.replace(path)
        sync(path.parent)
    finally:
        unfinished.unlink(missing_ok=True)


_REMEDIES = {
    "Free some space there.": (errno.ENOSPC, errno.EDQUOT),
    "Allow this user to write there.": (errno.EACCES, errno.EPERM),
    "The file system is read-only; write to another one.": (errno.EROFS,),
    "A file or folder of this name is in the way; move it.": (errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY),
    "A folder on its path is missing, or was deleted meanwhile.": (errno.ENOENT, errno.ENOTDIR),
    "Choose a shorter name.": (errno.ENAMETOOLONG,),
}


def remedy(error: OSError) -> str:
    """Return a sentence that says how to mend an error of writing."""
    for sentence, numbers in _REMEDIES.items():
        if error.errno in numbers:
            return sentence
    return "Write to another place, or try again."


def sync(path: str | Path) -> None:
    """Return once a file, or the list of files in a folder, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def locked(path: Path, wait: bool = True) -> Iterator[None]:
    """Hold a lock on `path` that other callers wait for. It ends with its process, however that ends.

    The lock is a file next to `path`, removed afterwards. A file system without locks does not wait.

    Raises
    ------
    OSError : if the lock file cannot be created.
    BlockingIOError : if another caller holds the lock, and this one does not `wait`.
    """
    operation = fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB
    lock = path.with_name(f".{path.name}.lock")
    while True:
        with lock.open("w") as file:
            try:
                fcntl.flock(file, operation)
            except BlockingIOError:
                raise
            except OSError:
                pass  # the file system has no locks
            if not _is_at(file.fileno(), lock):
                continue  # its last holder removed the file, so other processes would not see this lock
            try:
                yield
            finally:
                lock.unlink(missing_ok=True)
            return


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
