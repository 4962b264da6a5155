"""Texts of any length as tokens: numbers of words, in rows of equal length."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

UNITS = ("words", "characters")
"""What texts are split into."""

PADDING = 0
"""The token that fills a short text up to the length of all; it is no word."""

UNKNOWN = 1
"""The token of a word that the vocabulary lacks."""

_RESERVED = ("(padding)", "(unknown)")
_WORD = re.compile(r"\w+(?:['’]\w+)*")


def split_text(text: str, unit: str) -> list[str]:
    """Return the words of a text in lower case, without punctuation; or its characters, as they are."""
    return list(text) if unit == "characters" else _WORD.findall(text.lower())


def vocabulary_of(texts: Iterable[Sequence[str]], size: int) -> list[str]:
    """Return the words of texts by their tokens: two reserved ones, then the most frequent words.

    Parameters
    ----------
    texts : the words of each text.
    size : largest length of the vocabulary. Of equally frequent words, the first by alphabet are in it.
    """
    counts: Counter[str] = Counter()
    for words in texts:
        counts.update(words)
    by_frequency = sorted(counts, key=lambda word: (-counts[word], word))
    return [*_RESERVED, *by_frequency[: size - len(_RESERVED)]]


def as_tokens(texts: Sequence[Sequence[str]], vocabulary: Sequence[str], length: int) -> np.ndarray:
    """Return the tokens of texts, ``int64[n, length]``: their first words, and `PADDING` after short texts.

    Parameters
    ----------
    texts : the words of each of n texts.
    vocabulary : the words by their tokens, as `vocabulary_of` returns them.
    """
    token_of = {word: token for token, word in enumerate(vocabulary) if token >= len(_RESERVED)}
    tokens = np.full((len(texts), length), PADDING, np.int64)
    for row, words in enumerate(texts):
        kept = [token_of.get(word, UNKNOWN) for word in words[:length]]
        tokens[row, : len(kept)] = kept
    return tokens


def translated(tokens: np.ndarray, words: Sequence[str], vocabulary: Sequence[str], length: int) -> np.ndarray:
    """Return tokens ``int64[n, any]`` of one vocabulary, `words`, as tokens ``int64[n, length]`` of another."""
    token_of = {word: token for token, word in enumerate(vocabulary)}
    new_tokens = np.array([token_of.get(word, UNKNOWN) for word in words], np.int64)[tokens[:, :length]]
    missing = length - new_tokens.shape[1]
    return np.pad(new_tokens, ((0, 0), (0, missing)), constant_values=PADDING)
