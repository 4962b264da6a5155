"""Colours and marks that tell the methods of a comparison apart, the same in every picture and table."""

from __future__ import annotations

COLOURS = (
    *("#3B82C4", "#E0703C", "#2FA37C", "#B565A7", "#D9A125", "#56B4D3", "#8D6E63", "#7F8C8D"),
    *("#C8364E", "#7A9A2E", "#4F55B5", "#E58FB2"),
)
"""Distinct on light and on dark backgrounds."""

_MARKS = ("", "●", "■", "▲", "◆", "▼")


def colour(index: int) -> str:
    """Return the colour of the group at `index`; colours repeat after the twelfth."""
    return COLOURS[index % len(COLOURS)]


def mark(index: int) -> str:
    """Return a character that tells the group at `index` from one of the same colour; empty for the first of each."""
    return _MARKS[min(index // len(COLOURS), len(_MARKS) - 1)]
