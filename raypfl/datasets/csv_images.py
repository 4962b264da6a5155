"""Images listed in CSV files, with one label each or several: CheXpert, and others in its form."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv

from raypfl.common.errors import ConfigError, DataError, did_you_mean
from raypfl.datasets.base import DATASETS, DataConfig, RawData, reads
from raypfl.datasets.images import decoded

_CHEXPERT_LABELS = ("Cardiomegaly", "Edema", "Consolidation", "Atelectasis", "Pleural Effusion")


def _tables(config: DataConfig) -> list[Path]:
    root = config.folder("CSV files that list images")
    found = sorted(root.glob(config.files or "*.csv"))
    if not found:
        raise DataError(f"There is no {config.files or '*.csv'} in the folder {root}, which data.root names.")
    return found


def _listed_files(config: DataConfig) -> list[Path]:
    tables = [_Listing(path, config) for path in _tables(config)]
    return [file for table in tables for file in (table.path, *table.images())]


def _as_chexpert(config: DataConfig) -> DataConfig:
    """CheXpert's columns and file, where the config leaves them open."""
    return replace(
        config,
        image="Path" if config.image == "image" else config.image,
        label=_CHEXPERT_LABELS if config.label == "label" else config.label,
        files=config.files or "train.csv",
    )


@DATASETS.register("csv")
@reads(_listed_files)
def csv(config: DataConfig) -> RawData:
    """Images listed in the CSV files of a folder (data.root): their paths in column data.image, labels in data.label.

    One label column holds classes, as numbers from 0 or as text. Several hold 0, 1, nothing (which is 0), or -1 for
    uncertain, which counts as data.uncertain says. Paths are within the folder; that they begin with the folder's own
    name does not matter. Files with the word "test" or "valid" in their names are the published test split.

    Raises
    ------
    ConfigError : if there is no such folder or column.
    DataError : if there is no file, or a label or image is missing, damaged or odd; the message names file and row,
        counted from 0.
    """
    tables = [_Listing(path, config) for path in _tables(config)]
    several = isinstance(config.label, tuple)
    class_names = list(config.label) if several else _class_names(tables)
    labels = np.concatenate([table.label_sets() if several else table.classes(class_names) for table in tables])
    test_mask = np.concatenate([np.full(len(table), table.is_test) for table in tables])
    return RawData(
        inputs=decoded((source for table in tables for source in table.sources()), config),
        labels=labels,
        class_names=class_names,
        test_mask=test_mask if test_mask.any() else None,
        groups=np.concatenate([table.column(config.group, "group") for table in tables]) if config.group else None,
    )


@DATASETS.register("chexpert")
@reads(lambda config: _listed_files(_as_chexpert(config)))
def chexpert(config: DataConfig) -> RawData:
    """Chest X-rays with 5 labels each (Irvin et al. 2019): those that ``train.csv`` in data.root lists.

    Uncertain labels are positive (U-Ones) unless data.uncertain is negative (U-Zeros). Clients are dealt combinations
    of labels, of which those with fewer than data.rare images count as one. Needs data.size, such as 64.
    """
    return csv(_as_chexpert(config))


class _Listing:
    """One CSV file."""

    def __init__(self, path: Path, config: DataConfig):
        self.path, self.config, self.root = path, config, path.parent
        self.is_test = not {"test", "valid", "val", "validation"}.isdisjoint(re.split(r"[^a-z]+", path.stem.lower()))
        self.table = self._read()

    def __len__(self) -> int:
        return self.table.num_rows

    def _read(self) -> pa.Table:
        short: list[str] = []

        def note(row: pa_csv.InvalidRow) -> str:
            # Arrow counts from 1, and the header too.
            short.append(f"Row {row.number - 2} of {self.path.name} has {row.actual_columns} columns, but its header")
            short.append(f"{row.expected_columns}.")
            return "error"

        try:
            return pa_csv.read_csv(
                self.path,
                read_options=pa_csv.ReadOptions(use_threads=False),  # which would lose the numbers of rows
                parse_options=pa_csv.ParseOptions(invalid_row_handler=note),
                convert_options=pa_csv.ConvertOptions(strings_can_be_null=True),
            )
        except (pa.ArrowException, OSError) as error:
            raise DataError(" ".join(short) or f"{self.path} is not a readable CSV file: {error}") from error

    def column(self, name: str, option: str) -> np.ndarray:
        """A column's values ``[n]``, none of which may be missing."""
        values = self._values(name, option)
        self.refuse(values.is_null(), f"has no {name!r}")
        return np.asarray(values.to_pylist())

    def images(self) -> list[Path]:
        """The images' files."""
        return [self._file(name) for name in self.column(self.config.image, "image").astype(str)]

    def sources(self) -> list[tuple[str, Path]]:
        """Where each image stands, for messages, and its file."""
        return [(f"Row {row} of {self.path.name}", path) for row, path in enumerate(self.images())]

    def classes(self, class_names: list[str]) -> np.ndarray:
        """``int64[n]``, the place of each label among the names."""
        number = {name: place for place, name in enumerate(class_names)}
        return np.array([number[str(label)] for label in self.column(str(self.config.label), "label")], dtype=np.int64)

    def label_sets(self) -> np.ndarray:
        """``int8[n, L]`` of zeros and ones."""
        columns = [self._marks(name) for name in self.config.label]
        return np.stack(columns, axis=1)

    def _marks(self, name: str) -> np.ndarray:
        values = self._values(name, "label")
        given = np.array([0.0 if value is None else _number(value) for value in values.to_pylist()])
        strange = np.flatnonzero(~np.isin(given, (-1.0, 0.0, 1.0)))
        if strange.size:
            odd = values[int(strange[0])].as_py()
            raise DataError(
                f"Row {strange[0]} of {self.path.name} has {odd!r} for {name!r}, which must be 1, 0, -1 or empty."
            )
        return np.where(given < 0, self.config.uncertain == "positive", given > 0).astype(np.int8)

    def _file(self, name: str) -> Path:
        path = self.root / name
        within = Path(*Path(name).parts[1:])
        return path if path.is_file() or within == Path() else self.root / within

    def _values(self, name: str, option: str) -> pa.ChunkedArray:
        if name not in self.table.column_names:
            raise ConfigError(
                f"data.{option} is {name!r}, but {self.path.name} has no such column; "
                f"{did_you_mean(name, self.table.column_names)}"
            )
        return self.table[name]

    def refuse(self, where: pa.Array, what: str) -> None:
        """Refuse the first of the rows that `where` marks, if there is one."""
        rows = np.flatnonzero(np.asarray(where))
        if rows.size:
            raise DataError(f"Row {rows[0]} of {self.path.name} {what}.")


def _number(value: Any) -> float:
    """A label as a number, NaN if it is none."""
    try:
        return float(value)
    except ValueError:
        return math.nan


def _class_names(tables: list[_Listing]) -> list[str]:
    """The labels that occur: numbers from 0 to the largest, or text in its order."""
    columns = [table.column(str(table.config.label), "label") for table in tables]
    for table, column in zip(tables, columns, strict=True):
        if column.dtype.kind == "i":
            table.refuse(pa.array(column < 0), "has a negative label; unlabelled samples cannot be used")
    if all(column.dtype.kind == "i" for column in columns):
        return [str(label) for label in range(max(int(column.max(initial=-1)) for column in columns) + 1)]
    return sorted({str(label) for column in columns for label in column})
