"""CSV files: their endings, where their rows begin, and what they are written with."""

from __future__ import annotations

import codecs
import csv
import io
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pyarrow as pa

from raypfl.common.errors import DataError

_COMPRESSIONS = ("", ".gz", ".bz2", ".zst", ".lz4")
_SEPARATORS = (",", ";", "\t", "|")


def is_csv(file: str) -> bool:
    """Return whether the name of a file is that of a CSV or TSV file, compressed or not."""
    return _has_ending(file, ".csv") or _has_ending(file, ".tsv")


def is_table(file: str) -> bool:
    """Return whether the name of a file is that of a table: CSV, TSV or Parquet."""
    return is_csv(file) or file.lower().endswith(".parquet")


def separator_of(file: str) -> str:
    """Return the separator between the columns of a CSV or TSV file, by its name."""
    return "\t" if _has_ending(file, ".tsv") else ","


def _has_ending(file: str, ending: str) -> bool:
    return file.lower().endswith(tuple(ending + compression for compression in _COMPRESSIONS))


def line_of(path: Path, row: int) -> int:
    """Return the line in which a row begins; lines are counted from 1, rows below the header from 0."""
    return next(islice(lines_of_rows(path), row, None))


def lines_of_rows(path: Path) -> Iterator[int]:
    """Yield, for each row below the header, the line in which it begins, from 1."""
    csv.field_size_limit(sys.maxsize)
    with _opened(path) as file:
        reader = csv.reader(file, delimiter=separator_of(path.name))
        next_line = 1
        is_header = True
        for cells in reader:
            # Blank lines are no rows, and a text in quotes may have several lines.
            if cells:
                if not is_header:
                    yield next_line
                is_header = False
            next_line = reader.line_num + 1


def _opened(path: Path) -> io.TextIOWrapper:
    """Open a CSV file, which is decompressed by its ending; line ends stay as they are."""
    return io.TextIOWrapper(pa.input_stream(path), encoding="utf-8", newline="")


def refuse_other_separators(path: Path, file_name: str) -> None:
    """Raise a DataError if the header has no comma, but another separator; a TSV file, no tab."""
    with _opened(path) as file:
        header = file.readline()
    expected = separator_of(path.name)
    for separator in _SEPARATORS:
        if separator in header and expected not in header:
            raise DataError(
                f"{file_name} separates its columns by {separator!r}, not by {expected!r}. Convert it, with pandas: "
                f"pd.read_csv({file_name!r}, sep={separator!r}).to_csv({file_name!r}, sep={expected!r}, index=False). "
                "If its numbers have decimal commas, read_csv also needs decimal=','."
            )


def refuse_other_encodings(path: Path, file_name: str) -> None:
    """Raise a DataError unless a file is UTF-8."""
    try:
        with _opened(path) as file:
            for _ in file:
                pass
    except UnicodeDecodeError as error:
        is_utf16 = error.object.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        raise DataError(
            f"{file_name} is not UTF-8 (byte {error.start} of a block is {error.object[error.start]:#x}). Convert it, "
            f"as with `iconv -f {'UTF-16' if is_utf16 else 'LATIN1'} -t UTF-8`."
        ) from error
