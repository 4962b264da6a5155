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

from raypfl.storage import filesystems
from raypfl.storage.columns import Columns

FULL = 1 << 18
"""Rows up to which files are merged, so that merging takes little memory."""

KEPT = 1 << 11
"""Rows up to which a file stays in memory too: most merges are of such files, which then need not be read."""

_ARROW_TYPES = {
    "int32": pa.int32(),
    "int64": pa.int64(),
    "float64": pa.float64(),
    "float64 or none": pa.float64(),
    "text": pa.string(),
    # Named as in a table that was read from Parquet, so that merged files have the same bytes.
    "int32 list": pa.list_(pa.field("element", pa.int32())),
    "bytes": pa.large_binary(),
}


@dataclass(frozen=True)
class TablePart:
    """Consecutive rows of a table, in a Parquet file that is written once.

    Attributes
    ----------
    file : the file's name.
    rows : the number of rows.
    bytes : the file's size.
    sha256 : the hash of the file's content.
    """

    file: str
    rows: int
    bytes: int
    sha256: str


class RunTable:
    """A table of a run, which grows at its end.

    Parameters
    ----------
    waiting : the rows that are not in a file yet; new ones are added here.
    parts : the files with the rows before those, the oldest first.
    """

    def __init__(self, waiting: Columns, parts: Iterable[TablePart] = ()):
        self.waiting = waiting
        self.parts = tuple(parts)
        self._kept: dict[TablePart, pa.Table] = {}

    def flush(self, files: pafs.FileSystem, folder: str, name: str) -> None:
        """Move the waiting rows into a new file in `folder`, merged with the last files if those are not larger.

        Raises
        ------
        OSError : if it cannot be written, or a file to merge is damaged; the table is then unchanged.
        """
        if not len(self.waiting):
            return

        rows = to_arrow(self.waiting)
        parts = list(self.parts)
        while parts and parts[-1].rows <= rows.num_rows and parts[-1].rows + rows.num_rows <= FULL:
            part = parts.pop()
            earlier = self._kept[part] if part in self._kept else _read_part(files, folder, part)
            rows = pa.concat_tables([earlier, rows])

        content = _to_parquet(rows)
        first_row = sum(part.rows for part in parts)
        file = f"{name}-{first_row:09d}-{uuid.uuid4().hex[:8]}.parquet"
        filesystems.make_folder(files, folder)
        filesystems.write_bytes(files, f"{folder}/{file}", content)

        part = TablePart(file, rows.num_rows, len(content), hashlib.sha256(content).hexdigest())
        self.parts = (*parts, part)
        self.waiting.clear()
        self._kept = {part: table for part, table in self._kept.items() if part in parts}
        if rows.num_rows <= KEPT:
            self._kept[part] = rows.combine_chunks()

    def load(self, files: pafs.FileSystem, folder: str) -> pa.Table:
        """Return all rows.

        Raises
        ------
        OSError : if a file is missing or damaged.
        """
        tables = [_read_part(files, folder, part) for part in self.parts]
        return pa.concat_tables([*tables, to_arrow(self.waiting)])


def to_arrow(columns: Columns) -> pa.Table:
    """Return columns as an Arrow table."""
    # From buffers, since pyarrow imports pandas for lists and arrays, which takes seconds.
    schema = pa.schema([(name, _ARROW_TYPES[kind]) for name, kind in columns.kinds.items()])
    arrays = [_arrow_array(columns, name, kind) for name, kind in columns.kinds.items()]
    return pa.Table.from_arrays(arrays, schema=schema)


def restore_part(files: pafs.FileSystem, folder: str, part: TablePart, rows: pa.Table) -> bool:
    """Write the file of a part again if `rows` give the same bytes; return whether they do."""
    content = _to_parquet(rows)
    if hashlib.sha256(content).hexdigest() != part.sha256:
        return False
    filesystems.write_bytes(files, f"{folder}/{part.file}", content)
    return True


def read_parquet(path: str) -> pa.Table:
    """Return the table in a local Parquet file."""
    # Not pq.read_table, which imports pandas.
    return pq.ParquetFile(path).read()


def _arrow_array(columns: Columns, name: str, kind: str) -> pa.Array:
    values = columns.values(name)
    if kind == "text":
        return _dictionary(values, _text_array(columns.words(name))).dictionary_decode()

    if kind == "int32 list":
        ends = np.concatenate([[0], values]).astype(np.int32)
        items = _number_array(pa.int32(), columns.items(name))
        return pa.Array.from_buffers(_ARROW_TYPES[kind], len(values), [None, pa.py_buffer(ends)], children=[items])

    if kind == "bytes":
        ends = np.concatenate([[0], values]).astype(np.int64)
        buffers = [None, pa.py_buffer(ends), pa.py_buffer(columns.items(name))]
        return pa.Array.from_buffers(_ARROW_TYPES[kind], len(values), buffers)

    if kind == "float64 or none":
        is_valid = np.packbits(~np.isnan(values), bitorder="little")
        buffers = [pa.py_buffer(is_valid), pa.py_buffer(values)]
        return pa.Array.from_buffers(_ARROW_TYPES[kind], len(values), buffers)

    return _number_array(_ARROW_TYPES[kind], values)


def _number_array(arrow_type: pa.DataType, values: np.ndarray) -> pa.Array:
    return pa.Array.from_buffers(arrow_type, len(values), [None, pa.py_buffer(values)])


def _dictionary(codes: np.ndarray, words: pa.Array) -> pa.DictionaryArray:
    arrow_type = pa.dictionary(pa.int32(), words.type)
    return pa.DictionaryArray.from_buffers(arrow_type, len(codes), [None, pa.py_buffer(codes)], words)


def _text_array(texts: list[str]) -> pa.Array:
    encoded = [text.encode() for text in texts]
    ends = np.cumsum([0, *map(len, encoded)], dtype=np.int32)
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(b"".join(encoded))]
    return pa.Array.from_buffers(pa.string(), len(texts), buffers)


def _to_parquet(rows: pa.Table) -> pa.Buffer:
    sink = pa.BufferOutputStream()
    pq.write_table(rows, sink, compression="zstd")
    return sink.getvalue()


def _read_part(files: pafs.FileSystem, folder: str, part: TablePart) -> pa.Table:
    content = filesystems.read_bytes(files, f"{folder}/{part.file}")
    if hashlib.sha256(content).hexdigest() != part.sha256:
        raise OSError(f"the content of {folder}/{part.file} has changed since it was written")
    return pq.ParquetFile(pa.BufferReader(content)).read()
