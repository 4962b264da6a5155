"""Images and labels from a folder of Parquet files, the layout in which published data sets often come."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from raypfl.common.errors import DataError
from raypfl.data.datasets.labels import checked_labels
from raypfl.data.datasets.source import DATASETS
from raypfl.data.datasets.tables import ImageTable, ImageTableReader, numbered

_ROWS = 256  # read at a time
# Without a buffer, Arrow reads all images of a row group at once, and a file may have only one.
_BUFFER = 1 << 20


@DATASETS.register("parquet")
@dataclass(frozen=True, kw_only=True)
class Parquet(ImageTableReader):
    """A folder of Parquet files (data.root) and its subfolders, with an image and a label column.

    The image column holds encoded images in any format that Pillow reads, as binary values or as structs with a field
    ``bytes``; the label column holds integers from 0. Files with the word "test" or "validation" in their path within
    the folder are the published test split. Class names are taken from the schema where Hugging Face put them. A data
    set of grey images has one channel, whatever they are encoded as.
    """

    label: str = "label"
    files: str = "*.parquet"

    def paths(self) -> list[Path]:
        return self.found(f"**/{self.files}")

    def tables(self) -> Sequence[_ParquetFile]:
        return [_ParquetFile(path, self.root(), {"test", "validation"}) for path in self.paths()]

    def labelled(self, tables: Sequence[_ParquetFile]) -> tuple[list[np.ndarray], list[str]]:
        for table in tables:
            if not pa.types.is_integer(kind := table.type("label", self.label)):
                raise DataError(f"Column {self.label!r} of {table.shown} is of type {kind}, not integers.")
        labels = [table.column("label", self.label) for table in tables]
        names = tables[0].class_names(self.label)
        if names is None:
            return numbered(tables, labels)
        parts = zip(tables, labels, strict=True)
        return [checked_labels(part, len(names), table.shown) for table, part in parts], names


class _ParquetFile(ImageTable):
    """One Parquet file; its images are read row by row."""

    def __init__(self, path: Path, root: Path, test_words: set[str]):
        super().__init__(path, root, test_words)
        try:
            self.schema = pq.read_schema(path)
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{self.shown} is not a readable Parquet file: {error}") from error
        self.types = dict(zip(self.schema.names, self.schema.types, strict=True))

    def class_names(self, label: str) -> list[str] | None:
        """The label column's class names, where Hugging Face's `datasets` left them in the schema."""
        described = json.loads((self.schema.metadata or {}).get(b"huggingface", b"{}"))
        return described.get("info", {}).get("features", {}).get(label, {}).get("names")

    def values(self, name: str) -> pa.ChunkedArray:
        try:
            return pq.ParquetFile(self.path).read(columns=[name]).column(0)
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"Column {name!r} of {self.shown} cannot be read: {error}") from error

    def images(self, name: str) -> Iterator[tuple[str, bytes | None]]:
        as_struct = self._images_are_structs(name)
        row = 0
        try:
            file = pq.ParquetFile(self.path, pre_buffer=False, buffer_size=_BUFFER)
            for batch in file.iter_batches(_ROWS, columns=[name]):
                column = pc.struct_field(batch.column(0), "bytes") if as_struct else batch.column(0)
                for encoded in column.to_pylist():
                    yield f"Row {row} of {self.shown}", encoded
                    row += 1
        except pa.ArrowMemoryError as error:
            raise DataError(f"There is too little memory to read the images of {self.shown}: {error}") from error
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{self.shown} is damaged after row {row}: {error}") from error

    def _images_are_structs(self, name: str) -> bool:
        kind = self.type("image", name)
        if pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
            return True
        if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
            return False
        raise DataError(
            f"Column {name!r} of {self.shown} is of type {kind}, not encoded images (binary values, or structs with a "
            f"field 'bytes')."
        )
