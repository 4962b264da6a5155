"""Tables of features: columns of numbers and of categories, one of which is to be predicted."""

from __future__ import annotations

import json
import re
import shlex
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raypfl.common.errors import ConfigError, DataError, listed
from raypfl.data.datasets.readers.tabular.table import (
    MAX_UNDECLARED,
    ColumnMistakes,
    Table,
    category_name,
    is_text,
    spellings_of,
    warn_of_spaces,
)
from raypfl.data.datasets.readers.tabular.table_rows import TableRows, as_float, is_number
from raypfl.data.datasets.source import DATASETS
from raypfl.data.datasets.tables import TEST_WORDS

_LEAST_ROWS_FOR_IDS = 20
"""Rows from which on a column without two equal values may be told from one that has none by chance."""

_LEAST_DEVIATION = 1e-5
"""Deviation of a column of numbers, as a share of their mean, below which single precision loses too much of it."""

_MOST_MISTAKES = 6
"""Most columns whose mistakes are told in full."""

_NUMBER_SIGNS = re.compile(r"[,%$€£\s]")

MISSING = "(missing)"
# What the index that pandas writes is called in CSV and in Parquet.
_PANDAS_INDEX_NAMES = ("", "__index_level_0__")


@DATASETS.register("table")
@dataclass(frozen=True, kw_only=True)
class FeatureTable(Table):
    """A table of features: a CSV or Parquet file (data.root), or all in a folder and its subfolders.

    Every column is a feature but the target, the group, those in `leave_out` and an index that pandas wrote. Columns of
    numbers are standardised by the clients' training samples. Columns of text and of true and false become a feature
    for each category, which is 1 or 0 and stays so (one-hot). Files with the word "test", "val", "valid" or
    "validation" in their names are the published test split.

    Attributes
    ----------
    categorical : columns of numbers that are categories.
    ordinal : columns whose categories have an order, with the categories in this order: such a column becomes one
        feature, the category's place from 0.
    leave_out : columns that are not features.
    missing : treatment of missing values: ``refuse`` them; or ``fill``: a missing number is the column's median over
        all rows but those of a published test split, and a missing category is one of its own, ``(missing)``. Targets
        and groups are never filled.
    """

    categorical: tuple[str, ...] = ()
    ordinal: dict[str, list[Any]] | None = None
    leave_out: tuple[str, ...] = ()
    missing: Literal["refuse", "fill"] = "refuse"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, order in (self.ordinal or {}).items():
            if len(set(map(category_name, order))) < max(len(order), 1):
                raise ConfigError(f"data.ordinal.{name} is {order}; it must list each category of the column once.")

    def columns_by_option(self) -> dict[str, Sequence[str]]:
        return {
            **super().columns_by_option(),
            "categorical": self.categorical,
            "ordinal": list(self.ordinal or {}),
            "leave_out": self.leave_out,
        }

    def inputs(self, rows: TableRows) -> dict[str, Any]:
        features = self._features(rows)
        feature_names: list[str] = []
        indicators: list[bool] = []
        for feature in features:
            feature_names += feature.names
            indicators += [feature.is_indicator] * len(feature.names)
        return {
            "inputs": np.concatenate([feature.values for feature in features], axis=1),
            "feature_names": feature_names,
            "indicators": indicators,
        }

    def _features(self, rows: TableRows) -> list[_Feature]:
        not_features = {self.target, self.group, *self.leave_out, *_PANDAS_INDEX_NAMES}
        names = [name for name in rows.columns if name not in not_features]
        if not names:
            raise DataError(f"{rows.file} has no features: no columns but data.target, data.group and data.leave_out.")

        features = []
        mistakes: dict[str, str] = {}
        for name in names:
            try:
                features.append(self._feature(rows, name))
            except DataError as error:
                mistakes[repr(name)] = str(error)
        if mistakes:
            sentences = list(mistakes.values())[:_MOST_MISTAKES]
            if len(mistakes) > _MOST_MISTAKES:
                sentences.append(f"Other columns have such, too: {listed(list(mistakes)[_MOST_MISTAKES:])}.")
            raise ColumnMistakes(*sentences)

        self._warn_of_ids(rows, names)
        return features

    def _warn_of_ids(self, rows: TableRows, names: Sequence[str]) -> None:
        """Warn of features that seem to number or name the rows, unless an option says that they are categories."""
        declared = {*self.categorical, *(self.ordinal or {})}
        ids = [name for name in names if name not in declared and _seems_id(rows, name)]
        if ids:
            setting = shlex.quote(f"data.leave_out={json.dumps([*self.leave_out, *ids], ensure_ascii=False)}")
            warnings.warn(
                f"Every row of {rows.file} has a different value for {' and '.join(map(repr, ids))}, as for an id, and "
                f"the models learn from it. To leave it out, set {setting}.",
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
        values = rows.finite(name, numbers)
        _warn_of_rounding(rows, name, values)
        return _Feature([name], values[:, None].astype(np.float32), is_indicator=False)

    def numbers(self, rows: TableRows, name: str) -> pa.Array:
        """Return a column of numbers, or the places of its categories in their order."""
        order = (self.ordinal or {}).get(name)
        return rows.columns[name] if order is None else _places_in_order(rows, name, rows.columns[name], order)

    def medians(self, names: Sequence[str]) -> dict[str, float]:
        """Return the numbers that ``missing: fill`` puts in the place of missing ones, for these columns."""
        rows = TableRows.read(self.tables(), self.root())
        return {name: _median(rows, name, self.numbers(rows, name)) for name in names}

    def _one_hot_feature(self, rows: TableRows, name: str, column: pa.Array) -> _Feature:
        """Return a column of categories: an indicator for each."""
        warn_of_spaces(rows, name, column)
        values = np.array([MISSING if value is None else category_name(value) for value in column.to_pylist()])
        categories, category = np.unique(values, return_inverse=True)
        if name not in self.categorical:
            _refuse_doubtful_categories(rows, name, column.type, values, categories)
            _warn_of_splits(rows, name, categories)

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
    if column.null_count or not (pa.types.is_integer(column.type) or is_text(column.type)):
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
    """Return whether all values differ and are text, have a name that ends in "id", or count rows densely.

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


def _warn_of_rounding(rows: TableRows, name: str, values: np.ndarray) -> None:
    """Warn of numbers whose differences single precision rounds to a hundredth of their deviation or more."""
    mean = float(values.mean())
    deviation = float(values.std())
    if 0 < deviation < _LEAST_DEVIATION * abs(mean):
        warnings.warn(
            f"The numbers in the column {name!r} of {rows.file} are large but differ by little (mean {mean:.6g}, "
            f"deviation {deviation:.2g}), so single precision rounds the differences. Subtract {mean:.6g} from "
            "the column.",
            stacklevel=2,
        )


def _warn_of_splits(rows: TableRows, name: str, categories: np.ndarray) -> None:
    """Warn of a column that seems to say which rows are for tests."""
    if {category.lower() for category in categories.tolist()} <= {"train", "training", *TEST_WORDS}:
        warnings.warn(
            f"The column {name!r} of {rows.file} seems to say which rows are for tests, but is a feature like others. "
            'To test on these rows, put them into a file of their own with "test" in its name, and name the column in '
            "data.leave_out.",
            stacklevel=2,
        )


def _median(rows: TableRows, name: str, numbers: pa.Array) -> float:
    """Return a column's median over all rows but those of a published test split, which would leak into training."""
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

        category = next((spelling for spelling in spellings_of(value) if spelling in categories), None)
        if category is None:
            raise DataError(
                f"{rows.place(row)} has {category_name(value)!r} for {name!r}, which is not in data.ordinal: "
                f"{', '.join(categories)}."
            )
        places.append(categories.index(category))
    return pa.array(places, pa.float64())


def _refuse_doubtful_categories(
    rows: TableRows, name: str, column_type: pa.DataType, values: np.ndarray, categories: np.ndarray
) -> None:
    """Refuse a column that may not have been meant as categories."""
    if not (is_text(column_type) or pa.types.is_boolean(column_type)):
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
            "value empty and write numbers as 1234.5, or name the column in data.categorical."
        )
    if len(categories) > MAX_UNDECLARED:
        raise DataError(
            f"The column {name!r} of {rows.file} is text with {len(categories)} categories, each of which would "
            "become a feature: name it in data.leave_out or, if that is meant, in data.categorical. data=text_table "
            "reads its words."
        )


def is_numeral(text: str) -> bool:
    """Return whether a text is a number, also one like 1,234 or 5 % or $5."""
    try:
        float(_NUMBER_SIGNS.sub("", text))
    except ValueError:
        return False
    return True
