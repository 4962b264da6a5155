"""Images listed in CSV files, with one label each or several: CheXpert, and others in its form."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from raypfl.common.errors import ConfigError, DataError
from raypfl.data.datasets.csv_lines import lines_of_rows
from raypfl.data.datasets.labels import and_others
from raypfl.data.datasets.source import DATASETS
from raypfl.data.datasets.tables import ImageTable, ImageTableReader, numbered_classes, read_csv


@DATASETS.register("csv")
@dataclass(frozen=True, kw_only=True)
class Csv(ImageTableReader):
    """Images listed in the CSV files of a folder (data.root): their paths in one column, labels in another.

    One label column holds classes, as numbers from 0 or as text. Several hold 0, 1, nothing (which is 0), or -1 for
    uncertain. Paths are within the folder; they may begin with the folder's own name. Files with the word "test",
    "val", "valid" or "validation" in their names are the published test split.

    Attributes
    ----------
    label : name of the column with the labels, or a list of columns if samples have several labels each.
    uncertain : value that an uncertain label (-1) among several counts as.
    """

    files: str = "*.csv"
    uncertain: Literal["positive", "negative"] = "positive"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.label, str):
            object.__setattr__(self, "label", tuple(self.label))
        elif self.uncertain != "positive":
            raise ConfigError(
                f"data.uncertain is {self.uncertain!r}, which has no effect while data.label is one column; list "
                "several, or leave data.uncertain out."
            )

    def paths(self) -> list[Path]:
        paths = []
        for table in self.tables():
            paths += [table.path, *table.image_paths(self.image)]
        return paths

    def tables(self) -> Sequence[_CsvTable]:
        return [_CsvTable(path, self.root()) for path in self.matching_paths(self.files)]

    def read_labels(self, tables: Sequence[_CsvTable]) -> tuple[list[np.ndarray], list[str]]:
        if not isinstance(self.label, str):
            return [self._label_sets(table) for table in tables], list(self.label)

        labels = [table.column("label", self.label) for table in tables]
        if all(table_labels.dtype.kind == "i" for table_labels in labels):
            return numbered_classes(tables, labels)

        texts = [table_labels.astype(str) for table_labels in labels]
        class_names = np.unique(np.concatenate(texts))
        return [np.searchsorted(class_names, table_texts) for table_texts in texts], class_names.tolist()

    def _label_sets(self, table: _CsvTable) -> np.ndarray:
        """Return the labels of a table's samples, ``int8[n, L]`` of zeros and ones."""
        marks = np.stack([table.marks(name) for name in self.label], axis=1)
        return np.where(marks < 0, self.uncertain == "positive", marks > 0).astype(np.int8)


@DATASETS.register("chexpert")
@dataclass(frozen=True, kw_only=True)
class CheXpert(Csv):
    """Chest X-rays with 5 labels each (Irvin et al. 2019): those that ``train.csv`` in data.root lists.

    With ``uncertain: positive``, uncertain labels are U-Ones, with ``negative`` U-Zeros. Needs data.size, such as 64.
    """

    image: str = "Path"
    label: str | tuple[str, ...] = ("Cardiomegaly", "Edema", "Consolidation", "Atelectasis", "Pleural Effusion")
    files: str = "train.csv"


class _CsvTable(ImageTable):
    """A CSV file that lists image files."""

    def __init__(self, path: Path, root: Path):
        super().__init__(path, root)
        self.table = read_csv(path, self.file_name)
        self.types = dict(zip(self.table.column_names, self.table.schema.types, strict=True))

    def values(self, name: str) -> pa.ChunkedArray:
        return self.table[name]

    def images(self, name: str) -> Iterator[tuple[str, Path]]:
        paths = self.image_paths(name)
        missing = [row for row, path in enumerate(paths) if not path.is_file()]
        if missing:
            raise DataError(
                f"{self.place(missing[0])} names the image {paths[missing[0]]}, but there is no such file"
                f"{and_others(missing, self.place)}."
            )
        for line, path in zip(lines_of_rows(self.path), paths, strict=True):
            yield f"Line {line} of {self.file_name}", path

    def image_paths(self, name: str) -> list[Path]:
        """Return the files that the column of this name lists."""
        return [self._image_path(listed) for listed in self.column("image", name).astype(str)]

    def marks(self, name: str) -> np.ndarray:
        """Return a label column's values, ``float64[n]``, each 1, 0 or -1."""
        self.type("label", name)
        values = self.table[name].to_pylist()
        marks = np.array([0.0 if value is None else _as_number(value) for value in values])

        wrong = np.flatnonzero(~np.isin(marks, (-1.0, 0.0, 1.0)))
        if wrong.size:
            row = int(wrong[0])
            raise DataError(
                f"{self.place(row)} has {values[row]!r} for {name!r}, which must be 1, 0, -1 or empty"
                f"{and_others(wrong, self.place)}."
            )
        return marks

    def _image_path(self, listed: str) -> Path:
        """Return the file of a listed path, which may begin with the folder's own name."""
        path = self.path.parent / listed
        inner = self.path.parent.joinpath(*Path(listed).parts[1:])
        return inner if inner.is_file() and not path.is_file() else path


def _as_number(value: Any) -> float:
    """Return a label as a number, NaN if it is none."""
    try:
        return float(value)
    except ValueError:
        return math.nan
