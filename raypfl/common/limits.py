"""Ranges of numbers, declared with a setting or an option: ``lam: Annotated[float, FROM_ZERO]``."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any, NamedTuple

from raypfl.common.annotations import declared


class Limit(NamedTuple):
    """A range of allowed values: in words, as in "it must be at least 1", and whether a value is in it."""

    text: str
    holds: Callable[[Any], bool]

    def expected(self, value: Any, bits: int = 31) -> str:
        """Return what a value must be; empty if it is that. Numbers are stored in 32 bits, whole ones in `bits` + 1."""
        if not self.holds(value):
            return self.text
        if isinstance(value, int) and value >= 2**bits:
            return f"below 2^{bits}"
        is_stored = value == 0 or not isinstance(value, float) or 1e-38 <= abs(value) < 1e38 or self.holds(inf)
        return "" if is_stored else "a number that 32 bits can hold, from 1e-38 to 1e38"


FINITE = Limit("a finite number", lambda v: -inf < v < inf)
COUNT = Limit("at least 1", lambda v: v >= 1)
FROM_ZERO = Limit("0 or more", lambda v: 0 <= v < inf)
FROM_ZERO_OR_AUTO = Limit("0 or more, or auto", lambda v: v == "auto" or FROM_ZERO.holds(v))
POSITIVE = Limit("above 0", lambda v: 0 < v < inf)
POSITIVE_OR_INFINITE = Limit("above 0 (.inf for none)", lambda v: v > 0)
SHARE = Limit("above 0 and at most 1", lambda v: 0 < v <= 1)
CHANCE = Limit("between 0 and 1", lambda v: 0 <= v <= 1)
INSIDE = Limit("above 0 and below 1", lambda v: 0 < v < 1)
BELOW_ONE = Limit("at least 0 and below 1", lambda v: 0 <= v < 1)


def limit_violations(options: Any) -> list[str]:
    """Return ``"lam is -1; it must be 0 or more"`` for every field of a dataclass outside its limits."""
    violations = []
    dataclass: Any = type(options)
    for name, limits in declared(dataclass, Limit).items():
        value = getattr(options, name)
        for limit in limits:
            if value is not None and limit.expected(value):
                violations.append(f"{name} is {value!r}; it must be {limit.expected(value)}")
    return violations
