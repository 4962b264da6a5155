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
from raypfl.data.datasets.tables import TEST_WORDS, has_word, read_csv

MAX_UNDECLARED = 100
"""Categories of a column, or integers to predict, beyond which the options must say that they are categories."""

MISSING = "(missing)"
# What the index that pandas writes is called in CSV and in Parquet.
_PANDAS_INDEX_NAMES = ("", "__index_level_0__")


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
    task : kind of the target: a class (``classification``) or a number (``regression``). ``auto``: integers, text and
        true or false are classes, other numbers are numbers.
    group : name of the column that says which client a row is from, for ``partition: by_column``; None: there is none.
    categorical : columns of numbers that are categories.
    ordinal : columns whose categories have an order, with the categories in this order: such a column becomes one
        feature, the category's place from 0.
    leave_out : columns that are not features.
    missing : treatment of missing values: ``refuse`` them; or ``fill``: a missing number is the column's median over
        all rows but those of a published test split, and a missing category is one of its own, ``(missing)``. Targets
        and groups are never filled.
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

        option_of: dict[str, str] = {}
        for option, names in self._columns_by_option().items():
            for name in names:
                if name in option_of:
                    raise ConfigError(
                        f"The column {name!r} is in data.{option_of[name]} and in data.{option}; choose one."
                    )
                option_of[name] = option

    def paths(self) -> list[Path]:
        root = self.config.folder("the tables, as CSV or Parquet files")
        paths = [path for path in files_under(root) if path.suffix in (".csv", ".parquet") and path.match(self.files)]
        if not paths:
            raise DataError(f"There is no {self.files} with the ending .csv or .parquet in {root}; see data.files.")
        return paths

    def read(self) -> RawData:
        rows = _Rows.read(self.paths(), self.config.folder("the tables"))
        for option, names in self._columns_by_option().items():
            for name in names:
                rows.refuse_unknown(option, name)

        assert self.target is not None
        labels, class_names = self._targets(rows, self.target)
        features = self._features(rows)
        groups = None if self.group is None else np.array(rows.complete(self.group).to_pylist())

        feature_names: list[str] = []
        indicators: list[bool] = []
        for feature in features:
            feature_names += feature.names
            indicators += [feature.is_indicator] * len(feature.names)

        return RawData(
            inputs=np.concatenate([feature.values for feature in features], axis=1),
            labels=labels,
            class_names=class_names,
            test_mask=rows.is_test if rows.is_test.any() else None,
            groups=groups,
            feature_names=feature_names,
            indicators=indicators,
        )

    def _columns_by_option(self) -> dict[str, Sequence[str]]:
        """The columns that each option names."""
        return {
            "target": [self.target] if self.target is not None else [],
            "group": [self.group] if self.group is not None else [],
            "categorical": self.categorical,
            "ordinal": list(self.ordinal or {}),
            "leave_out": self.leave_out,
        }

    def _targets(self, rows: _Rows, name: str) -> tuple[np.ndarray, list[str]]:
        """The targets of all rows, as in `RawData`, and their names."""
        column = rows.complete(name)
        if self._is_regression(rows, name, column.type):
            return rows.finite(name, column), [name]

        are_numbers = _is_number(column.type)
        if are_numbers and not pa.types.is_integer(column.type):
            column = rows.whole(name, column)
        values = column.to_pylist()
        if not are_numbers:
            values = [_category_name(value) for value in values]

        classes = sorted(set(values))
        if are_numbers and len(classes) > MAX_UNDECLARED and self.task == "auto":
            raise DataError(
                f"The column {name!r} of {rows.file} has {len(classes)} different integers: say whether they are "
                "numbers (data.task=regression) or classes (data.task=classification)."
            )
        label_of = {value: label for label, value in enumerate(classes)}
        labels = np.array([label_of[value] for value in values], np.int64)
        return labels, [str(value) for value in classes]

    def _is_regression(self, rows: _Rows, name: str, column_type: pa.DataType) -> bool:
        if self.task == "auto":
            return _is_number(column_type) and not pa.types.is_integer(column_type)
        if self.task == "regression" and not _is_number(column_type):
            raise DataError(
                f"The column {name!r} of {rows.file} is {_type_name(column_type)}, but data.task is regression."
            )
        return self.task == "regression"

    def _features(self, rows: _Rows) -> list[_Feature]:
        not_features = {self.target, self.group, *self.leave_out, *_PANDAS_INDEX_NAMES}
        features = [self._feature(rows, name) for name in rows.columns if name not in not_features]
        if not features:
            raise DataError(f"{rows.file} has no features: no columns but data.target, data.group and data.leave_out.")
        return features

    def _feature(self, rows: _Rows, name: str) -> _Feature:
        column = rows.columns[name]
        if column.null_count == len(column):
            raise DataError(f"The column {name!r} of {rows.file} has no values; name it in data.leave_out.")
        if self.missing == "refuse":
            rows.complete(name)

        ordinal = self.ordinal or {}
        if name in ordinal:
            places = _places_in_order(rows, name, column, ordinal[name])
            return self._number_feature(rows, name, places)
        if name in self.categorical or not _is_number(column.type):
            return self._one_hot_feature(rows, name, column)
        return self._number_feature(rows, name, column)

    def _number_feature(self, rows: _Rows, name: str, column: pa.Array) -> _Feature:
        """A column of numbers; the median in place of missing ones."""
        if column.null_count:
            column = column.cast(pa.float64())
            # The median of a published test split would leak into training.
            training_values = column.filter(pa.array(~rows.is_test)).drop_null()
            if not len(training_values):
                raise DataError(f"The column {name!r} has values in test files only; name it in data.leave_out.")
            median = float(np.median(training_values.to_numpy(zero_copy_only=False)))
            column = pc.fill_null(column, median)

        values = rows.finite(name, column)[:, None].astype(np.float32)
        return _Feature([name], values, is_indicator=False)

    def _one_hot_feature(self, rows: _Rows, name: str, column: pa.Array) -> _Feature:
        """A column of categories: an indicator for each."""
        values = np.array([MISSING if value is None else _category_name(value) for value in column.to_pylist()])
        categories, category = np.unique(values, return_inverse=True)
        if name not in self.categorical:
            _refuse_doubtful_categories(rows, name, column.type, values, categories)

        one_hot = np.zeros((len(values), len(categories)), np.float32)
        one_hot[np.arange(len(values)), category] = 1.0
        names = [f"{name}={category_name}" for category_name in categories]
        return _Feature(names, one_hot, is_indicator=True)


@dataclass(frozen=True)
class _Feature:
    """The features that a column becomes.

    Attributes
    ----------
    names : names of the f features.
    values : ``float32[n, f]``.
    is_indicator : whether they are 1 or 0 for a category.
    """

    names: list[str]
    values: np.ndarray
    is_indicator: bool


@dataclass(frozen=True)
class _Rows:
    """The rows of all files, one file after another.

    Attributes
    ----------
    columns : name -> column; numbers as int64 or float64 without NaN, which is missing.
    files : for each file, its name in messages and its number of rows.
    is_test : ``bool[n]``, the rows of a published test split.
    """

    columns: Mapping[str, pa.Array]
    files: list[tuple[str, int]]
    is_test: np.ndarray

    @classmethod
    def read(cls, paths: Sequence[Path], root: Path) -> _Rows:
        """Read all files, whose columns must have equal names."""
        file_names = [str(path.relative_to(root)) for path in paths]
        tables = [_read_table(path, file_name) for path, file_name in zip(paths, file_names, strict=True)]
        column_names = tables[0].column_names
        for file_name, table in zip(file_names, tables, strict=True):
            _refuse_unequal_columns(file_names[0], column_names, file_name, table.column_names)

        counts = [table.num_rows for table in tables]
        if not sum(counts):
            raise DataError(f"{', '.join(file_names)}: the table has no rows.")

        columns = {name: _join_column([table[name] for table in tables]) for name in column_names}
        is_test = np.repeat([has_word(file_name, TEST_WORDS) for file_name in file_names], counts)
        return cls(columns, list(zip(file_names, counts, strict=True)), is_test)

    @property
    def file(self) -> str:
        """The first file, as messages name it."""
        return self.files[0][0]

    def place(self, row: int) -> str:
        """A row, as messages name it."""
        for file_name, count in self.files:
            if row < count:
                return f"Row {row} of {file_name}"
            row -= count
        raise IndexError(row)

    def refuse_unknown(self, option: str, name: str) -> None:
        """Raise a ConfigError unless there is a column of this name, which ``data.<option>`` has."""
        if name not in self.columns:
            raise ConfigError(
                f"data.{option} is {name!r}, but {self.file} has no such column; {did_you_mean(name, self.columns)}"
            )

    def complete(self, name: str) -> pa.Array:
        """A column.

        Raises
        ------
        DataError : if a value is missing.
        """
        column = self.columns[name]
        if column.null_count:
            row = column.is_null().to_numpy(zero_copy_only=False).argmax()
            raise DataError(
                f"{self.place(int(row))} has no {name!r}. data.missing=fill fills in features; a target must be given."
            )
        return column

    def finite(self, name: str, column: pa.Array) -> np.ndarray:
        """A column of numbers, ``float64[n]``.

        Raises
        ------
        DataError : if a number is infinite.
        """
        numbers = column.cast(pa.float64()).to_numpy(zero_copy_only=False)
        infinite = np.flatnonzero(~np.isfinite(numbers))
        if infinite.size:
            row = int(infinite[0])
            raise DataError(f"{self.place(row)} has {numbers[row]} for {name!r}, which is not finite.")
        return numbers

    def whole(self, name: str, column: pa.Array) -> pa.Array:
        """A column of numbers as integers.

        Raises
        ------
        DataError : if a number is no integer.
        """
        numbers = self.finite(name, column)
        fractional = np.flatnonzero(numbers % 1)
        if fractional.size:
            row = int(fractional[0])
            raise DataError(
                f"{self.place(row)} has {numbers[row]} for {name!r}, which is not an integer, as classes are."
            )
        return pa.array(numbers.astype(np.int64))


def _read_table(path: Path, file_name: str) -> pa.Table:
    """Read a CSV or Parquet file.

    Raises
    ------
    DataError : if it cannot be read, or two columns have one name.
    """
    if path.suffix == ".csv":
        table = read_csv(path, file_name)
    else:
        try:
            table = pq.ParquetFile(path).read()
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{file_name} is not a readable Parquet file: {error}") from error

    for name, count in Counter(table.column_names).items():
        if count > 1:
            raise DataError(f"{file_name} has two columns called {name!r}; rename one.")
    return table


def _refuse_unequal_columns(file: str, columns: list[str], other_file: str, other_columns: list[str]) -> None:
    for column in columns:
        if column not in other_columns:
            raise DataError(f"{file} has the column {column!r}, but {other_file} has not; see data.files.")
    for column in other_columns:
        if column not in columns:
            raise DataError(f"{other_file} has the column {column!r}, but {file} has not; see data.files.")


def _join_column(parts: list[pa.ChunkedArray]) -> pa.Array:
    """Join a column of all files.

    Its type is that of numbers if all files have numbers, else its own if it is the same in all files, else text.
    """
    plain = [part.cast(part.type.value_type) if pa.types.is_dictionary(part.type) else part for part in parts]

    # In a file in which it has no value, the type of a column says nothing.
    types = {part.type for part in plain if len(part) > part.null_count}
    if types and all(pa.types.is_integer(part_type) for part_type in types):
        joint_type = pa.int64()
    elif types and all(_is_number(part_type) for part_type in types):
        joint_type = pa.float64()
    elif len(types) == 1:
        joint_type = types.pop()
    else:
        joint_type = pa.string()

    chunks = []
    for part in plain:
        chunks += part.cast(joint_type).chunks
    column = pa.chunked_array(chunks, joint_type).combine_chunks()

    # NaN is a missing number, as in pandas.
    if pa.types.is_floating(joint_type):
        column = pc.if_else(pc.is_nan(column), pa.scalar(None, joint_type), column)
    return column


def _places_in_order(rows: _Rows, name: str, column: pa.Array, order: Sequence[Any]) -> pa.Array:
    """The place of each value in the order of the categories, from 0; a missing value has none."""
    categories = [_category_name(category) for category in order]
    places: list[int | None] = []
    for row, value in enumerate(column.to_pylist()):
        if value is None:
            places.append(None)
            continue

        category = _category_name(value)
        if category not in categories:
            raise DataError(
                f"{rows.place(row)} has {category!r} for {name!r}, which is not in data.ordinal: "
                f"{', '.join(categories)}."
            )
        places.append(categories.index(category))
    return pa.array(places, pa.float64())


def _is_number(column_type: pa.DataType) -> bool:
    return pa.types.is_integer(column_type) or pa.types.is_floating(column_type) or pa.types.is_decimal(column_type)


def _is_text(column_type: pa.DataType) -> bool:
    return pa.types.is_string(column_type) or pa.types.is_large_string(column_type)


def _type_name(column_type: pa.DataType) -> str:
    return "text" if _is_text(column_type) else str(column_type)


def _category_name(value: object) -> str:
    """The name of a category; of true and false, as YAML writes them."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _refuse_doubtful_categories(
    rows: _Rows, name: str, column_type: pa.DataType, values: np.ndarray, categories: np.ndarray
) -> None:
    """Refuse a column that may not have been meant as categories."""
    if not (_is_text(column_type) or pa.types.is_boolean(column_type)):
        raise DataError(
            f"The column {name!r} of {rows.file} is of type {column_type}, neither numbers nor text; name it in "
            "data.leave_out or in data.categorical."
        )

    present = categories[categories != MISSING]
    are_numerals = [_is_numeral(category) for category in present]
    if 2 * sum(are_numerals) > len(are_numerals):
        # A word among numbers, such as "unknown", explains why the column is text.
        odd = str(present[are_numerals.index(False)] if False in are_numerals else present[0])
        row = int((values == odd).argmax())
        raise DataError(
            f"{rows.place(row)} has {odd!r} for {name!r}, but most of its values are numbers: leave cells without a "
            "value empty, or name the column in data.categorical."
        )
    if len(categories) > MAX_UNDECLARED:
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
