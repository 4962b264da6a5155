"""Texts of any length as tokens: numbers of words, in rows of equal length."""

from __future__ import annotations

import functools
import re
import unicodedata
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

NUM_RESERVED = len(_RESERVED)
"""The number of tokens that are no words, with which a vocabulary begins."""

# Thai, Lao, Burmese, Khmer, Japanese and Chinese.
_UNSPACED = re.compile(r"[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff]")
_WORD_IN_ASCII = re.compile(r"\w+(?:'\w+)*")


def split_text(text: str, unit: str) -> list[str]:
    """Return the words of a text in lower case, without punctuation and emoji; or its characters, as they are."""
    if unit == "characters":
        return list(text)
    # Six times as fast as the pattern for all scripts.
    if text.isascii():
        return _WORD_IN_ASCII.findall(text.lower())
    return _word_pattern().findall(unicodedata.normalize("NFC", text.lower()))


@functools.cache
def _word_pattern() -> re.Pattern[str]:
    # Vowel signs and accents that follow their letter, as in Hindi, Tamil and Thai, are not in \w. The joiners between
    # letters, as in Persian, are not either.
    marks = "".join(chr(code) for code in range(0x1F000) if unicodedata.category(chr(code)).startswith("M"))
    word = rf"\w+(?:[{marks}\u200c\u200d]\w*)*"
    return re.compile(rf"{word}(?:['’]{word})*")


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
    return [*_RESERVED, *by_frequency[: size - NUM_RESERVED]]


def are_unspaced(words: Sequence[str]) -> bool:
    """Return whether most of the words are of scripts that put no spaces between words."""
    return 2 * sum(map(bool, map(_UNSPACED.search, words))) > len(words)


def as_tokens(texts: Sequence[Sequence[str]], vocabulary: Sequence[str], length: int) -> np.ndarray:
    """Return the tokens of texts, ``int64[n, length]``: their first words, and `PADDING` after short texts.

    Parameters
    ----------
    texts : the words of each of n texts.
    vocabulary : the words by their tokens, as `vocabulary_of` returns them.
    """
    token_of = {word: token for token, word in enumerate(vocabulary) if token >= NUM_RESERVED}
    tokens = np.full((len(texts), length), PADDING, np.int64)
    for row, words in enumerate(texts):
        first_tokens = [token_of.get(word, UNKNOWN) for word in words[:length]]
        tokens[row, : len(first_tokens)] = first_tokens
    return tokens


def translated(tokens: np.ndarray, words: Sequence[str], vocabulary: Sequence[str], length: int) -> np.ndarray:
    """Return tokens ``int64[n, any]`` of one vocabulary, `words`, as tokens ``int64[n, length]`` of another."""
    token_of = {word: token for token, word in enumerate(vocabulary)}
    new_tokens = np.array([token_of.get(word, UNKNOWN) for word in words], np.int64)[tokens[:, :length]]
    missing = length - new_tokens.shape[1]
    return np.pad(new_tokens, ((0, 0), (0, missing)), constant_values=PADDING)
