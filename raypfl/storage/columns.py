"""Tables in memory, in compact arrays by column."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

KINDS = {
    "int32": "i",
    "int64": "q",
    "float64": "d",
    "float64 or none": "d",
    "text": "i",
    "int32 list": "q",
    "bytes": "q",
}
"""Kind of a column -> type code of its array: of numbers (NaN where one is missing), of codes of texts, or of the ends
of lists and bytes."""

_ITEMS = {"int32 list": "i", "bytes": "B"}
"""Kind of a column of lists or bytes -> type code of the array with their concatenated items."""

_NUMBERS = frozenset({"int32", "int64", "float64"})
"""Kinds of columns whose arrays hold values as they are."""


class Columns:
    """A table in memory that grows at its end: a few bytes a value, no Python objects.

    Parameters
    ----------
    kinds : column -> its kind, one of `KINDS`.
    """

    def __init__(self, kinds: Mapping[str, str]):
        self.kinds = dict(kinds)
        self.clear()

    def clear(self) -> None:
        """Delete all rows."""
        self._length = 0
        self._arrays = {name: array(KINDS[kind]) for name, kind in self.kinds.items()}
        self._items = {name: array(_ITEMS[kind]) for name, kind in self.kinds.items() if kind in _ITEMS}

        # Column of texts -> each different text -> its code.
        self._words: dict[str, dict[str, int]] = {name: {} for name, kind in self.kinds.items() if kind == "text"}

    def __len__(self) -> int:
        return self._length

    def append(self, **row: Any) -> None:
        """Add one row; the errors are those of :meth:`extend`."""
        self._refuse_other_columns(row)
        for name, value in row.items():
            if self.kinds[name] in _NUMBERS:
                self._arrays[name].append(value)
            else:
                self._arrays[name].extend(self._encode(name, (value,)))
        self._length += 1

    def extend(self, columns: Mapping[str, Iterable[Any]]) -> None:
        """Add rows, given column by column.

        Raises
        ------
        ValueError : if a column is missing, unknown, or not as long as the others.
        """
        self._refuse_other_columns(columns)
        for name, values in columns.items():
            self._arrays[name].extend(self._encode(name, values))

        lengths = {name: len(values) for name, values in self._arrays.items()}
        if len(set(lengths.values())) > 1:
            self.cut(self._length)
            raise ValueError(f"The columns of new rows differ in length: the table would have {lengths}.")
        self._length = max(lengths.values(), default=0)

    def _refuse_other_columns(self, columns: Mapping[str, Any]) -> None:
        if columns.keys() != self.kinds.keys():
            raise ValueError(f"These are rows of {sorted(columns)}, the table has {sorted(self.kinds)}.")

    def _encode(self, name: str, values: Iterable[Any]) -> Iterable[Any]:
        """Encode new values for a column's array; items of lists and bytes are stored separately."""
        if name in self._words:
            words = self._words[name]
            return [words.setdefault(value, len(words)) for value in values]

        if name in self._items:
            items = self._items[name]
            ends = []
            for value in values:
                items.extend(value)
                ends.append(len(items))
            return ends

        if self.kinds[name] == "float64 or none":
            return [math.nan if value is None else value for value in values]
        return values.tolist() if isinstance(values, np.ndarray) else values

    def cut(self, length: int) -> None:
        """Delete all rows after the first `length`."""
        for name, values in self._arrays.items():
            del values[length:]
            if name in self._items:
                num_items = values[-1] if values else 0
                del self._items[name][num_items:]
        self._length = min(length, self._length)

    def span(self, name: str, value: int) -> tuple[int, int]:
        """Return the first row with a value of an ascending column, and the row after the last."""
        values = self._arrays[name]
        return bisect_left(values, value), bisect_right(values, value)

    def rows(self, first: int = 0, end: int | None = None) -> Iterator[tuple[Any, ...]]:
        """Return rows as tuples, of a table without columns of lists."""
        columns: list[Iterable[Any]] = []
        for name, values in self._arrays.items():
            column: Iterable[Any] = values[first:end]
            if name in self._words:
                words = self.words(name)
                column = [words[code] for code in column]
            columns.append(column)

        return zip(*columns, strict=True)

    def values(self, name: str) -> np.ndarray:
        """Return a copy of a column: numbers, codes of texts (see `words`), or ends of lists (see `items`)."""
        return np.array(self._arrays[name])

    def words(self, name: str) -> list[str]:
        """Return the texts that the codes of a column stand for."""
        return list(self._words[name])

    def items(self, name: str) -> np.ndarray:
        """Return the concatenated lists of a column: ``int32[...]``, or ``uint8[...]`` of bytes."""
        return np.array(self._items[name])
