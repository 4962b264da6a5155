"""The rows of the CSV and Parquet files of one table, joined, and messages that say in which file a row is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from raypfl.common.errors import ConfigError, DataError, listed
from raypfl.data.datasets.csv_lines import is_csv
from raypfl.data.datasets.labels import and_others, place
from raypfl.data.datasets.raw_data import in_single_precision
from raypfl.data.datasets.tables import is_test_file, missing_column, read_csv


@dataclass(frozen=True)
class TableRows:
    """The rows of all files, one file after another.

    Attributes
    ----------
    columns : name -> column; numbers as int64 or float64 without NaN, which is missing.
    files : for each file, its name in messages and its number of rows.
    is_test : ``bool[n]``, the rows of a published test split.
    paths : the files, unless the rows are from elsewhere.
    """

    columns: Mapping[str, pa.Array]
    files: list[tuple[str, int]]
    is_test: np.ndarray
    paths: Sequence[Path] = ()

    @classmethod
    def read(cls, paths: Sequence[Path], root: Path) -> TableRows:
        """Read all files, which must have the same columns; `root` is their folder, or the only file."""
        is_folder = paths != [root]
        file_names = [str(path.relative_to(root)) if is_folder else path.name for path in paths]
        tables = [read_table(path, file_name) for path, file_name in zip(paths, file_names, strict=True)]
        column_names = tables[0].column_names
        for file_name, table in zip(file_names, tables, strict=True):
            _refuse_unequal_columns(file_names[0], column_names, file_name, table.column_names)

        counts = [table.num_rows for table in tables]
        if not sum(counts):
            raise DataError(f"{', '.join(file_names)}: the table has no rows.")

        columns = {name: _join_column([table[name] for table in tables]) for name in column_names}
        # A file on its own is no test split, whatever its name.
        is_test = np.repeat([is_folder and is_test_file(file_name) for file_name in file_names], counts)
        return cls(columns, list(zip(file_names, counts, strict=True)), is_test, paths)

    @classmethod
    def of_table(cls, table: pa.Table, name: str, path: Path | None = None) -> TableRows:
        """Return the rows of a table, which messages call `name`; `path` is its file, if it is from one."""
        columns = {column: _join_column([table[column]]) for column in table.column_names}
        is_test = np.zeros(table.num_rows, dtype=bool)
        return cls(columns, [(name, table.num_rows)], is_test, [] if path is None else [path])

    @property
    def file(self) -> str:
        """The first file, as messages name it."""
        return self.files[0][0]

    def place(self, row: int) -> str:
        """Return a row, as messages name it."""
        for index, (file_name, count) in enumerate(self.files):
            if row < count:
                return place(row, file_name, self.paths[index] if self.paths else None)
            row -= count
        raise IndexError(row)

    def refuse_unknown(self, columns_by_option: Mapping[str, Sequence[str]]) -> None:
        """Raise a ConfigError unless there are all columns that ``data.<option>`` names, for each option."""
        unknown = []
        for option, names in columns_by_option.items():
            unknown += [missing_column(name, option, self.columns) for name in names if name not in self.columns]
        if unknown:
            raise ConfigError(f"{self.file} has {', and '.join(unknown)}; its columns are: {listed(self.columns)}.")

    def complete(self, name: str) -> pa.Array:
        """Return a column.

        Raises
        ------
        DataError : if a value is missing.
        """
        column = self.columns[name]
        if column.null_count:
            rows = np.flatnonzero(column.is_null())
            raise DataError(
                f"{self.place(int(rows[0]))} has no {name!r}{and_others(rows, self.place)}. data.missing=fill fills in "
                "features and texts; targets and groups must be given."
            )
        return column

    def finite(self, name: str, column: pa.Array) -> np.ndarray:
        """Return a column of numbers, ``float64[n]``.

        Raises
        ------
        DataError : if a number is infinite in single precision, in which networks compute.
        """
        numbers = as_float(column).to_numpy(zero_copy_only=False)
        infinite = np.flatnonzero(~np.isfinite(in_single_precision(numbers)))
        if infinite.size:
            row = int(infinite[0])
            raise DataError(
                f"{self.place(row)} has {numbers[row]} for {name!r}, which is not finite in single precision (up to "
                f"3.4e38){and_others(infinite, self.place)}."
            )
        return numbers

    def whole(self, name: str, column: pa.Array) -> pa.Array:
        """Return a column of numbers as integers.

        Raises
        ------
        DataError : if a number is no integer.
        """
        numbers = self.finite(name, column)
        fractional = np.flatnonzero(numbers % 1)
        if fractional.size:
            row = int(fractional[0])
            raise DataError(
                f"{self.place(row)} has {numbers[row]} for {name!r}, which is not an integer, as classes are"
                f"{and_others(fractional, self.place)}."
            )
        return pa.array(numbers.astype(np.int64))


def read_table(path: Path, file_name: str) -> pa.Table:
    """Read a CSV or Parquet file; messages call it `file_name`.

    Raises
    ------
    DataError : if it cannot be read, or two columns have one name.
    """
    if is_csv(path.name):
        table = read_csv(path, file_name)
    else:
        try:
            table = pq.ParquetFile(path).read()
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{file_name} is not a readable Parquet file: {error}") from error

    refuse_repeated_names(table.column_names, file_name)
    return table


def refuse_repeated_names(names: Sequence[str], file_name: str) -> None:
    """Raise a DataError if two columns have one name."""
    repeated = [repr(name) for name, count in Counter(names).items() if count > 1]
    if repeated:
        raise DataError(f"{file_name} has two columns called {', and two called '.join(repeated)}; rename one.")


def _refuse_unequal_columns(file: str, columns: list[str], other_file: str, other_columns: list[str]) -> None:
    surplus = [column for column in columns if column not in other_columns]
    if not surplus:
        file, other_file = other_file, file
        surplus = [column for column in other_columns if column not in columns]
    if surplus:
        raise DataError(
            f"{file} has the column {listed(map(repr, surplus), 10)}, but {other_file} does not; see data.files."
        )


def _join_column(parts: list[pa.ChunkedArray]) -> pa.Array:
    """Join a column of all files.

    Its type is that of numbers if all files have numbers, else its own if it is the same in all files, else text.
    """
    decoded = [_decoded(part) for part in parts]

    # In a file in which it has no value, the type of a column says nothing.
    types = {part.type for part in decoded if len(part) > part.null_count}
    if types and all(pa.types.is_unsigned_integer(part_type) for part_type in types):
        joint_type = pa.uint64()
    elif types and all(pa.types.is_integer(part_type) for part_type in types):
        joint_type = pa.int64()
    elif types and all(is_number(part_type) for part_type in types):
        joint_type = pa.float64()
    elif len(types) == 1:
        joint_type = types.pop()
    else:
        joint_type = pa.string()

    chunks = []
    for part in decoded:
        chunks += (as_float(part) if joint_type == pa.float64() else part.cast(joint_type)).chunks
    column = pa.chunked_array(chunks, joint_type).combine_chunks()

    # NaN is a missing number, as in pandas.
    if pa.types.is_floating(joint_type):
        column = pc.if_else(pc.is_nan(column), pa.scalar(None, joint_type), column)
    return column


def _decoded(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return a column without the encodings of pandas' categories (a dictionary) and of Polars' texts (views)."""
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    return column.cast(pa.large_string()) if pa.types.is_string_view(column.type) else column


def as_float(column: pa.Array) -> pa.Array:
    """Return a column of numbers as float64; integers of more than 15 digits are rounded."""
    return column.cast(pa.float64(), safe=False)


def is_number(column_type: pa.DataType) -> bool:
    return pa.types.is_integer(column_type) or pa.types.is_floating(column_type) or pa.types.is_decimal(column_type)
