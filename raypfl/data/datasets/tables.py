"""What readers of tables share: columns, the test split, and options of those that hold or list images."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv

from raypfl.common.errors import ConfigError, DataError, did_you_mean
from raypfl.data.datasets.images import ImageReader
from raypfl.data.datasets.labels import class_count
from raypfl.data.datasets.raw_data import RawData

TEST_WORDS = {"test", "valid", "val", "validation"}
"""Words in the name of a table whose rows are the published test split."""


def is_test(shown: str, words: Set[str]) -> bool:
    """Whether one of the words is in a file's name."""
    return not words.isdisjoint(re.split(r"[^a-z]+", shown.lower()))


def read_csv(path: Path, shown: str) -> pa.Table:
    """A CSV file. The type of a column is one that all its values have.

    Raises
    ------
    DataError : if it cannot be read; `shown` is its name in the message.
    """
    short: list[str] = []

    def note(row: pa_csv.InvalidRow) -> str:
        # Arrow counts from 1, and the header too.
        short.append(f"Row {row.number - 2} of {shown} has {row.actual_columns} columns, but its header")
        short.append(f"{row.expected_columns}.")
        return "error"

    try:
        refuse_other_encodings(path, shown)
        whole = min(path.stat().st_size + 1, 2**31 - 1)  # Arrow looks at the first block only to choose types
        return pa_csv.read_csv(
            path,
            read_options=pa_csv.ReadOptions(use_threads=False, block_size=whole),  # threads would lose rows' numbers
            parse_options=pa_csv.ParseOptions(invalid_row_handler=note),
            convert_options=pa_csv.ConvertOptions(strings_can_be_null=True),
        )
    except (pa.ArrowException, OSError) as error:
        raise DataError(" ".join(short) or f"{path} is not a readable CSV file: {error}") from error


def refuse_other_encodings(path: Path, shown: str) -> None:
    """Raise a DataError unless a file is UTF-8: Arrow would make bytes of its texts."""
    try:
        with path.open(encoding="utf-8") as file:
            for _ in file:
                pass
    except UnicodeDecodeError as error:
        raise DataError(
            f"{shown} is not UTF-8 (byte {error.start} of a block is {error.object[error.start]:#x}). Convert it, as "
            f"with `iconv -f LATIN1 -t UTF-8`."
        ) from error


class ImageTable(ABC):
    """One file with a row for each sample.

    Attributes
    ----------
    shown : the file as messages name it.
    is_test : whether its samples belong to the published test split, which the words in its name decide.
    types : type of each column, by name.
    """

    types: dict[str, pa.DataType]

    def __init__(self, path: Path, root: Path, test_words: set[str]):
        self.path, self.shown = path, str(path.relative_to(root))
        self.is_test = is_test(self.shown, test_words)

    @abstractmethod
    def values(self, name: str) -> pa.ChunkedArray:
        """The column of this name."""

    @abstractmethod
    def images(self, name: str) -> Iterator[tuple[str, bytes | Path | None]]:
        """For each image in the column of this name: its row, as messages name it, and its bytes or file."""

    def column(self, option: str, name: str) -> np.ndarray:
        """The column that ``data.<option>`` names, ``[n]``, without missing values."""
        self.type(option, name)
        values = self.values(name)
        if values.null_count:
            row = values.is_null().index(True).as_py()
            raise DataError(f"Row {row} of {self.shown} has no {name!r}.")
        return np.asarray(values.to_pylist()) if len(values) else np.zeros(0, np.int64)

    def type(self, option: str, name: str) -> pa.DataType:
        """The type of the column that ``data.<option>`` names. Raises a ConfigError if there is none."""
        if name not in self.types:
            raise ConfigError(
                f"data.{option} is {name!r}, but {self.shown} has no such column; {did_you_mean(name, self.types)} "
                "This reader reads images; data.name=table reads tables of features."
            )
        return self.types[name]


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
        """The tables, opened."""

    @abstractmethod
    def labelled(self, tables: Any) -> tuple[list[np.ndarray], list[str]]:
        """The labels in each of the `tables`, as of `RawData`, and the names of the classes."""

    def root(self) -> Path:
        """The folder ``data.root``."""
        return self.config.folder("the data set's tables")

    def found(self, pattern: str) -> list[Path]:
        """The files in ``data.root`` that match. Raises a DataError if there are none."""
        found = sorted(self.root().glob(pattern))
        if not found:
            raise DataError(f"There is no {self.files} in the folder {self.root()}, which data.root names.")
        return found

    def read(self) -> RawData:
        tables = self.tables()
        labels, class_names = self.labelled(tables)
        is_test = np.repeat([table.is_test for table in tables], [len(part) for part in labels])
        return RawData(
            inputs=self.decoded(image for table in tables for image in table.images(self.image)),
            labels=np.concatenate(labels),
            class_names=class_names,
            test_mask=is_test if is_test.any() else None,
            groups=np.concatenate([table.column("group", self.group) for table in tables]) if self.group else None,
        )


def numbered(tables: Sequence[ImageTable], labels: Sequence[np.ndarray]) -> tuple[list[np.ndarray], list[str]]:
    """Labels that are numbers of classes, as ``int64``, and these numbers as names."""
    count = class_count([(table.shown, part) for table, part in zip(tables, labels, strict=True)])
    return [part.astype(np.int64) for part in labels], [str(label) for label in range(count)]
