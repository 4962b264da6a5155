"""Ranges of numbers, which a setting or an option names where it is declared: ``lam: Annotated[float, FROM_ZERO]``."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any, NamedTuple

from raypfl.common.declared import declared


class Limit(NamedTuple):
    """A condition, and how a sentence says it."""

    text: str
    holds: Callable[[Any], bool]


COUNT = Limit("at least 1", lambda v: v >= 1)
FROM_ZERO = Limit("0 or more", lambda v: 0 <= v < inf)
FROM_ZERO_OR_AUTO = Limit("0 or more, or auto", lambda v: v == "auto" or FROM_ZERO.holds(v))
POSITIVE = Limit("above 0", lambda v: 0 < v < inf)
POSITIVE_OR_INFINITE = Limit("above 0 (.inf for none)", lambda v: v > 0)
SHARE = Limit("above 0 and at most 1", lambda v: 0 < v <= 1)
CHANCE = Limit("between 0 and 1", lambda v: 0 <= v <= 1)
INSIDE = Limit("above 0 and below 1", lambda v: 0 < v < 1)
BELOW_ONE = Limit("at least 0 and below 1", lambda v: 0 <= v < 1)


def outside(options: Any) -> list[str]:
    """``"lam is -1; it must be 0 or more"`` for every field of a dataclass that is outside of its declared limit."""
    said = []
    kind: Any = type(options)
    for name, limits in declared(kind, Limit).items():
        value = getattr(options, name)
        said += [f"{name} is {value!r}; it must be {limit.text}" for limit in limits if not _fits(value, limit)]
    return said


def _fits(value: Any, limit: Limit) -> bool:
    return value is None or limit.holds(value)
