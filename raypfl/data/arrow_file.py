"""NumPy arrays in an Arrow file: written whole or not at all, checked when opened, and mapped into memory."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from raypfl.common import files
from raypfl.common.errors import DataError, Unwritable


class Unreadable(Exception):
    """Error for a cache file that is missing, cut short, or not what was written."""


class Arrays(NamedTuple):
    """Columns of equal length, and facts about them.

    Attributes
    ----------
    columns : name -> array of numbers, ``[N]`` or ``[N, ...]``.
    about : facts about the columns, of types that JSON has.
    digest : SHA-256 of both, in hexadecimal, the same on every machine.
    """

    columns: Mapping[str, np.ndarray]
    about: dict[str, Any]
    digest: str


def open_or_build(path: Path, build: Callable[[], tuple[Mapping[str, np.ndarray], dict[str, Any]]]) -> Arrays:
    """Open the Arrow file at `path`; build it first if it is missing or, with a warning, if it is damaged.

    If several processes need it built, one builds it and the others wait.

    Parameters
    ----------
    build : function that returns the columns, and the facts about them.
    """
    if path.exists():
        try:
            return open_arrays(path, check=True)
        except Unreadable as error:
            warnings.warn(f"The cache file {path} is damaged and is built again: {error}", stacklevel=3)

    with explain_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    with cache_lock(path):
        # Another process may have built it while this one waited for the lock.
        with suppress(Unreadable):
            return open_arrays(path, check=True)

        columns, about = build()
        with explain_write_errors(path):
            _write(path, columns, about)
    return open_arrays(path, check=False)


def receive_arrays(path: Path, chunks: Iterable[bytes]) -> None:
    """Write the Arrow file that another machine sends in chunks.

    Raises
    ------
    DataError : if it cannot be written, or is not what was sent.
    """
    with explain_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with files.draft(path) as unfinished:
            with unfinished.open("wb") as file:
                file.writelines(chunks)

            # A draft is checked before it gets its name, so that a damaged file is never taken for the data.
            try:
                open_arrays(unfinished, check=True)
            except Unreadable as error:
                raise DataError(f"{path} did not arrive as it was sent: {error}. Try again.") from error


@contextmanager
def cache_lock(path: Path) -> Iterator[None]:
    """While active, be the only process that works on `path` in a cache; see `files.locked`."""
    # Errors of taking the lock are explained; those of the work within it pass unchanged.
    with ExitStack() as stack:
        with explain_write_errors(path):
            stack.enter_context(files.locked(path))
        yield


@contextmanager
def explain_write_errors(path: Path) -> Iterator[None]:
    """While active, turn errors of writing the cache at `path` into a DataError with advice."""
    try:
        yield
    except (OSError, Unwritable) as error:
        raise DataError(
            f"The data cache {path} cannot be written: {error}. Name another folder in data.cache, or in the "
            f"environment variable RAYPFL_CACHE."
        ) from error


def open_arrays(path: Path, check: bool) -> Arrays:
    """Open the arrays in `path`, as read-only views of the memory-mapped file.

    Parameters
    ----------
    check : whether to compare the digest, which reads the whole file.

    Raises
    ------
    Unreadable : if there is no such file, or it is damaged.
    """
    try:
        with pa.memory_map(str(path)) as source:
            batch = pa.ipc.open_file(source).get_batch(0)
        batch.validate()

        columns = {name: _view(batch.column(name)) for name in batch.schema.names}
        metadata = batch.schema.metadata
        arrays = Arrays(columns, json.loads(metadata[b"about"]), metadata[b"digest"].decode())
    except (pa.ArrowException, OSError, LookupError, ValueError, TypeError) as error:
        raise Unreadable(f"{type(error).__name__}: {error}") from error

    if check and _digest(arrays.columns, arrays.about) != arrays.digest:
        raise Unreadable("its contents are not those that were written")
    return arrays


def _write(path: Path, columns: Mapping[str, np.ndarray], about: dict[str, Any]) -> None:
    arrays = [_as_arrow(column) for column in columns.values()]
    metadata = {"about": json.dumps(about), "digest": _digest(columns, about)}
    batch = pa.RecordBatch.from_arrays(arrays, names=list(columns)).replace_schema_metadata(metadata)

    with files.draft(path) as unfinished, pa.ipc.new_file(str(unfinished), batch.schema) as writer:
        writer.write_batch(batch)


def _as_arrow(column: np.ndarray) -> pa.Array:
    return pa.FixedShapeTensorArray.from_numpy_ndarray(column) if column.ndim > 1 else pa.array(column)


def _view(column: pa.Array) -> np.ndarray:
    # Not `to_numpy`, which imports pandas: that would cost every actor a second.
    if isinstance(column, pa.FixedShapeTensorArray):
        return np.from_dlpack(column.storage.flatten()).reshape(len(column), *column.type.shape)
    return np.from_dlpack(column)


def _digest(columns: Mapping[str, np.ndarray], about: dict[str, Any]) -> str:
    content = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for name, column in columns.items():
        content.update(f"{name} {column.dtype.str} {column.shape}".encode())
        content.update(np.ascontiguousarray(column).data)
    return content.hexdigest()
