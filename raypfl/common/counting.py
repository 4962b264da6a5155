"""Counts and lists, as messages write them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return ``"1 round"``, ``"1,200 rounds"``; `plural` is for nouns with an irregular plural."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def numbered(noun: str, numbers: Sequence[int]) -> str:
    """Return ``"seed 0"``, ``"seeds 0, 1 and 2"``."""
    return f"{noun if len(numbers) == 1 else noun + 's'} {series(map(str, numbers))}"


def series(names: Iterable[str]) -> str:
    """Return ``"a, b and c"`` of one name or more."""
    *first, last = names
    if not first:
        return last
    return f"{', '.join(first)} and {last}"
