"""Images listed in CSV files, with one label each or several: CheXpert, and others in its form."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from raypfl.common.errors import DataError
from raypfl.data.datasets.source import DATASETS
from raypfl.data.datasets.tables import TEST_WORDS, ImageTable, ImageTableReader, numbered, read_csv


@DATASETS.register("csv")
@dataclass(frozen=True, kw_only=True)
class Csv(ImageTableReader):
    """Images listed in the CSV files of a folder (data.root): their paths in one column, labels in another.

    One label column holds classes, as numbers from 0 or as text. Several hold 0, 1, nothing (which is 0), or -1 for
    uncertain. Paths are within the folder; they may begin with the folder's own name. Files with the word "test" or
    "valid" in their names are the published test split.

    Attributes
    ----------
    label : name of the column with the labels, or a list of columns if samples have several labels each.
    uncertain : what an uncertain label (-1) among several counts as.
    """

    files: str = "*.csv"
    uncertain: Literal["positive", "negative"] = "positive"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.label, str):
            object.__setattr__(self, "label", tuple(self.label))

    def paths(self) -> list[Path]:
        return [path for table in self.tables() for path in (table.path, *table.image_files(self.image))]

    def tables(self) -> Sequence[_CsvFile]:
        return [_CsvFile(path, self.root(), TEST_WORDS) for path in self.found(self.files)]

    def labelled(self, tables: Sequence[_CsvFile]) -> tuple[list[np.ndarray], list[str]]:
        if not isinstance(self.label, str):
            return [self._label_sets(table) for table in tables], list(self.label)
        labels = [table.column("label", self.label) for table in tables]
        if all(part.dtype.kind == "i" for part in labels):
            return numbered(tables, labels)
        names = np.unique(np.concatenate([part.astype(str) for part in labels]))
        return [np.searchsorted(names, part.astype(str)) for part in labels], names.tolist()

    def _label_sets(self, table: _CsvFile) -> np.ndarray:
        """``int8[n, L]`` of zeros and ones."""
        given = np.stack([table.marks(name) for name in self.label], axis=1)
        return np.where(given < 0, self.uncertain == "positive", given > 0).astype(np.int8)


@DATASETS.register("chexpert")
@dataclass(frozen=True, kw_only=True)
class CheXpert(Csv):
    """Chest X-rays with 5 labels each (Irvin et al. 2019): those that ``train.csv`` in data.root lists.

    With ``uncertain: positive``, uncertain labels are U-Ones, with ``negative`` U-Zeros. Needs data.size, such as 64.
    """

    image: str = "Path"
    label: str | tuple[str, ...] = ("Cardiomegaly", "Edema", "Consolidation", "Atelectasis", "Pleural Effusion")
    files: str = "train.csv"


class _CsvFile(ImageTable):
    """One CSV file."""

    def __init__(self, path: Path, root: Path, test_words: set[str]):
        super().__init__(path, root, test_words)
        self.table = read_csv(path, self.shown)
        self.types = dict(zip(self.table.column_names, self.table.schema.types, strict=True))

    def values(self, name: str) -> pa.ChunkedArray:
        return self.table[name]

    def images(self, name: str) -> Iterator[tuple[str, Path]]:
        return ((f"Row {row} of {self.shown}", path) for row, path in enumerate(self.image_files(name)))

    def image_files(self, name: str) -> list[Path]:
        """The files that the column of this name lists."""
        return [self._file(listed) for listed in self.column("image", name).astype(str)]

    def marks(self, name: str) -> np.ndarray:
        """A label column's values ``float64[n]``, each 1, 0 or -1."""
        self.type("label", name)
        values = self.table[name].to_pylist()
        numbers = np.array([0.0 if value is None else _number(value) for value in values])
        wrong = np.flatnonzero(~np.isin(numbers, (-1.0, 0.0, 1.0)))
        if wrong.size:
            raise DataError(
                f"Row {wrong[0]} of {self.shown} has {values[wrong[0]]!r} for {name!r}, which must be 1, 0, -1 or "
                f"empty."
            )
        return numbers

    def _file(self, listed: str) -> Path:
        root = self.path.parent
        path, within = root / listed, Path(*Path(listed).parts[1:])
        return path if path.is_file() or within == Path() else root / within


def _number(value: Any) -> float:
    """A label as a number, NaN if it is none."""
    try:
        return float(value)
    except ValueError:
        return math.nan
