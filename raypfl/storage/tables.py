"""A run's tables: new rows wait in memory, written ones are in files that never change.

A checkpoint writes the rows since the one before, so memory does not grow with the rounds. Files are merged as in a
binary counter: the rows of n checkpoints are in about log2(n) files, and were written at most as often.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from raypfl.storage.columns import Columns

FULL = 1 << 18
"""Rows above which a file is no longer merged, so that merging takes little memory."""

_TYPES = {
    "int32": pa.int32(),
    "int64": pa.int64(),
    "float64": pa.float64(),
    "float64 or none": pa.float64(),
    "text": pa.string(),
    "int32 list": pa.list_(pa.int32()),
    "bytes": pa.large_binary(),
}


@dataclass(frozen=True)
class Part:
    """Some rows of a table, in a Parquet file that is written once.

    Attributes
    ----------
    file : its name. rows : how many. bytes, sha256 : of its content.
    """

    file: str
    rows: int
    bytes: int
    sha256: str


class Table:
    """A table that grows at its end.

    Parameters
    ----------
    waiting : rows that are not in a file yet; new ones are added here.
    parts : the rows before those, oldest first.
    """

    def __init__(self, waiting: Columns, parts: Iterable[Part] = ()):
        self.waiting = waiting
        self.parts = tuple(parts)

    def flush(self, files: pafs.FileSystem, folder: str, name: str) -> None:
        """Move the waiting rows into a new file in `folder`, merged with the last files if those are not larger.

        Raises
        ------
        OSError : if it cannot be written, or a file to merge is damaged; the table is then unchanged.
        """
        if not len(self.waiting):
            return
        rows, kept = arrow(self.waiting), list(self.parts)
        while kept and kept[-1].rows <= rows.num_rows and kept[-1].rows + rows.num_rows <= FULL:
            rows = pa.concat_tables([_read(files, folder, kept.pop()), rows])
        content = _parquet(rows)
        file = f"{name}-{sum(part.rows for part in kept):09d}-{uuid.uuid4().hex[:8]}.parquet"
        files.create_dir(folder, recursive=True)
        with files.open_output_stream(f"{folder}/{file}", compression=None) as stream:
            stream.write(content)
        self.parts = (*kept, Part(file, rows.num_rows, len(content), hashlib.sha256(content).hexdigest()))
        self.waiting.clear()

    def load(self, files: pafs.FileSystem, folder: str) -> pa.Table:
        """All rows.

        Raises
        ------
        OSError : if a file is missing or damaged.
        """
        return pa.concat_tables([*(_read(files, folder, part) for part in self.parts), arrow(self.waiting)])


def arrow(columns: Columns) -> pa.Table:
    """Columns as an Arrow table."""
    # From buffers, since pyarrow imports pandas for lists and arrays, which takes seconds.
    schema = pa.schema([(name, _TYPES[kind]) for name, kind in columns.kinds.items()])
    return pa.Table.from_arrays([_array(columns, name, kind) for name, kind in columns.kinds.items()], schema=schema)


def restore(files: pafs.FileSystem, folder: str, part: Part, rows: pa.Table) -> bool:
    """Write the file of a part again, if these are its rows; returns whether they are, to the byte."""
    content = _parquet(rows)
    if hashlib.sha256(content).hexdigest() != part.sha256:
        return False
    with files.open_output_stream(f"{folder}/{part.file}", compression=None) as stream:
        stream.write(content)
    return True


def read(path: str) -> pa.Table:
    """The table in a local Parquet file."""
    return pq.ParquetFile(path).read()  # pq.read_table imports pandas


def _array(columns: Columns, name: str, kind: str) -> pa.Array:
    values = columns.values(name)
    if kind == "text":
        return _numbers(pa.int32(), values, _texts(columns.words(name))).dictionary_decode()
    if kind == "int32 list":
        ends = np.concatenate([[0], values]).astype(np.int32)
        items = _numbers(pa.int32(), columns.items(name))
        return pa.Array.from_buffers(_TYPES[kind], len(values), [None, pa.py_buffer(ends)], children=[items])
    if kind == "bytes":
        ends = np.concatenate([[0], values]).astype(np.int64)
        return pa.Array.from_buffers(
            _TYPES[kind], len(values), [None, pa.py_buffer(ends), pa.py_buffer(columns.items(name))]
        )
    if kind == "float64 or none":
        known = np.packbits(~np.isnan(values), bitorder="little")
        return pa.Array.from_buffers(_TYPES[kind], len(values), [pa.py_buffer(known), pa.py_buffer(values)])
    return _numbers(_TYPES[kind], values)


def _numbers(kind: pa.DataType, values: np.ndarray, words: pa.Array | None = None) -> pa.Array:
    buffers = [None, pa.py_buffer(values)]
    if words is None:
        return pa.Array.from_buffers(kind, len(values), buffers)
    return pa.DictionaryArray.from_buffers(pa.dictionary(kind, words.type), len(values), buffers, words)


def _texts(words: list[str]) -> pa.Array:
    encoded = [word.encode() for word in words]
    ends = np.cumsum([0, *map(len, encoded)], dtype=np.int32)
    return pa.Array.from_buffers(pa.string(), len(words), [None, pa.py_buffer(ends), pa.py_buffer(b"".join(encoded))])


def _parquet(rows: pa.Table) -> pa.Buffer:
    sink = pa.BufferOutputStream()
    pq.write_table(rows, sink, compression="zstd")
    return sink.getvalue()


def _read(files: pafs.FileSystem, folder: str, part: Part) -> pa.Table:
    with files.open_input_stream(f"{folder}/{part.file}", compression=None) as stream:
        content = stream.read()
    if hashlib.sha256(content).hexdigest() != part.sha256:
        raise OSError(f"the content of {folder}/{part.file} has changed since it was written")
    return pq.ParquetFile(pa.BufferReader(content)).read()
