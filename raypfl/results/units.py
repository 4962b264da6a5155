"""In what unit, and with how many digits, a metric is printed and drawn."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import floor, isfinite, log10
from statistics import fmean, stdev

from raypfl.objectives import Metric

_SIGNIFICANT = 3


@dataclass(frozen=True)
class Unit:
    """Of a metric: shares are printed in %, other numbers as they are."""

    metric: Metric

    @property
    def factor(self) -> float:
        """By which a value is multiplied."""
        return 100.0 if self.metric.percent else 1.0

    @property
    def sign(self) -> str:
        """Behind a number: ``" %"``, or nothing."""
        return " %" if self.metric.percent else ""

    @property
    def words(self) -> str:
        """What the metric is: ``"accuracy"``."""
        return self.metric.words or self.metric.name

    @property
    def label(self) -> str:
        """Of an axis: ``"accuracy (%)"``."""
        return f"{self.words} (%)" if self.metric.percent else self.words

    @property
    def heading(self) -> str:
        """Of a column, in one line."""
        return (self.metric.heading or self.metric.name).replace("\n", " ")

    def of(self, values: Iterable[float]) -> list[float]:
        """Values in this unit."""
        return [self.factor * value for value in values]

    def digits(self, values: Iterable[float]) -> int:
        """After the point, for such values in this unit: one of a share, else as many as tell the first three apart."""
        largest = max((abs(value) for value in values if isfinite(value)), default=0.0)
        if self.metric.percent or not largest:
            return 1
        return min(max(_SIGNIFICANT - 1 - floor(log10(largest)), 0), 9)

    def over_seeds(self, values: Sequence[float]) -> str:
        """``"94.2"``, or ``"94.2±0.3"`` over several seeds, in this unit without its sign; ``"–"`` without any."""
        scaled = self.of(values)
        return over_seeds(scaled, self.digits(scaled))

    def printed(self, value: float) -> str:
        """One value, in this unit without its sign."""
        scaled = self.factor * value
        return f"{scaled:.{self.digits([scaled])}f}"


def over_seeds(values: Sequence[float], digits: int = 1) -> str:
    """``"94.2"``, or ``"94.2±0.3"`` (standard deviation) over several seeds, or ``"–"`` without any."""
    if not values:
        return "–"
    spread = f"±{stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{fmean(values):.{digits}f}{spread}"


def capital(text: str) -> str:
    """With its first letter in upper case."""
    return text[0].upper() + text[1:]
