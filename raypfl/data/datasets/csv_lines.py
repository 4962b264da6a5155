"""Where the rows of a CSV file begin, and what it is written with."""

from __future__ import annotations

import codecs
import csv
import sys
from pathlib import Path

from raypfl.common.errors import DataError

_OTHER_SEPARATORS = (";", "\t", "|")


def line_of(path: Path, row: int) -> int:
    """Return the line in which a row begins; lines are counted from 1, rows below the header from 0."""
    csv.field_size_limit(sys.maxsize)
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.reader(file)
        next_line = 1
        rows_left = row + 1  # and the header
        for cells in reader:
            # Blank lines are no rows, and a text in quotes may have several lines.
            if cells:
                if not rows_left:
                    return next_line
                rows_left -= 1
            next_line = reader.line_num + 1
    raise IndexError(row)


def refuse_other_separators(path: Path, file_name: str) -> None:
    """Raise a DataError if the header has no comma, but another separator."""
    with path.open("rb") as file:
        header = file.readline()
    for separator in _OTHER_SEPARATORS:
        if separator.encode() in header and b"," not in header:
            raise DataError(
                f"{file_name} separates its columns by {separator!r}, not by commas. Write it anew, with pandas: "
                f"pd.read_csv({file_name!r}, sep={separator!r}).to_csv({file_name!r}, index=False). If its numbers "
                "have decimal commas, read_csv also needs decimal=','."
            )


def refuse_other_encodings(path: Path, file_name: str) -> None:
    """Raise a DataError unless a file is UTF-8."""
    try:
        with path.open(encoding="utf-8") as file:
            for _ in file:
                pass
    except UnicodeDecodeError as error:
        is_utf16 = error.object.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        raise DataError(
            f"{file_name} is not UTF-8 (byte {error.start} of a block is {error.object[error.start]:#x}). Convert it, "
            f"as with `iconv -f {'UTF-16' if is_utf16 else 'LATIN1'} -t UTF-8`."
        ) from error
