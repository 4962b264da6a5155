"""Ordinary tables in CSV and Parquet files: columns of numbers and of categories, one of which is to be predicted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from raypfl.common.errors import ConfigError, DataError, did_you_mean
from raypfl.data.datasets.raw_data import RawData
from raypfl.data.datasets.source import DATASETS, Reader, files_under
from raypfl.data.datasets.tables import TEST_WORDS, is_test, read_csv

MANY = 100
"""Categories of a column, or integers to predict, beyond which it must be said that they are categories."""

MISSING = "(missing)"
_OF_PANDAS = ("", "__index_level_0__")  # what its index is called in CSV and Parquet


@DATASETS.register("table")
@dataclass(frozen=True, kw_only=True)
class FeatureTable(Reader):
    """Tables of features: the CSV and Parquet files in a folder (data.root) and its subfolders, with equal columns.

    Every column is a feature but the target, the group, those in `leave_out` and an index that pandas wrote. Columns of
    numbers are standardised by the clients' training samples. Columns of text and of true and false become a feature
    for each category, which is 1 or 0 and stays so (one-hot). Files with the word "test" or "valid" in their names are
    the published test split.

    Attributes
    ----------
    target : name of the column to predict.
    task : what the target is: a class (``classification``) or a number (``regression``). ``auto``: integers, text and
        true or false are classes, other numbers are numbers.
    group : name of the column that says which client a row is from, for ``partition: by_column``; None: there is none.
    categorical : columns of numbers that are categories.
    ordinal : columns whose categories have an order, with the categories in this order: such a column becomes one
        feature, the category's place from 0.
    leave_out : columns that are not features.
    missing : ``refuse`` them; or ``fill``: a missing number is the column's median over all rows but those of a
        published test split, and a missing category is one of its own, ``(missing)``. Targets and groups are never
        filled.
    files : pattern of the files' names.
    """

    target: str | None = None
    task: Literal["auto", "classification", "regression"] = "auto"
    group: str | None = None
    categorical: tuple[str, ...] = ()
    ordinal: dict[str, list[Any]] | None = None
    leave_out: tuple[str, ...] = ()
    missing: Literal["refuse", "fill"] = "refuse"
    files: str = "*"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.target is None:
            raise ConfigError("data.target is missing: name the column of the table that is to be predicted.")
        uses: dict[str, str] = {}
        for option, names in self._named().items():
            for name in names:
                if name in uses:
                    raise ConfigError(f"The column {name!r} is in data.{uses[name]} and in data.{option}; choose one.")
                uses[name] = option

    def paths(self) -> list[Path]:
        root = self.config.folder("the tables, as CSV or Parquet files")
        tables = [path for path in files_under(root) if path.suffix in (".csv", ".parquet") and path.match(self.files)]
        if not tables:
            raise DataError(f"There is no {self.files} with the ending .csv or .parquet in {root}; see data.files.")
        return tables

    def read(self) -> RawData:
        rows = _Rows.of(self.paths(), self.config.folder("the tables"))
        for option, names in self._named().items():
            for name in names:
                rows.refuse_unknown(option, name)
        assert self.target is not None
        labels, class_names = self._target(rows, self.target)
        features = self._features(rows)
        return RawData(
            inputs=np.concatenate([feature.values for feature in features], axis=1),
            labels=labels,
            class_names=class_names,
            test_mask=rows.is_test if rows.is_test.any() else None,
            groups=None if self.group is None else np.array(rows.complete(self.group).to_pylist()),
            feature_names=[name for feature in features for name in feature.names],
            indicators=[feature.indicators for feature in features for _ in feature.names],
        )

    def _named(self) -> dict[str, Sequence[str]]:
        """The columns that each option names."""
        return {
            "target": [self.target] if self.target is not None else [],
            "group": [self.group] if self.group is not None else [],
            "categorical": self.categorical,
            "ordinal": list(self.ordinal or {}),
            "leave_out": self.leave_out,
        }

    def _target(self, rows: _Rows, name: str) -> tuple[np.ndarray, list[str]]:
        """The targets of all rows, as of `RawData`, and their names."""
        values = rows.complete(name)
        if self._is_regression(rows, name, values.type):
            return rows.finite(name, values), [name]

        numbers = _is_number(values.type)
        if numbers and not pa.types.is_integer(values.type):
            values = rows.whole(name, values)
        given = values.to_pylist() if numbers else list(map(_text, values.to_pylist()))
        classes = sorted(set(given))
        if numbers and len(classes) > MANY and self.task == "auto":
            raise DataError(
                f"The column {name!r} of {rows.file} has {len(classes)} different integers: say whether they are "
                "numbers (data.task=regression) or classes (data.task=classification)."
            )
        place = {value: number for number, value in enumerate(classes)}
        return np.array([place[value] for value in given], np.int64), [str(value) for value in classes]

    def _is_regression(self, rows: _Rows, name: str, kind: pa.DataType) -> bool:
        if self.task == "auto":
            return _is_number(kind) and not pa.types.is_integer(kind)
        if self.task == "regression" and not _is_number(kind):
            raise DataError(f"The column {name!r} of {rows.file} is {_word(kind)}, but data.task is regression.")
        return self.task == "regression"

    def _features(self, rows: _Rows) -> list[_Feature]:
        others = {self.target, self.group, *self.leave_out, *_OF_PANDAS}
        features = [self._feature(rows, name) for name in rows.columns if name not in others]
        if not features:
            raise DataError(f"{rows.file} has no features: no columns but data.target, data.group and data.leave_out.")
        return features

    def _feature(self, rows: _Rows, name: str) -> _Feature:
        values = rows.columns[name]
        if values.null_count == len(values):
            raise DataError(f"The column {name!r} of {rows.file} has no values; name it in data.leave_out.")
        if self.missing == "refuse":
            rows.complete(name)
        if name in (order := self.ordinal or {}):
            return self._numbers(rows, name, _places(rows, name, values, order[name]))
        if name in self.categorical or not _is_number(values.type):
            return self._categories(rows, name, values)
        return self._numbers(rows, name, values)

    def _numbers(self, rows: _Rows, name: str, values: pa.Array) -> _Feature:
        """A column of numbers; the median in place of missing ones."""
        if values.null_count:
            values = values.cast(pa.float64())
            seen = values.filter(pa.array(~rows.is_test)).drop_null()
            if not len(seen):
                raise DataError(f"The column {name!r} has values in test files only; name it in data.leave_out.")
            values = pc.fill_null(values, float(np.median(seen.to_numpy(zero_copy_only=False))))
        return _Feature([name], rows.finite(name, values)[:, None].astype(np.float32), indicators=False)

    def _categories(self, rows: _Rows, name: str, values: pa.Array) -> _Feature:
        """A column of categories, one-hot."""
        given = np.array([MISSING if value is None else _text(value) for value in values.to_pylist()])
        categories, number = np.unique(given, return_inverse=True)
        if name not in self.categorical:
            _refuse_doubtful(rows, name, values.type, given, categories)
        one_hot = np.zeros((len(given), len(categories)), np.float32)
        one_hot[np.arange(len(given)), number] = 1.0
        return _Feature([f"{name}={category}" for category in categories], one_hot, indicators=True)


@dataclass(frozen=True)
class _Feature:
    """What becomes of a column: ``values[n, f]`` and their names; `indicators` are 0 or 1 for a category."""

    names: list[str]
    values: np.ndarray
    indicators: bool


@dataclass(frozen=True)
class _Rows:
    """The rows of all files, one file after another.

    Attributes
    ----------
    columns : by name; numbers as int64 or float64 without NaN, which is missing.
    files : for each file, its name in messages and its number of rows.
    is_test : ``bool[n]``, the rows of a published test split.
    """

    columns: Mapping[str, pa.Array]
    files: list[tuple[str, int]]
    is_test: np.ndarray

    @classmethod
    def of(cls, paths: Sequence[Path], root: Path) -> _Rows:
        shown = [str(path.relative_to(root)) for path in paths]
        tables = [_opened(path, name) for path, name in zip(paths, shown, strict=True)]
        for name, table in zip(shown, tables, strict=True):
            _refuse_unequal(shown[0], tables[0].column_names, name, table.column_names)
        counts = [table.num_rows for table in tables]
        if not sum(counts):
            raise DataError(f"{', '.join(shown)}: the table has no rows.")
        columns = {name: _joined([table[name] for table in tables]) for name in tables[0].column_names}
        test_rows = np.repeat([is_test(name, TEST_WORDS) for name in shown], counts)
        return cls(columns, list(zip(shown, counts, strict=True)), test_rows)

    @property
    def file(self) -> str:
        """The first file, as messages name it."""
        return self.files[0][0]

    def place(self, row: int) -> str:
        """A row, as messages name it."""
        for name, count in self.files:
            if row < count:
                return f"Row {row} of {name}"
            row -= count
        raise IndexError(row)

    def refuse_unknown(self, option: str, name: str) -> None:
        if name not in self.columns:
            raise ConfigError(
                f"data.{option} is {name!r}, but {self.file} has no such column; {did_you_mean(name, self.columns)}"
            )

    def complete(self, name: str) -> pa.Array:
        """A column. Raises a DataError if a value is missing."""
        values = self.columns[name]
        if values.null_count:
            row = values.is_null().to_numpy(zero_copy_only=False).argmax()
            raise DataError(
                f"{self.place(int(row))} has no {name!r}. data.missing=fill fills in features; a target must be given."
            )
        return values

    def finite(self, name: str, values: pa.Array) -> np.ndarray:
        """A column of numbers ``float64[n]``. Raises a DataError if one is infinite."""
        numbers = values.cast(pa.float64()).to_numpy(zero_copy_only=False)
        if (wrong := np.flatnonzero(~np.isfinite(numbers))).size:
            raise DataError(f"{self.place(int(wrong[0]))} has {numbers[wrong[0]]} for {name!r}, which is not finite.")
        return numbers

    def whole(self, name: str, values: pa.Array) -> pa.Array:
        """A column of numbers as integers. Raises a DataError if one is none."""
        numbers = self.finite(name, values)
        if (wrong := np.flatnonzero(numbers % 1)).size:
            row = int(wrong[0])
            raise DataError(f"{self.place(row)} has {numbers[row]} for {name!r}, which is the number of no class.")
        return pa.array(numbers.astype(np.int64))


def _opened(path: Path, shown: str) -> pa.Table:
    """A file's columns. Raises a DataError if it cannot be read, or two columns have one name."""
    if path.suffix == ".csv":
        table = read_csv(path, shown)
    else:
        try:
            table = pq.ParquetFile(path).read()
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{shown} is not a readable Parquet file: {error}") from error
    for name, count in Counter(table.column_names).items():
        if count > 1:
            raise DataError(f"{shown} has two columns called {name!r}; rename one.")
    return table


def _refuse_unequal(first: str, expected: list[str], name: str, columns: list[str]) -> None:
    for has, lacks, names, others in ((first, name, expected, columns), (name, first, columns, expected)):
        for column in names:
            if column not in others:
                raise DataError(f"{has} has the column {column!r}, but {lacks} has not; see data.files.")


def _joined(parts: list[pa.ChunkedArray]) -> pa.Array:
    """A column of all files in one type: that of numbers if all are, else text unless it is the same in all."""
    plain = [part.cast(part.type.value_type) if pa.types.is_dictionary(part.type) else part for part in parts]
    types = {part.type for part in plain if len(part) > part.null_count}
    if types and all(pa.types.is_integer(kind) for kind in types):
        wanted = pa.int64()
    elif types and all(_is_number(kind) for kind in types):
        wanted = pa.float64()
    elif len(types) == 1:
        wanted = types.pop()
    else:
        wanted = pa.string()
    chunks = [chunk for part in plain for chunk in part.cast(wanted).chunks]
    column = pa.chunked_array(chunks, wanted).combine_chunks()
    if pa.types.is_floating(wanted):
        column = pc.if_else(pc.is_nan(column), pa.scalar(None, wanted), column)
    return column


def _places(rows: _Rows, name: str, values: pa.Array, categories: Sequence[Any]) -> pa.Array:
    """The places of a column's categories in their order, from 0."""
    order = [_text(category) for category in categories]
    given = [None if value is None else _text(value) for value in values.to_pylist()]
    for row, value in enumerate(given):
        if value is not None and value not in order:
            raise DataError(
                f"{rows.place(row)} has {value!r} for {name!r}, which is not in data.ordinal: {', '.join(order)}."
            )
    return pa.array([None if value is None else order.index(value) for value in given], pa.float64())


def _is_number(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)


def _word(kind: pa.DataType) -> str:
    return "text" if pa.types.is_string(kind) or pa.types.is_large_string(kind) else str(kind)


def _text(value: object) -> str:
    """A category's name."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _refuse_doubtful(rows: _Rows, name: str, kind: pa.DataType, given: np.ndarray, categories: np.ndarray) -> None:
    """Refuse a column that may not have been meant as categories."""
    if not (_word(kind) == "text" or pa.types.is_boolean(kind)):
        raise DataError(
            f"The column {name!r} of {rows.file} is of type {kind}, neither numbers nor text; name it in "
            "data.leave_out or in data.categorical."
        )
    known = categories[categories != MISSING]
    numbers = [_is_numeral(category) for category in known]
    if 2 * sum(numbers) > len(numbers):
        odd = str(known[numbers.index(False)] if False in numbers else known[0])
        raise DataError(
            f"{rows.place(int((given == odd).argmax()))} has {odd!r} for {name!r}, but most of its values are numbers: "
            "leave cells without a value empty, or name the column in data.categorical."
        )
    if len(categories) > MANY:
        raise DataError(
            f"The column {name!r} of {rows.file} is text with {len(categories)} categories, each of which would "
            "become a feature: name it in data.leave_out or, if that is meant, in data.categorical."
        )


def _is_numeral(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
