"""Tables of texts: a column whose words a network reads, and a target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pyarrow.compute as pc

from raypfl.common.errors import ConfigError, DataError
from raypfl.data.datasets.readers.tabular.table import Table, is_text, type_name
from raypfl.data.datasets.source import DATASETS
from raypfl.data.datasets.table_rows import TableRows
from raypfl.data.datasets.words import Unit, as_tokens, split_text, vocabulary_of


@DATASETS.register("text_table")
@dataclass(frozen=True, kw_only=True)
class TextTable(Table):
    """A table of texts with a target: a CSV or Parquet file (data.root), or all in a folder and its subfolders.

    A network gets the numbers of a text's words, ``int64[b, length]``; shorter texts end in zeros. Networks for texts
    leave these out: ``fasttext``, ``text_cnn`` and ``text_transformer``.

    Attributes
    ----------
    text : name of the column with the texts. Other columns have no effect, but for the target and the group.
    tokens : what is a token: ``words`` in lower case without punctuation, or ``characters``.
    vocabulary : largest number of different tokens, of which two are reserved. The most frequent ones of all rows but
        those of a published test split have a number; all others count as one unknown word.
    length : number of tokens of a text that a network sees: the first ones.
    missing : treatment of missing texts: ``refuse`` them, or ``fill`` in empty ones.
    """

    text: str | None = None
    tokens: Unit = "words"
    vocabulary: int = 10_000
    length: int = 64
    missing: Literal["refuse", "fill"] = "refuse"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.text is None:
            raise ConfigError("data.text is missing: name the column of the table that has the texts.")
        for name, least in (("vocabulary", 3), ("length", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"data.{name} is {getattr(self, name)}, but must be at least {least}.")

    def columns_by_option(self) -> dict[str, Sequence[str]]:
        return {**super().columns_by_option(), "text": [self.text] if self.text is not None else []}

    def inputs(self, rows: TableRows) -> dict[str, Any]:
        texts = self._texts(rows)
        training_texts = (words for words, is_test in zip(texts, rows.is_test, strict=True) if not is_test)
        vocabulary = vocabulary_of(training_texts, self.vocabulary)
        return {"inputs": as_tokens(texts, vocabulary, self.length), "vocabulary": vocabulary}

    def tokens_of(self, rows: TableRows, vocabulary: Sequence[str]) -> np.ndarray:
        """Return the tokens of new rows, ``int64[n, length]``, in the vocabulary of other ones."""
        return as_tokens(self._texts(rows), vocabulary, self.length)

    def _texts(self, rows: TableRows) -> list[list[str]]:
        """Return the words of each row's text."""
        name = str(self.text)
        rows.refuse_unknown("text", name)
        column = rows.columns[name] if self.missing == "fill" else rows.complete(name)
        if column.null_count < len(column) and not is_text(column.type):
            raise DataError(f"The column {name!r} of {rows.file} is {type_name(column.type)}, not text.")
        filled = pc.fill_null(column.cast("string"), "")
        return [split_text(text, self.tokens) for text in filled.to_pylist()]
