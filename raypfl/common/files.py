"""Files that are written whole or not at all, and locks between processes of a machine."""

from __future__ import annotations

import contextlib
import fcntl
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

from raypfl.common.errors import Unwritable


def write(path: Path, content: str | bytes) -> None:
    """Write a file, as :func:`draft` does."""
    with draft(path) as unfinished:
        unfinished.write_bytes(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def draft(path: Path) -> Iterator[Path]:
    """Within: where to write the file; it gets its name once it is on the disk, also if the power fails then.

    Raises
    ------
    Unwritable : if it cannot be written. What was there before is then as it was.
    """
    unfinished = path.with_name(f".{uuid.uuid4().hex}{path.suffix}")
    try:
        try:
            yield unfinished
            _sync(unfinished)
            unfinished.replace(path)
            _sync(path.parent)
        finally:
            unfinished.unlink(missing_ok=True)
    except OSError as error:
        raise Unwritable(f"{path} cannot be written: {error.strerror or error}. Is the disk full?") from error


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def alone(path: Path) -> Iterator[None]:
    """Be the only process that works on `path`, as long as all who do say so; others wait.

    The lock is a file beside it, which is removed afterwards. Where the file system knows no locks, nobody waits.

    Raises
    ------
    OSError : if there can be no such file.
    """
    lock = path.with_name(f".{path.name}.lock")
    while True:
        with lock.open("w") as file:
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX)
            if not _lies_at(file.fileno(), lock):
                continue  # whoever held it has removed it, so that it locks nobody out any more
            try:
                yield
            finally:
                lock.unlink(missing_ok=True)
            return


def _lies_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
