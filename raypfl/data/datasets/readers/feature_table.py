"""Ordinary tables in CSV and Parquet files: columns of numbers and of categories, one of which is to be predicted."""

from __future__ import annotations

import json
import re
import shlex
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raypfl.common.errors import ConfigError, DataError
from raypfl.data.datasets.raw_data import RawData
from raypfl.data.datasets.source import DATASETS, Reader, files_under
from raypfl.data.datasets.table_rows import TableRows, as_float, is_number

MAX_UNDECLARED = 100
"""Categories of a column, or integers to predict, beyond which the options must say that they are categories."""

_LEAST_ROWS_FOR_IDS = 20
"""Rows from which on a column without two equal values may be told from one that has none by chance."""

_MOST_ROWS_OF_MISTAKE = 2
"""Most rows of a class that may be a spelling mistake."""

_LEAST_ROWS_PER_MISTAKE = 50
"""Rows of the table, for each row of such a class, from which on it is rare."""

TABLE_ENDINGS = (".csv", ".parquet")
"""Endings of the files that are read."""

MISSING = "(missing)"
# What the index that pandas writes is called in CSV and in Parquet.
_PANDAS_INDEX_NAMES = ("", "__index_level_0__")


@DATASETS.register("table")
@dataclass(frozen=True, kw_only=True)
class FeatureTable(Reader):
    """Tables of features: a CSV or Parquet file (data.root), or all in a folder and its subfolders, with equal columns.

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
        root = self._root()
        paths = [path for path in files_under(root) if path.suffix in TABLE_ENDINGS and path.match(self.files)]
        if not paths:
            raise DataError(f"There is no {self.files} with the ending .csv or .parquet in {root}; see data.files.")
        return paths

    def _root(self) -> Path:
        """Return the folder ``data.root``, or the file."""
        file = Path(self.config.root or "").expanduser()
        return file if file.is_file() else self.config.folder("the tables, as CSV or Parquet files")

    def read(self) -> RawData:
        rows = TableRows.read(self.paths(), self._root())
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
        """Return the columns that each option names."""
        return {
            "target": [self.target] if self.target is not None else [],
            "group": [self.group] if self.group is not None else [],
            "categorical": self.categorical,
            "ordinal": list(self.ordinal or {}),
            "leave_out": self.leave_out,
        }

    def _targets(self, rows: TableRows, name: str) -> tuple[np.ndarray, list[str]]:
        """Return the targets of all rows, as in `RawData`, and their names."""
        column = rows.complete(name)
        if self._is_regression(rows, name, column.type):
            return rows.finite(name, column), [name]

        are_numbers = is_number(column.type)
        if are_numbers and not pa.types.is_integer(column.type):
            column = rows.whole(name, column)
        values = column.to_pylist()
        if not are_numbers:
            values = [category_name(value) for value in values]

        classes = sorted(set(values))
        if are_numbers and len(classes) > MAX_UNDECLARED and self.task == "auto":
            raise DataError(
                f"The column {name!r} of {rows.file} has {len(classes)} different integers: say whether they are "
                "numbers (data.task=regression) or classes (data.task=classification)."
            )
        label_of = {value: label for label, value in enumerate(classes)}
        labels = np.array([label_of[value] for value in values], np.int64)
        _warn_of_rare_classes(rows, name, classes, labels)
        return labels, [str(value) for value in classes]

    def _is_regression(self, rows: TableRows, name: str, column_type: pa.DataType) -> bool:
        if self.task == "auto":
            return is_number(column_type) and not pa.types.is_integer(column_type)
        if self.task == "regression" and not is_number(column_type):
            raise DataError(
                f"The column {name!r} of {rows.file} is {_type_name(column_type)}, but data.task is regression."
            )
        return self.task == "regression"

    def _features(self, rows: TableRows) -> list[_Feature]:
        not_features = {self.target, self.group, *self.leave_out, *_PANDAS_INDEX_NAMES}
        names = [name for name in rows.columns if name not in not_features]
        if not names:
            raise DataError(f"{rows.file} has no features: no columns but data.target, data.group and data.leave_out.")

        features = [self._feature(rows, name) for name in names]
        self._warn_of_ids(rows, names)
        return features

    def _warn_of_ids(self, rows: TableRows, names: Sequence[str]) -> None:
        """Warn of features that seem to number or name the rows, unless an option says that they are categories."""
        declared = {*self.categorical, *(self.ordinal or {})}
        ids = [name for name in names if name not in declared and _seems_id(rows, name)]
        if ids:
            setting = shlex.quote(f"data.leave_out={json.dumps([*self.leave_out, *ids], ensure_ascii=False)}")
            warnings.warn(
                f"Every row of {rows.file} has another value for {' and '.join(map(repr, ids))}, as for an id, and the "
                f"models learn from it. To leave it out, set {setting}.",
                stacklevel=2,
            )

    def _feature(self, rows: TableRows, name: str) -> _Feature:
        column = rows.columns[name]
        if column.null_count == len(column):
            raise DataError(f"The column {name!r} of {rows.file} has no values; name it in data.leave_out.")
        if self.missing == "refuse":
            rows.complete(name)

        is_ordered = name in (self.ordinal or {})
        if not is_ordered and (name in self.categorical or not is_number(column.type)):
            return self._one_hot_feature(rows, name, column)

        numbers = self.numbers(rows, name)
        if numbers.null_count:
            numbers = pc.fill_null(as_float(numbers), _median(rows, name, numbers))
        values = rows.finite(name, numbers)[:, None].astype(np.float32)
        return _Feature([name], values, is_indicator=False)

    def numbers(self, rows: TableRows, name: str) -> pa.Array:
        """Return a column of numbers, or the places of its categories in their order."""
        order = (self.ordinal or {}).get(name)
        return rows.columns[name] if order is None else _places_in_order(rows, name, rows.columns[name], order)

    def medians(self, names: Sequence[str]) -> dict[str, float]:
        """Return the numbers that ``missing: fill`` puts in the place of missing ones, for these columns."""
        rows = TableRows.read(self.paths(), self._root())
        return {name: _median(rows, name, self.numbers(rows, name)) for name in names}

    def _one_hot_feature(self, rows: TableRows, name: str, column: pa.Array) -> _Feature:
        """Return a column of categories: an indicator for each."""
        values = np.array([MISSING if value is None else category_name(value) for value in column.to_pylist()])
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


def _seems_id(rows: TableRows, name: str) -> bool:
    """Return whether a column seems to number or name the rows: of the whole table, or of each file."""
    column = rows.columns[name]
    if column.null_count or not (pa.types.is_integer(column.type) or _is_text(column.type)):
        return False
    if _numbers_rows(name, column):
        return True

    start = 0
    for _, count in rows.files:
        if not _numbers_rows(name, column.slice(start, count)):
            return False
        start += count
    return True


def _numbers_rows(name: str, column: pa.Array) -> bool:
    """Whether all values differ and are text, have a name that ends in "id", or are so dense that they count rows.

    Of random integers, 20 below 40 all differ in three of 1,000 columns, and 30 below 60 in one of 7,000.
    """
    if len(column) < _LEAST_ROWS_FOR_IDS:
        return False

    last_word = re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name)[-1:]
    if pa.types.is_integer(column.type) and [word.lower() for word in last_word] != ["id"]:
        span = pc.min_max(column).as_py()
        # Rows that were dropped leave gaps.
        if span["max"] - span["min"] >= 2 * len(column):
            return False
    return pc.count_distinct(column).as_py() == len(column)


def _median(rows: TableRows, name: str, numbers: pa.Array) -> float:
    """The median of a column over all rows but those of a published test split, which would leak into training."""
    training_values = as_float(numbers).filter(pa.array(~rows.is_test)).drop_null()
    if not len(training_values):
        raise DataError(f"The column {name!r} has values in test files only; name it in data.leave_out.")
    return float(np.median(training_values.to_numpy(zero_copy_only=False)))


def _places_in_order(rows: TableRows, name: str, column: pa.Array, order: Sequence[Any]) -> pa.Array:
    """Return the place of each value in the order of the categories, from 0; a missing value has none."""
    categories = [category_name(category) for category in order]
    places: list[int | None] = []
    for row, value in enumerate(column.to_pylist()):
        if value is None:
            places.append(None)
            continue

        category = category_name(value)
        if category not in categories:
            raise DataError(
                f"{rows.place(row)} has {category!r} for {name!r}, which is not in data.ordinal: "
                f"{', '.join(categories)}."
            )
        places.append(categories.index(category))
    return pa.array(places, pa.float64())


def _is_text(column_type: pa.DataType) -> bool:
    return pa.types.is_string(column_type) or pa.types.is_large_string(column_type)


def _warn_of_rare_classes(rows: TableRows, name: str, classes: Sequence[Any], labels: np.ndarray) -> None:
    """Warn of classes with so few of many rows that they may be spelling mistakes."""
    counts = np.bincount(labels)
    rare = np.flatnonzero((counts <= _MOST_ROWS_OF_MISTAKE) & (counts * _LEAST_ROWS_PER_MISTAKE <= len(labels)))
    # With many rare classes, the data are so.
    if not 0 < len(rare) < len(classes) / 2:
        return

    places = []
    for label in rare:
        at = " and ".join(rows.place(int(row)) for row in np.flatnonzero(labels == label))
        places.append(f"{classes[label]!r} ({at})")
    warnings.warn(
        f"Few rows have these classes of {name!r}: {', '.join(places)}. Each is learnt as a class of its own; correct "
        "its value if it is misspelt.",
        stacklevel=2,
    )


def _type_name(column_type: pa.DataType) -> str:
    return "text" if _is_text(column_type) else str(column_type)


def category_name(value: object) -> str:
    """Return the name of a category; of true and false, as YAML writes them."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _refuse_doubtful_categories(
    rows: TableRows, name: str, column_type: pa.DataType, values: np.ndarray, categories: np.ndarray
) -> None:
    """Refuse a column that may not have been meant as categories."""
    if not (_is_text(column_type) or pa.types.is_boolean(column_type)):
        raise DataError(
            f"The column {name!r} of {rows.file} is of type {column_type}, neither numbers nor text; name it in "
            "data.leave_out or in data.categorical."
        )

    present = categories[categories != MISSING]
    are_numerals = [is_numeral(category) for category in present]
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


def is_numeral(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
