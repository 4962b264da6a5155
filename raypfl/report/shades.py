"""Contenders' colours on light and dark ground."""

from __future__ import annotations

from raypfl.results.contenders import colour

_LIGHT, _DARK = "#ffffff", "#14171c"
_LEAST_CONTRAST = 3.0  # of a line or an area that means something (WCAG 2.2, 1.4.11)


def on_light(index: int) -> str:
    """The contender's colour, darkened as far as white asks for."""
    return _readable(colour(index), _LIGHT, 0)


def on_dark(index: int) -> str:
    """The contender's colour, lightened as far as the page's dark ground asks for."""
    return _readable(colour(index), _DARK, 255)


def contrast(a: str, b: str) -> float:
    """Of two colours ``#rrggbb``, from 1 to 21 (WCAG 2.2)."""
    low, high = sorted((_luminance(a), _luminance(b)))
    return (high + 0.05) / (low + 0.05)


def _readable(hue: str, ground: str, toward: int) -> str:
    mixed, share = hue, 0.0
    while contrast(mixed, ground) < _LEAST_CONTRAST:
        share += 0.02
        mixed = "#" + "".join(f"{round((1 - share) * part + share * toward):02x}" for part in _parts(hue))
    return mixed.lower()


def _parts(hue: str) -> list[int]:
    return [int(hue[i : i + 2], 16) for i in (1, 3, 5)]


def _luminance(hue: str) -> float:
    parts = [part / 255 for part in _parts(hue)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
