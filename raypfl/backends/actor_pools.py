"""How many client actors a run has: the arithmetic alone, without Ray."""

from __future__ import annotations

import math


def share_of(actors: int) -> float:
    """What each of so many actors reserves of a GPU: rounded down to Ray's precision, so that all of them fit."""
    return math.floor(10_000 / actors) / 10_000
