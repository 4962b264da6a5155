"""Numbers of things in messages."""

from __future__ import annotations


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return ``"1 round"``, ``"1,200 rounds"``; `plural` is for nouns whose plural is not theirs with an s."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"
