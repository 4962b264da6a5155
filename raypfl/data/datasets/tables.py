"""What readers of tables share: columns, the test split, and options of those that hold or list images."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv

from raypfl.common.errors import ConfigError, DataError, listed, nearest
from raypfl.data.datasets.csv_lines import refuse_other_encodings, refuse_other_separators, separator_of
from raypfl.data.datasets.images import ImageReader
from raypfl.data.datasets.labels import and_others, class_count, place
from raypfl.data.datasets.raw_data import RawData

TEST_WORDS = {"test", "valid", "val", "validation"}
"""Words in the name of a file or folder whose samples are the published test split."""


def is_test_file(file_name: str) -> bool:
    """Return whether a file's name, or its path in the data set's folder, has one of `TEST_WORDS`."""
    return not TEST_WORDS.isdisjoint(re.split(r"[^a-z]+", file_name.lower()))


def read_csv(path: Path, file_name: str, as_text: Sequence[str] = ()) -> pa.Table:
    """Read a CSV or TSV file, compressed or not. The type of a column is one that all its values have.

    Parameters
    ----------
    as_text : columns of which the text is returned as it is written, without missing values.

    Raises
    ------
    DataError : if it cannot be read; the message calls it `file_name`.
    """
    invalid_rows: list[pa_csv.InvalidRow] = []

    def note_invalid_row(row: pa_csv.InvalidRow) -> str:
        invalid_rows.append(row)
        return "skip"

    try:
        # Arrow chooses types by the first block, so make the whole file one block. With threads, it would not know the
        # numbers of invalid rows.
        content = pa.input_stream(path).read()
        block_size = min(len(content) + 1, 2**31 - 1)
        table = pa_csv.read_csv(
            pa.BufferReader(content),
            read_options=pa_csv.ReadOptions(use_threads=False, block_size=block_size),
            parse_options=pa_csv.ParseOptions(delimiter=separator_of(path.name), invalid_row_handler=note_invalid_row),
            convert_options=pa_csv.ConvertOptions(
                strings_can_be_null=not as_text, column_types=dict.fromkeys(as_text, pa.string())
            ),
        )
    except OSError as error:
        raise DataError(f"{path} is not a readable CSV file: {error}") from error
    except pa.ArrowException as error:
        refuse_other_encodings(path, file_name)
        refuse_other_separators(path, file_name)
        raise DataError(f"{path} is not a readable CSV file: {error}") from error

    # The file is read again only to say where it is not UTF-8. In a wrong encoding, rows may seem to have few columns.
    if invalid_rows or not _is_utf8(table):
        refuse_other_encodings(path, file_name)
    if invalid_rows or len(table.column_names) == 1:
        refuse_other_separators(path, file_name)
    if invalid_rows:
        raise DataError(_unequal_rows(invalid_rows, path, file_name))
    return table


def _unequal_rows(invalid_rows: Sequence[pa_csv.InvalidRow], path: Path, file_name: str) -> str:
    # Arrow counts rows from 1, the header included.
    rows = [row.number - 2 for row in invalid_rows]
    other_places = and_others(rows, lambda row: place(row, file_name, path))
    return (
        f"{place(rows[0], file_name, path)} has {invalid_rows[0].actual_columns} columns, but its header "
        f"{invalid_rows[0].expected_columns}{other_places}."
    )


def _is_utf8(table: pa.Table) -> bool:
    """Return whether names and texts are UTF-8: Arrow reads a column of other texts as bytes."""
    try:
        table.column_names  # noqa: B018 - decodes the names
    except UnicodeDecodeError:
        return False
    return not any(pa.types.is_binary(column_type) for column_type in table.schema.types)


def refuse_lists(column_type: pa.DataType, name: str, file_name: str) -> None:
    """Raise a DataError if each value of a column is a list, a struct or bytes."""
    if pa.types.is_nested(column_type) or pa.types.is_binary(column_type) or pa.types.is_large_binary(column_type):
        raise DataError(
            f"The column {name!r} of {file_name} is of type {column_type}; it needs one number or text in each row."
        )


class ImageTable(ABC):
    """A file with a row for each sample: its image, its label, and what else is known of it.

    Attributes
    ----------
    file_name : the file as messages name it.
    is_test : whether its samples belong to the published test split, as its name says.
    types : type of each column, by name.
    """

    types: dict[str, pa.DataType]

    def __init__(self, path: Path, root: Path):
        self.path = path
        self.file_name = str(path.relative_to(root))
        self.is_test = is_test_file(self.file_name)

    @abstractmethod
    def values(self, name: str) -> pa.ChunkedArray:
        """Return the column of this name."""

    @abstractmethod
    def images(self, name: str) -> Iterator[tuple[str, bytes | Path | None]]:
        """Yield, for each image in the column of this name, its row, as messages name it, and its bytes or file."""

    def place(self, row: int) -> str:
        """Return a row, as messages name it."""
        return place(row, self.file_name, self.path)

    def column(self, option: str, name: str) -> np.ndarray:
        """Return the column that ``data.<option>`` names, ``[n]``.

        Raises
        ------
        DataError : if a value is missing.
        """
        refuse_lists(self.type(option, name), name, self.file_name)
        values = self.values(name)
        if values.null_count:
            rows = np.flatnonzero(values.is_null())
            other_places = and_others(rows, self.place)
            raise DataError(f"{self.place(int(rows[0]))} has no {name!r}{other_places}.")
        return np.asarray(values.to_pylist()) if len(values) else np.zeros(0, np.int64)

    def type(self, option: str, name: str) -> pa.DataType:
        """Return the type of the column that ``data.<option>`` names.

        Raises
        ------
        ConfigError : if there is no such column.
        """
        if name not in self.types:
            raise ConfigError(
                f"{self.file_name} has {missing_column(name, option, self.types)}; its columns are: "
                f"{listed(self.types)}. This reader reads images; data.name=table reads tables of features."
            )
        return self.types[name]


def missing_column(name: str, option: str, columns: Collection[str]) -> str:
    """Say that a table lacks a column, as in ``"no column 'agee', which data.group names (did you mean 'age'?)"``."""
    near = nearest(name, columns)
    hint = "" if near is None else f" (did you mean {near!r}?)"
    return f"no column {name!r}, which data.{option} names{hint}"


@dataclass(frozen=True, kw_only=True)
class ImageTableReader(ImageReader):
    """Reads images from tables in the folder ``data.root``.

    Attributes
    ----------
    image : name of the column with the images.
    label : name of the column with the labels.
    group : name of the column with each sample's domain, writer or the like; None: there is none.
    files : pattern of the tables' names.
    """

    image: str = "image"
    label: str | tuple[str, ...] = "label"
    group: str | None = None
    files: str = "*"

    @abstractmethod
    def tables(self) -> Sequence[ImageTable]:
        """Open the tables."""

    @abstractmethod
    def read_labels(self, tables: Any) -> tuple[list[np.ndarray], list[str]]:
        """Return the labels in each of the `tables`, as in `RawData`, and the names of the classes."""

    def root(self) -> Path:
        """Return the folder ``data.root``."""
        return self.config.folder("tables of images (data=table reads tables of features)")

    def matching_paths(self, pattern: str) -> list[Path]:
        """Return the files in ``data.root`` that match.

        Raises
        ------
        DataError : if there are none.
        """
        paths = sorted(self.root().glob(pattern))
        if not paths:
            raise DataError(f"There is no {self.files} in the folder {self.root()}, which data.root names.")
        return paths

    def read(self) -> RawData:
        tables = self.tables()
        labels, class_names = self.read_labels(tables)
        is_test = np.repeat([table.is_test for table in tables], [len(table_labels) for table_labels in labels])

        groups = None
        if self.group:
            groups = np.concatenate([table.column("group", self.group) for table in tables])
        return RawData(
            inputs=self.decode(image for table in tables for image in table.images(self.image)),
            labels=np.concatenate(labels),
            class_names=class_names,
            test_mask=is_test if is_test.any() else None,
            groups=groups,
        )


def numbered_classes(tables: Sequence[ImageTable], labels: Sequence[np.ndarray]) -> tuple[list[np.ndarray], list[str]]:
    """Return labels that are numbers of classes, as ``int64``, and these numbers as the names of the classes."""
    file_names = [table.file_name for table in tables]
    count = class_count(list(zip(file_names, labels, strict=True)))
    class_names = [str(label) for label in range(count)]
    return [table_labels.astype(np.int64) for table_labels in labels], class_names
