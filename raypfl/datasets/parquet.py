"""Images and labels from a folder of Parquet files, the layout in which published data sets often come."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from raypfl.common.errors import ConfigError, DataError, did_you_mean
from raypfl.datasets.base import DATASETS, DataConfig, RawData, reads
from raypfl.datasets.images import decoded

_ROWS = 256  # read at a time
# Without a buffer, Arrow reads all images of a row group at once, which may be all there are.
_BUFFER = 1 << 20


def _files(config: DataConfig) -> list[Path]:
    root = config.folder("the data set's Parquet files")
    found = sorted(root.rglob(config.files or "*.parquet"))
    if not found:
        raise DataError(f"There is no {config.files or '.parquet file'} in the folder {root}, which data.root names.")
    return found


@DATASETS.register("parquet")
@reads(_files)
def parquet(config: DataConfig) -> RawData:
    """A folder of Parquet files (data.root) with an image and a label column, of images of one shape.

    The image column holds encoded images in any format that Pillow reads, as binary values or as structs with a field
    ``bytes``; the label column holds integers from 0. Files with the word "test" or "validation" in their path within
    the folder are the published test split. Class names are taken from the schema where Hugging Face put them. Column
    data.group holds writers or the like. A data set of grey images has one channel, whatever they are encoded as.

    Raises
    ------
    ConfigError : if there is no such folder or column.
    DataError : if there is no file, or an image or label is missing, damaged or odd; the message names file and row,
        counted from 0.
    """
    if isinstance(config.label, tuple):
        raise ConfigError(f"data.label is {list(config.label)}, but Parquet files are read with one label column.")
    root = config.folder("the data set's Parquet files")
    tables = [_Table(path, path.relative_to(root), config) for path in _files(config)]
    names = tables[0].class_names()
    labels = [table.labels(len(names) if names else None) for table in tables]
    merged = np.concatenate(labels)
    test_mask = np.concatenate([np.full(len(part), table.is_test) for part, table in zip(labels, tables, strict=True)])
    return RawData(
        inputs=decoded((image for table in tables for image in table.images()), config),
        labels=merged,
        class_names=names or [str(label) for label in range(int(merged.max(initial=-1)) + 1)],
        test_mask=test_mask if test_mask.any() else None,
        groups=np.concatenate([table.groups() for table in tables]) if config.group else None,
    )


class _Table:
    """One Parquet file: its labels at once, its images row by row."""

    def __init__(self, path: Path, shown: Path, config: DataConfig):
        self.path, self.shown, self.config = path, shown, config
        self.is_test = not {"test", "validation"}.isdisjoint(re.split(r"[^a-z]+", str(shown).lower()))
        try:
            self.schema = pq.read_schema(path)
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{shown} is not a readable Parquet file: {error}") from error

    def class_names(self) -> list[str] | None:
        """The label column's class names, where Hugging Face's `datasets` left them in the schema."""
        described = json.loads((self.schema.metadata or {}).get(b"huggingface", b"{}"))
        return described.get("info", {}).get("features", {}).get(self.config.label, {}).get("names")

    def labels(self, num_classes: int | None) -> np.ndarray:
        """All labels: ``int64[n]``."""
        if not pa.types.is_integer(self._column_type("label")):
            raise DataError(
                f"Column {self.config.label!r} of {self.shown} is of type {self._column_type('label')}, not integers."
            )
        column = self._read(str(self.config.label))
        missing = column.is_null().to_numpy()
        if missing.any():
            raise DataError(f"{self._row(missing)} has no label.")
        labels = column.to_numpy().astype(np.int64)
        if (labels < 0).any():
            raise DataError(f"{self._row(labels < 0)} has a negative label; unlabelled samples cannot be used.")
        if num_classes is not None and (labels >= num_classes).any():
            raise DataError(f"{self._row(labels >= num_classes)} has a label beyond the {num_classes} class names.")
        return labels

    def groups(self) -> np.ndarray:
        """The domain, writer or the like of each row: ``[n]`` of integers or text."""
        self._column_type("group")
        column = self._read(str(self.config.group))
        missing = column.is_null().to_numpy()
        if missing.any():
            raise DataError(f"{self._row(missing)} has no {self.config.group!r}.")
        return np.asarray(column.to_pylist())

    def images(self) -> Iterator[tuple[str, bytes | None]]:
        """Where each image stands, for messages, and its bytes."""
        as_struct = self._images_are_structs()
        row = 0
        try:
            file = pq.ParquetFile(self.path, pre_buffer=False, buffer_size=_BUFFER)
            for batch in file.iter_batches(_ROWS, columns=[self.config.image]):
                column = pc.struct_field(batch.column(0), "bytes") if as_struct else batch.column(0)
                for encoded in column.to_pylist():
                    yield f"Row {row} of {self.shown}", encoded
                    row += 1
        except pa.ArrowMemoryError as error:
            raise DataError(f"There is too little memory to read the images of {self.shown}: {error}") from error
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{self.shown} is damaged after row {row}: {error}") from error

    def _images_are_structs(self) -> bool:
        kind = self._column_type("image")
        if pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
            return True
        if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
            return False
        raise DataError(
            f"Column {self.config.image!r} of {self.shown} is of type {kind}, not encoded images (binary values, or "
            f"structs with a field 'bytes')."
        )

    def _column_type(self, role: str) -> pa.DataType:
        name = getattr(self.config, role)
        if name not in self.schema.names:
            raise ConfigError(
                f"data.{role} is {name!r}, but {self.shown} has no such column; {did_you_mean(name, self.schema.names)}"
            )
        return self.schema.field(name).type

    def _read(self, name: str) -> pa.ChunkedArray:
        try:
            return pq.ParquetFile(self.path).read(columns=[name]).column(0)
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"Column {name!r} of {self.shown} cannot be read: {error}") from error

    def _row(self, where: np.ndarray) -> str:
        return f"Row {np.flatnonzero(where)[0]} of {self.shown}"
