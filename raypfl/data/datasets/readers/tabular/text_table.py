"""Tables of texts: a column whose words a network reads, and a target."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import pyarrow.compute as pc

from raypfl.common.errors import ConfigError, DataError
from raypfl.data.datasets.hub_tokens import hub_tokens, tokenizer_files, tokenizer_of, vocabulary_of_hub
from raypfl.data.datasets.raw_data import RawData
from raypfl.data.datasets.readers.tabular.table import Table, is_text, type_name
from raypfl.data.datasets.readers.tabular.table_rows import TableRows
from raypfl.data.datasets.source import DATASETS
from raypfl.data.datasets.words import NUM_RESERVED, UNITS, are_unspaced, as_tokens, split_text, vocabulary_of
from raypfl.models.published.transformers import FAMILY

VOCABULARY = 10_000
"""The default of :attr:`TextTable.vocabulary`."""


@DATASETS.register("text_table")
@dataclass(frozen=True, kw_only=True)
class TextTable(Table):
    """A table of texts with a target: a CSV or Parquet file (data.root), or all in a folder and its subfolders.

    A network gets the numbers of a text's words, ``int64[b, length]``; shorter texts end in zeros. Networks for texts
    leave these out: ``fasttext``, ``text_cnn`` and ``text_transformer``.

    Attributes
    ----------
    text : name of the column with the texts. Other columns have no effect, but for the target and the group.
    tokens : what is a token: ``words`` in lower case without punctuation; ``characters``; or those of a language model,
        ``transformers:NAME``.
    vocabulary : largest number of different words or characters, of which two are reserved. The most frequent ones of
        all rows but those of a published test split have a number; all others count as one unknown word.
    length : number of tokens of a text that a network sees: the first ones.
    missing : treatment of missing texts: ``refuse`` them, or ``fill`` in empty ones.
    """

    shared_with_pools: ClassVar[tuple[str, ...]] = ("tokens", "vocabulary", "length")

    text: str | None = None
    tokens: str = "words"
    vocabulary: int = VOCABULARY
    length: int = 64
    missing: Literal["refuse", "fill"] = "refuse"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.text is None:
            raise ConfigError("data.text is missing: name the column of the table that has the texts.")
        if self.tokens not in UNITS and not self._of_model:
            raise ConfigError(f"data.tokens is {self.tokens!r}, but must be {', '.join(UNITS)} or transformers:NAME.")
        if self._of_model and self.vocabulary != VOCABULARY:
            raise ConfigError(f"data.vocabulary has no effect with the tokens of {self.tokens}; leave it out.")
        for name, least in (("vocabulary", 3), ("length", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"data.{name} is {getattr(self, name)}, but must be at least {least}.")

    def paths(self) -> list[Path]:
        return [*super().paths(), *(tokenizer_files(self.tokens) if self._of_model else [])]

    def columns_by_option(self) -> dict[str, Sequence[str]]:
        return {**super().columns_by_option(), "text": [self.text] if self.text is not None else []}

    def inputs(self, rows: TableRows) -> dict[str, Any]:
        if self._of_model:
            tokenizer = tokenizer_of(self.tokens)
            tokens = hub_tokens(tokenizer, self._texts(rows), self.length)
            return {"inputs": tokens, "vocabulary": vocabulary_of_hub(tokenizer)}

        texts = [split_text(text, self.tokens) for text in self._texts(rows)]
        training_texts = (words for words, is_test in zip(texts, rows.is_test, strict=True) if not is_test)
        vocabulary = vocabulary_of(training_texts, self.vocabulary)
        if len(vocabulary) == NUM_RESERVED:
            raise DataError(
                f"No text in the column {self.text!r} of {rows.file} has {self.tokens}: those of punctuation and emoji "
                "need data.tokens=characters."
            )
        if self.tokens == "words" and are_unspaced(vocabulary[NUM_RESERVED:]):
            warnings.warn(
                f"Most words in the column {self.text!r} of {rows.file} are in a script without spaces, so whole "
                "sentences count as words. Set data.tokens=characters.",
                stacklevel=2,
            )
        return {"inputs": as_tokens(texts, vocabulary, self.length), "vocabulary": vocabulary}

    def read_in(self, vocabulary: list[str]) -> RawData:
        def inputs(rows: TableRows) -> dict[str, Any]:
            return {"inputs": self.tokens_of(rows, vocabulary), "vocabulary": vocabulary}

        return self.described(self.rows(), inputs)

    def tokens_of(self, rows: TableRows, vocabulary: Sequence[str]) -> np.ndarray:
        """Return the tokens of new rows, ``int64[n, length]``, in the vocabulary of other ones.

        Raises
        ------
        ConfigError : if it is no longer that of the language model.
        """
        texts = self._texts(rows)
        if self._of_model:
            tokenizer = tokenizer_of(self.tokens)
            if vocabulary_of_hub(tokenizer) != list(vocabulary):
                raise ConfigError(f"The tokenizer of {self.tokens} has changed: its tokens are no longer the models'.")
            return hub_tokens(tokenizer, texts, self.length)
        return as_tokens([split_text(text, self.tokens) for text in texts], vocabulary, self.length)

    @property
    def _of_model(self) -> bool:
        """Whether the tokens are those of a language model."""
        return self.tokens.startswith(FAMILY)

    def _texts(self, rows: TableRows) -> list[str]:
        """Return each row's text."""
        name = str(self.text)
        rows.refuse_unknown({"text": [name]})
        column = rows.columns[name] if self.missing == "fill" else rows.complete(name)
        if column.null_count < len(column) and not is_text(column.type):
            raise DataError(f"The column {name!r} of {rows.file} is {type_name(column.type)}, not text.")
        return pc.fill_null(column.cast("string"), "").to_pylist()
