"""Rows of a table as inputs of a run's models: its features by name, and the client that each row is from."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raypfl.common.errors import ConfigError, DataError, listed
from raypfl.data.client_names import ClientNames
from raypfl.data.datasets import DataConfig
from raypfl.data.datasets.csv_lines import is_csv, is_table
from raypfl.data.datasets.labels import and_others
from raypfl.data.datasets.readers.tabular.feature_table import MISSING, FeatureTable, is_numeral
from raypfl.data.datasets.readers.tabular.table import spellings_of
from raypfl.data.datasets.readers.tabular.table_rows import (
    TableRows,
    as_float,
    is_number,
    read_table,
    refuse_repeated_names,
)
from raypfl.data.datasets.readers.tabular.text_table import TextTable
from raypfl.data.datasets.tables import read_csv
from raypfl.data.shared_storage import copy_to_this_machine
from raypfl.data.store import cache_folder
from raypfl.engine.building.data_outline import DataOutline

Medians = Callable[[Sequence[str]], Mapping[str, float]]


def inputs_of_rows(rows: NewRows, config: DataConfig, outline: DataOutline) -> np.ndarray:
    """Return the inputs of a run's models for rows like those of its table, ``[n, ...]``.

    Parameters
    ----------
    config : the run's description of its data.

    Raises
    ------
    DataError : if the rows do not fit, with the row and the column.
    """
    reader = config.reader
    if isinstance(reader, TextTable):
        return rows.tokens(outline.vocabulary, reader)
    assert isinstance(reader, FeatureTable)
    return rows.inputs(outline.feature_names, reader, functools.partial(_run_medians, config))


def _run_medians(config: DataConfig, columns: Sequence[str]) -> Mapping[str, float]:
    """Return the medians of columns of the run's table, which is read again."""
    reader = copy_to_this_machine(config, cache_folder(config)).reader
    assert isinstance(reader, FeatureTable)
    return reader.medians(columns)


@dataclass(frozen=True)
class NewRows:
    """The rows of one table, which need not have a target.

    Attributes
    ----------
    name : the table in messages.
    table : the rows.
    texts : the rows as they are written in a CSV file; None: they are from elsewhere.
    file : the file of the rows; None: they are from elsewhere.
    """

    name: str
    table: pa.Table
    texts: pa.Table | None = None
    file: Path | None = None

    @classmethod
    def read(cls, source: Any) -> NewRows:
        """Read a CSV or Parquet file, or take the rows of a table of PyArrow, pandas or Polars.

        Raises
        ------
        ConfigError : if there is no such file, or it is of another kind.
        DataError : if it cannot be read, a column is of mixed types, two have one name, or there are no rows.
        """
        if isinstance(source, str | Path):
            rows = cls._of_file(Path(source).expanduser())
        elif hasattr(source, "__arrow_c_stream__"):
            rows = cls("The table", _arrow_table(source))
        else:
            raise ConfigError(
                f"The rows are {type(source).__name__}; give a CSV or Parquet file, or a table of PyArrow, pandas or "
                "Polars."
            )
        if not rows.table.num_rows:
            raise DataError(f"{rows.name} has no rows.")
        return rows

    @classmethod
    def _of_file(cls, file: Path) -> NewRows:
        if not file.is_file():
            problem = f"{file} is a folder" if file.is_dir() else f"There is no file {file}"
            raise ConfigError(f"{problem}; name the CSV or Parquet file with the rows to predict.")
        if not is_table(file.name):
            raise ConfigError(f"{file} is not a table: its name must end in .csv, .tsv or .parquet.")

        table = read_table(file, file.name)
        texts = read_csv(file, file.name, as_text=table.column_names) if is_csv(file.name) else None
        return cls(file.name, table, texts, file)

    def inputs(self, feature_names: Sequence[str], reader: FeatureTable, medians: Medians) -> np.ndarray:
        """Return the inputs of a run's models, ``float32[n, len(feature_names)]``.

        Parameters
        ----------
        feature_names : the names of the inputs.
        reader : the reader of the run's data.
        medians : a function that returns the numbers by which the run filled missing ones in these columns.

        Raises
        ------
        DataError : if a column is missing, or a value does not fit: text where the run had numbers, a category that it
            did not have, or none where it allowed none.
        """
        positions_by_column: dict[str, dict[str | None, int]] = {}
        for position, feature in enumerate(feature_names):
            column, category = self._column_and_category(feature)
            positions_by_column.setdefault(column, {})[category] = position
        missing = [column for column in positions_by_column if column not in self.table.column_names]
        if missing:
            raise DataError(self._lacks(missing))

        inputs = np.zeros((self.table.num_rows, len(feature_names)), np.float32)
        number_columns = [column for column, positions in positions_by_column.items() if None in positions]
        for column, values in self._numbers(number_columns, reader, medians).items():
            inputs[:, positions_by_column.pop(column)[None]] = values
        for column, positions in positions_by_column.items():
            inputs[np.arange(len(inputs)), self._positions(column, positions)] = 1.0
        return inputs

    def tokens(self, vocabulary: Sequence[str], reader: TextTable) -> np.ndarray:
        """Return the tokens of the rows' texts, ``int64[n, length]``; words that a run did not have are unknown.

        Raises
        ------
        DataError : if there is no column of texts, or one is missing and the run allowed none.
        """
        column = str(reader.text)
        if column not in self.table.column_names:
            raise DataError(self._lacks([column]))
        values = self.table[column]
        if reader.missing == "refuse":
            self._refuse_missing({column: values})
        if self.texts is not None:
            # A few texts of a CSV file may all look like numbers or dates.
            values = pc.if_else(values.is_valid(), self.texts[column], None)
        table = self.table.set_column(self.table.column_names.index(column), column, values)
        return reader.tokens_of(TableRows.of_table(table, self.name), vocabulary)

    def clients(self, column: str, names: ClientNames) -> np.ndarray:
        """Return the number of the client that each row is from, ``int64[n]``.

        Parameters
        ----------
        column : the column that names the clients.
        names : their names.

        Raises
        ------
        DataError : if a row names no client, or one that shares its name with others.
        """
        known = {*names.names, *names}
        number_of = functools.cache(names.client)
        clients = []
        mistakes: dict[int, str] = {}
        for row, spellings in enumerate(self.spellings(column)):
            try:
                if not spellings:
                    raise ConfigError("It names the row's client.")
                clients.append(number_of(next((name for name in spellings if name in known), spellings[0])))
            except ConfigError as error:
                value = repr(spellings[0]) if spellings else "nothing"
                mistakes[row] = f"has {value} for {column!r}. {error}"
        if mistakes:
            rows = list(mistakes)
            raise DataError(
                f"{self._rows.place(rows[0])} {mistakes[rows[0]]} Or predict all rows by the personal model of one "
                f"client (--client) or by the global model (--global){and_others(rows, self._rows.place)}."
            )
        return np.array(clients, np.int64)

    def targets(self, column: str, class_names: Sequence[str] | None) -> np.ndarray:
        """Return the targets, numbers of classes ``int64[n]`` or, if `class_names` is None, numbers ``float64[n]``.

        Raises
        ------
        DataError : if there is no such column, or a row has no target, or one of another kind or class.
        """
        if column not in self.table.column_names:
            raise DataError(
                f"{self.name} has no column {column!r}, the target of the run; its columns are: "
                f"{listed(self.table.column_names)}."
            )
        values = self._rows.complete(column)
        if class_names is None:
            return self._rows.finite(column, self._as_numbers(column, values))
        return np.array(self._positions(column, {name: label for label, name in enumerate(class_names)}), np.int64)

    def spellings(self, column: str) -> list[tuple[str, ...]]:
        """Return the names that each row's value may have in the run's data: as it is written first; () if missing."""
        values = self._rows.columns[column].to_pylist()
        texts = [None] * len(values) if self.texts is None else self.texts[column].to_pylist()
        return [spellings_of(value, text) for value, text in zip(values, texts, strict=True)]

    def numbers(self, column: str) -> np.ndarray:
        """Return a column of numbers, ``float64[n]``; NaN where one is missing."""
        return self._as_numbers(column, self._rows.columns[column]).to_numpy(zero_copy_only=False)

    @functools.cached_property
    def _rows(self) -> TableRows:
        return TableRows.of_table(self.table, self.name, self.file)

    def _column_and_category(self, feature: str) -> tuple[str, str | None]:
        """Return the column that a feature is from and, of an indicator, its category."""
        columns = self.table.column_names
        if feature in columns or "=" not in feature:
            return feature, None
        ends = [match.start() for match in re.finditer("=", feature)]
        # Names of columns and categories may contain "=", too.
        end = next((end for end in ends if feature[:end] in columns), ends[0])
        return feature[:end], feature[end + 1 :]

    def _numbers(self, columns: Sequence[str], reader: FeatureTable, medians: Medians) -> dict[str, np.ndarray]:
        """Return columns of numbers, ``float64[n]`` each; the run's medians in place of missing ones."""
        numbers = {column: self._as_numbers(column, reader.numbers(self._rows, column)) for column in columns}
        incomplete = [column for column, values in numbers.items() if values.null_count]
        if incomplete and reader.missing == "refuse":
            self._refuse_missing(numbers)
        if incomplete:
            for column, median in medians(incomplete).items():
                numbers[column] = pc.fill_null(numbers[column], median)
        return {column: self._rows.finite(column, values) for column, values in numbers.items()}

    def _lacks(self, columns: Sequence[str]) -> str:
        names = " and no column ".join(map(repr, columns))
        return (
            f"{self.name} has no column {names}, which the run was trained with; its columns are: "
            f"{listed(self.table.column_names)}."
        )

    def _refuse_missing(self, columns: Mapping[str, pa.Array]) -> None:
        """Raise a DataError if a value is missing in one of the columns."""
        missing = []
        for column, values in columns.items():
            if values.null_count:
                rows = np.flatnonzero(values.is_null())
                place_of = self._rows.place
                missing.append(f"{place_of(int(rows[0]))} has no {column!r}{and_others(rows, place_of)}")
        if missing:
            raise DataError(
                f"{'; '.join(missing)}, and the run was trained on complete rows only. Fill in the value or leave the "
                "row out, or train with data.missing=fill."
            )

    def _as_numbers(self, column: str, values: pa.Array) -> pa.Array:
        """Return a column as float64, of which some may be missing."""
        if is_number(values.type) or values.null_count == len(values):
            return as_float(values)

        present = [(row, value) for row, value in enumerate(values.to_pylist()) if value is not None]
        # A word among numbers, such as "unknown", explains why the column is text.
        odd = [(row, value) for row, value in present if not is_numeral(str(value))]
        row, value = (odd or present)[0]
        other_places = and_others([row for row, _ in odd], self._rows.place)
        raise DataError(
            f"{self._rows.place(row)} has {value!r} for {column!r}, but the run was trained with numbers{other_places}."
        )

    def _positions(self, column: str, positions: Mapping[Any, int]) -> list[int]:
        """Return the position of each row's category: that of its feature, or the number of its class."""
        spellings_of_rows = self.spellings(column)
        row_positions = []
        unknown = []
        for row, spellings in enumerate(spellings_of_rows):
            spelling = next((spelling for spelling in spellings or (MISSING,) if spelling in positions), None)
            if spelling is None:
                unknown.append(row)
            else:
                row_positions.append(positions[spelling])
        if unknown:
            spellings = spellings_of_rows[unknown[0]]
            problem = f"has {spellings[0]!r} for {column!r}" if spellings else f"has no {column!r}"
            raise DataError(
                f"{self._rows.place(unknown[0])} {problem}, but the run's data have only these categories: "
                f"{listed(positions)}{and_others(unknown, self._rows.place)}."
            )
        return row_positions


def _arrow_table(source: Any) -> pa.Table:
    """Return a table of another library as one of PyArrow."""
    try:
        table = pa.table(source)
    # pandas has columns of any objects, and rows that are no tables.
    except (pa.ArrowException, ValueError, TypeError) as error:
        raise DataError(f"The table cannot be converted to one of PyArrow: {error}") from error
    refuse_repeated_names(table.column_names, "The table")
    return table
