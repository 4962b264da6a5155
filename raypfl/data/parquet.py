"""Images and labels from a folder of Parquet files, the layout in which published data sets often come."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from PIL import Image

from raypfl.data.datasets import DATASETS, DataConfig, RawData
from raypfl.errors import ConfigError, DataError, did_you_mean

# Images in memory at a time. One thread decodes them: small ones take longer with several, which wait for each other at
# every call into Python.
_BLOCK = 1024
_GREY_MODES = ("1", "L", "LA")
_WIDE_MODES = ("I", "F")


@DATASETS.register("parquet")
def parquet(config: DataConfig) -> RawData:
    """A folder of Parquet files (data.root) with an image and a label column, of images of one shape.

    The image column holds encoded images in any format that Pillow reads, as binary values or as structs with a field
    ``bytes``; the label column holds integers from 0. Files with the word "test" or "validation" in their path within
    the folder are the published test split. Class names are taken from the schema where Hugging Face put them. A data
    set of grey images has one channel, whatever they are encoded as.

    Raises
    ------
    ConfigError : if there is no such folder or column.
    DataError : if an image or label is missing, damaged or odd; the message names file and row, counted from 0.
    """
    root = _root(config)
    files = sorted(root.rglob("*.parquet"))
    if not files:
        raise DataError(f"There is no .parquet file in the folder {root}, which data.root names.")
    tables = [_Table(path, path.relative_to(root), config) for path in files]
    names = tables[0].class_names()
    labels = [table.labels(len(names) if names else None) for table in tables]
    merged = np.concatenate(labels)
    test_mask = np.concatenate([np.full(len(part), table.is_test) for part, table in zip(labels, tables, strict=True)])
    return RawData(
        inputs=_blocks(tables),
        labels=merged,
        class_names=names or [str(label) for label in range(int(merged.max(initial=-1)) + 1)],
        test_mask=test_mask if test_mask.any() else None,
    )


def _root(config: DataConfig) -> Path:
    if config.root is None:
        raise ConfigError("data.root is missing: name the folder that holds the Parquet files of the data set.")
    root = Path(config.root).expanduser()
    if not root.is_dir():
        raise ConfigError(
            f"data.root is {config.root!r}, but there is no such folder; download the data set's Parquet files, which "
            f"raypfl does not do for you, and name their folder."
        )
    return root


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
        column = self._read_labels()
        missing = column.is_null().to_numpy()
        if missing.any():
            raise DataError(f"{self._row(missing)} has no label.")
        labels = column.to_numpy().astype(np.int64)
        if (labels < 0).any():
            raise DataError(f"{self._row(labels < 0)} has a negative label; unlabelled samples cannot be used.")
        if num_classes is not None and (labels >= num_classes).any():
            raise DataError(f"{self._row(labels >= num_classes)} has a label beyond the {num_classes} class names.")
        return labels

    def images(self) -> Iterator[tuple[str, np.ndarray]]:
        """Where each image stands, for messages, and the image: ``uint8[C, H, W]``."""
        as_struct = self._images_are_structs()
        row = 0
        try:
            for batch in pq.ParquetFile(self.path, pre_buffer=False).iter_batches(_BLOCK, columns=[self.config.image]):
                column = pc.struct_field(batch.column(0), "bytes") if as_struct else batch.column(0)
                for encoded in column.to_pylist():
                    place = f"Row {row} of {self.shown}"
                    yield place, _decode(encoded, place)
                    row += 1
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

    def _read_labels(self) -> pa.ChunkedArray:
        try:
            return pq.ParquetFile(self.path).read(columns=[self.config.label]).column(0)
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"The labels in {self.shown} cannot be read: {error}") from error

    def _row(self, where: np.ndarray) -> str:
        return f"Row {np.flatnonzero(where)[0]} of {self.shown}"


def _blocks(tables: list[_Table]) -> Iterator[np.ndarray]:
    """All images of all files, as blocks ``uint8[n, C, H, W]``."""
    first: tuple[str, np.ndarray] | None = None
    block: list[np.ndarray] = []
    for place, image in chain.from_iterable(table.images() for table in tables):
        first = first or (place, image)
        if image.shape != first[1].shape:
            raise DataError(
                f"{place} holds an image of {_shape(image)}, but {first[0]} one of {_shape(first[1])}; "
                f"all must have one shape."
            )
        block.append(image)
        if len(block) == _BLOCK:
            yield np.stack(block)
            block.clear()
    if block:
        yield np.stack(block)


def _decode(encoded: bytes | None, place: str) -> np.ndarray:
    """The pixels of an encoded image: ``uint8[C, H, W]``, C being 1 for grey images and 3 for all others."""
    if not encoded:
        raise DataError(f"{place} has no image bytes.")
    try:
        with Image.open(io.BytesIO(encoded)) as image:
            if image.mode.startswith(_WIDE_MODES):
                raise DataError(f"{place} holds an image of Pillow mode {image.mode}; 8 bits a channel are needed.")
            pixels = np.asarray(image.convert("L" if image.mode in _GREY_MODES else "RGB"))
    except DataError:
        raise
    except Exception as error:  # a format's parser may raise anything on damaged bytes
        raise DataError(f"{place} holds a damaged image: {error}") from error
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def _shape(image: np.ndarray) -> str:
    channels, height, width = image.shape
    return f"{channels} x {height} x {width} (channels, height, width)"
