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
from raypfl.data.datasets.labels import checked_labels, place
from raypfl.data.datasets.source import DATASETS
from raypfl.data.datasets.tables import ImageTable, ImageTableReader, numbered_classes

# Rows that are read at a time.
_BATCH_ROWS = 256
# Without a buffer, Arrow reads all images of a row group at once, and a file may have only one.
_BUFFER_BYTES = 1 << 20


@DATASETS.register("parquet")
@dataclass(frozen=True, kw_only=True)
class Parquet(ImageTableReader):
    """A folder of Parquet files (data.root) and its subfolders, with an image and a label column.

    The image column holds encoded images in any format that Pillow reads, as binary values or as structs with a field
    ``bytes``; the label column holds integers from 0. Files with the word "test", "val", "valid" or "validation" in
    their path within the folder are the published test split. Class names are taken from the schema where Hugging Face
    put them. A data set of grey images has one channel, whatever they are encoded as.
    """

    label: str = "label"
    files: str = "*.parquet"

    def paths(self) -> list[Path]:
        return self.matching_paths(f"**/{self.files}")

    def tables(self) -> Sequence[_ParquetTable]:
        return [_ParquetTable(path, self.root()) for path in self.paths()]

    def read_labels(self, tables: Sequence[_ParquetTable]) -> tuple[list[np.ndarray], list[str]]:
        for table in tables:
            column_type = table.type("label", self.label)
            if not pa.types.is_integer(column_type):
                raise DataError(
                    f"Column {self.label!r} of {table.file_name} is of type {column_type}; it needs integers, classes "
                    "counted from 0."
                )

        labels = [table.column("label", self.label) for table in tables]
        class_names = tables[0].class_names(self.label)
        if class_names is None:
            return numbered_classes(tables, labels)

        checked = []
        for table, table_labels in zip(tables, labels, strict=True):
            checked.append(checked_labels(table_labels, len(class_names), table.file_name))
        return checked, class_names


class _ParquetTable(ImageTable):
    """A Parquet file that holds images, which are read row by row."""

    def __init__(self, path: Path, root: Path):
        super().__init__(path, root)
        try:
            self.schema = pq.read_schema(path)
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{self.file_name} is not a readable Parquet file: {error}") from error
        self.types = dict(zip(self.schema.names, self.schema.types, strict=True))

    def class_names(self, label: str) -> list[str] | None:
        """Return the label column's class names, where Hugging Face's `datasets` left them in the schema."""
        metadata = self.schema.metadata or {}
        description = json.loads(metadata.get(b"huggingface", b"{}"))
        return description.get("info", {}).get("features", {}).get(label, {}).get("names")

    def values(self, name: str) -> pa.ChunkedArray:
        try:
            return pq.ParquetFile(self.path).read(columns=[name]).column(0)
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"Column {name!r} of {self.file_name} cannot be read: {error}") from error

    def images(self, name: str) -> Iterator[tuple[str, bytes | None]]:
        are_structs = self._images_are_structs(name)
        row = 0
        try:
            file = pq.ParquetFile(self.path, pre_buffer=False, buffer_size=_BUFFER_BYTES)
            for batch in file.iter_batches(_BATCH_ROWS, columns=[name]):
                column = batch.column(0)
                if are_structs:
                    column = pc.struct_field(column, "bytes")
                for image_bytes in column.to_pylist():
                    yield place(row, self.file_name), image_bytes
                    row += 1
        except pa.ArrowMemoryError as error:
            raise DataError(f"There is too little memory to read the images of {self.file_name}: {error}") from error
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{self.file_name} is damaged after row {row}: {error}") from error

    def _images_are_structs(self, name: str) -> bool:
        """Return whether images are structs with a field of bytes, and not bytes themselves."""
        column_type = self.type("image", name)
        if pa.types.is_struct(column_type) and column_type.get_field_index("bytes") >= 0:
            return True
        if pa.types.is_binary(column_type) or pa.types.is_large_binary(column_type):
            return False
        raise DataError(
            f"Column {name!r} of {self.file_name} is of type {column_type}, not encoded images (binary values, or "
            f"structs with a field 'bytes')."
        )
