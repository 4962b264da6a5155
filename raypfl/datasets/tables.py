"""What readers of tables that list images have in common: their options, columns and test split."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from raypfl.common.errors import ConfigError, DataError, did_you_mean
from raypfl.datasets.base import RawData
from raypfl.datasets.images import ImageReader
from raypfl.datasets.labels import class_count


class Table(ABC):
    """One file with a row for each sample.

    Attributes
    ----------
    shown : the file as messages name it.
    is_test : whether its samples belong to the published test split.
    names : of its columns.
    """

    shown: str
    is_test: bool
    names: Sequence[str]

    @abstractmethod
    def values(self, name: str) -> pa.ChunkedArray:
        """The column of this name, which is there."""

    @abstractmethod
    def images(self, name: str) -> Iterator[tuple[str, bytes | Path | None]]:
        """For each image in the column of this name, its row as messages name it, and its bytes or file."""

    def column(self, option: str, name: str) -> np.ndarray:
        """The column that ``data.<option>`` names, ``[n]``, without missing values."""
        self.require(option, name)
        values = self.values(name)
        self.refuse(np.asarray(values.is_null()), f"has no {name!r}")
        return np.asarray(values.to_pylist()) if len(values) else np.zeros(0, np.int64)

    def require(self, option: str, name: str) -> None:
        """Refuse a ``data.<option>`` that names no column of this file, with a ConfigError."""
        if name not in self.names:
            raise ConfigError(
                f"data.{option} is {name!r}, but {self.shown} has no such column; {did_you_mean(name, self.names)}"
            )

    def refuse(self, where: np.ndarray, what: str) -> None:
        """Refuse the first row that `where` marks, if there is one, with a DataError."""
        rows = np.flatnonzero(where)
        if rows.size:
            raise DataError(f"Row {rows[0]} of {self.shown} {what}.")


@dataclass(frozen=True, kw_only=True)
class TableReader(ImageReader):
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
    def tables(self) -> Sequence[Table]:
        """The tables, opened."""

    @abstractmethod
    def labelled(self, tables: Any) -> tuple[list[np.ndarray], list[str]]:
        """The labels in each of the `tables`, as of `RawData`, and the names of the classes."""

    def found(self, pattern: str) -> list[Path]:
        """The files in ``data.root`` that match. Raises a DataError if there are none."""
        root = self.config.folder("the data set's tables")
        found = sorted(root.glob(pattern))
        if not found:
            raise DataError(f"There is no {self.files} in the folder {root}, which data.root names.")
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


def numbered(tables: Sequence[Table], labels: Sequence[np.ndarray]) -> tuple[list[np.ndarray], list[str]]:
    """Labels that are numbers of classes, as ``int64``, and these numbers as names."""
    count = class_count([(table.shown, part) for table, part in zip(tables, labels, strict=True)])
    return [part.astype(np.int64) for part in labels], [str(label) for label in range(count)]
