"""What tables of features and of texts have in common: their files, the target, and the client column."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from raypfl.common.errors import ConfigError, DataError, listed, one_message
from raypfl.data.datasets.csv_lines import is_table
from raypfl.data.datasets.labels import and_others, warn_of_classes
from raypfl.data.datasets.raw_data import RawData
from raypfl.data.datasets.readers.tabular.table_rows import TableRows, is_number
from raypfl.data.datasets.source import Reader, files_under
from raypfl.data.datasets.tables import refuse_lists

MAX_UNDECLARED = 100
"""Categories of a column, or integers to predict, beyond which the options must say that they are categories."""

_MOST_ROWS_OF_MISTAKE = 2
"""Most rows of a class that may be a spelling mistake."""

_LEAST_ROWS_PER_MISTAKE = 50
"""Rows of the table, for each row of such a class, from which on it is rare."""


class ColumnMistakes(DataError):
    """Error for mistakes in several columns; its arguments are a sentence for each."""


@dataclass(frozen=True, kw_only=True)
class Table(Reader):
    """A CSV or Parquet file (data.root), or all in a folder and its subfolders, with equal columns.

    Files with the word "test", "val", "valid" or "validation" in their names are the published test split.

    Attributes
    ----------
    target : name of the column to predict.
    task : kind of the target: a class (``classification``) or a number (``regression``). ``auto``: integers, text and
        true or false are classes, other numbers are numbers.
    group : name of the column that says which client a row is from, for ``partition: by_column``; None: there is none.
    files : pattern of the files' names.
    """

    target: str | None = None
    task: Literal["auto", "classification", "regression"] = "auto"
    group: str | None = None
    files: str = "*"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.target is None:
            raise ConfigError("data.target is missing: name the column of the table to predict.")

        option_of: dict[str, str] = {}
        for option, names in self.columns_by_option().items():
            for name in names:
                if name in option_of:
                    raise ConfigError(
                        f"The column {name!r} is in data.{option_of[name]} and in data.{option}; choose one."
                    )
                option_of[name] = option

    def columns_by_option(self) -> dict[str, Sequence[str]]:
        """Return the columns that each option names."""
        return {
            "target": [self.target] if self.target is not None else [],
            "group": [self.group] if self.group is not None else [],
        }

    @abstractmethod
    def inputs(self, rows: TableRows) -> dict[str, Any]:
        """Return the inputs of all rows, and what describes them, as arguments of `RawData`.

        Raises
        ------
        DataError : `ColumnMistakes`, if there may be several.
        """

    def paths(self) -> list[Path]:
        return self.tables()

    def tables(self) -> list[Path]:
        """Return the tables' files."""
        root = self.root()
        paths = [path for path in files_under(root) if is_table(path.name) and path.match(self.files)]
        if not paths:
            present = listed([path.name for path in files_under(root)], 5) or "no file"
            of_pattern = "" if self.files == "*" else f" like {self.files}"
            raise DataError(
                f"There is no file{of_pattern} with the ending .csv, .tsv or .parquet in {root}, but {present}; see "
                "data.files, unpack archives, and write other tables, such as those of Excel, as CSV."
            )
        present_paths = set(paths)
        for path in paths:
            if path.with_suffix("") in present_paths:
                raise DataError(
                    f"{path} seems to be {path.stem}, compressed: remove one of them, or choose one by data.files."
                )
        return paths

    def root(self) -> Path:
        """Return the folder ``data.root``, or the file."""
        file = Path(self.config.root or "").expanduser()
        return file if file.is_file() else self.config.folder("the tables, as CSV or Parquet files")

    def read(self) -> RawData:
        return self.described(self.rows(), self.inputs)

    def rows(self) -> TableRows:
        """Read the tables, which must have all columns that the options name."""
        rows = TableRows.read(self.tables(), self.root())
        rows.refuse_unknown(self.columns_by_option())
        return rows

    def described(self, rows: TableRows, inputs: Callable[[TableRows], Mapping[str, Any]]) -> RawData:
        """Return the data set of all rows, with inputs as :meth:`inputs` returns them.

        Raises
        ------
        DataError : for all mistakes in the columns of inputs, targets and clients.
        """
        parts: dict[str, Any] = {}
        sentences: list[str] = []
        for read_part in (inputs, self._targets, self._groups):
            try:
                parts |= read_part(rows)
            except ColumnMistakes as error:
                sentences += error.args
            except DataError as error:
                sentences.append(str(error))
        if sentences:
            raise DataError(one_message(sentences, rows.file))
        return RawData(test_mask=rows.is_test if rows.is_test.any() else None, **parts)

    def _groups(self, rows: TableRows) -> dict[str, np.ndarray]:
        """Return the client of each row, integers or names, as an argument of `RawData`; nothing without clients."""
        name = self.group
        if name is None:
            return {}
        column = rows.complete(name)
        refuse_lists(column.type, name, rows.file)
        warn_of_spaces(rows, name, column)
        values = column.to_pylist()
        if pa.types.is_boolean(column.type):
            values = [category_name(value) for value in values]
        return {"groups": np.array(values)}

    def _targets(self, rows: TableRows) -> dict[str, Any]:
        """Return the targets of all rows and their names, as arguments of `RawData`."""
        assert self.target is not None
        name = self.target
        column = rows.complete(name)
        refuse_lists(column.type, name, rows.file)
        if self._is_regression(rows, name, column.type):
            numbers = rows.finite(name, column)
            if self.task == "auto":
                remedy = "set data.task=classification; else, data.task=regression"
                warn_of_classes(numbers, f"The column {name!r} of {rows.file}", remedy)
            return {"labels": numbers, "class_names": [name]}

        are_numbers = is_number(column.type)
        if self.task == "auto" and pa.types.is_temporal(column.type):
            raise DataError(
                f"The column {name!r} of {rows.file} is of type {column.type}. To predict a time, write it as a "
                "number, such as days; if each is a class, set data.task=classification."
            )
        warn_of_spaces(rows, name, column)
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
        return {"labels": labels, "class_names": [str(value) for value in classes]}

    def _is_regression(self, rows: TableRows, name: str, column_type: pa.DataType) -> bool:
        if self.task == "auto":
            return is_number(column_type) and not pa.types.is_integer(column_type)
        if self.task == "regression" and not is_number(column_type):
            raise DataError(
                f"The column {name!r} of {rows.file} is {type_name(column_type)}, but data.task is regression."
            )
        return self.task == "regression"


def _warn_of_rare_classes(rows: TableRows, name: str, classes: Sequence[Any], labels: np.ndarray) -> None:
    """Warn of classes with so few of many rows that they may be spelling mistakes."""
    counts = np.bincount(labels)
    rare = np.flatnonzero((counts <= _MOST_ROWS_OF_MISTAKE) & (counts * _LEAST_ROWS_PER_MISTAKE <= len(labels)))
    # With many rare classes, the data are so.
    if not 0 < len(rare) < len(classes) / 2:
        return

    places = []
    for label in rare.tolist():
        places_of_class = [rows.place(int(row)) for row in np.flatnonzero(labels == label)]
        places.append(f"{classes[label]!r} ({' and '.join(places_of_class)})")
    warnings.warn(
        f"Few rows have these classes of {name!r}: {', '.join(places)}. Each is learnt as a class of its own; correct "
        "its value if it is misspelt.",
        stacklevel=2,
    )


def warn_of_spaces(rows: TableRows, name: str, column: pa.Array) -> None:
    """Warn of texts that differ from another only by spaces at their ends, so that they count as another value."""
    if not is_text(column.type):
        return
    values = set(column.unique().to_pylist()) - {None}
    spaced = [value for value in values if value != value.strip() and value.strip() in {*values, ""}]
    if spaced:
        of_rows = np.flatnonzero(np.isin(column.to_numpy(zero_copy_only=False).astype(str), spaced))
        row = int(of_rows[0])
        warnings.warn(
            f"{rows.place(row)} has {column[row].as_py()!r} for {name!r}, with spaces at its ends, so it "
            f"differs from {column[row].as_py().strip()!r}{and_others(of_rows, rows.place)}. Remove the spaces.",
            stacklevel=2,
        )


def category_name(value: object) -> str:
    """Return the name of a category; of true and false, as YAML writes them."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def spellings_of(value: object, text: str | None = None) -> tuple[str, ...]:
    """Return the names that a value may have in other data, first the one here; () if it is missing.

    Whole numbers may have a decimal point: pandas stores integers as floats if some of a column are missing.

    Parameters
    ----------
    text : the value as a CSV file has it.
    """
    if value is None:
        return ()
    names = [category_name(value) if text is None else text, category_name(value)]
    if isinstance(value, int | float) and not isinstance(value, bool) and float(value).is_integer():
        names += [str(int(value)), str(float(value))]
    return tuple(dict.fromkeys(names))


def is_text(column_type: pa.DataType) -> bool:
    return pa.types.is_string(column_type) or pa.types.is_large_string(column_type)


def type_name(column_type: pa.DataType) -> str:
    """Return the type of a column, as messages name it."""
    return "text" if is_text(column_type) else str(column_type)
