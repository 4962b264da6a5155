"""How a metric is printed and drawn: its unit, name and digits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import floor, inf, isfinite, isnan, log10, nan
from statistics import fmean, stdev

from raypfl.learning.objectives import Metric

_SIGNIFICANT = 3

LARGE = 1e6
"""From here on, numbers of a metric have a power of ten, such as the squared errors of prices."""


@dataclass(frozen=True)
class Unit:
    """The unit of a metric: shares are in %, other numbers have none."""

    metric: Metric

    @property
    def factor(self) -> float:
        """The factor by which the metric's value becomes a number in this unit."""
        return 100.0 if self.metric.percent else 1.0

    @property
    def sign(self) -> str:
        """What follows a number: ``" %"`` or nothing."""
        return " %" if self.metric.percent else ""

    @property
    def phrase(self) -> str:
        """The metric's name in a sentence: ``"accuracy"``."""
        return self.metric.phrase or self.metric.name

    @property
    def label(self) -> str:
        """The label of an axis: ``"accuracy (%)"``."""
        return f"{self.phrase} (%)" if self.metric.percent else self.phrase

    @property
    def heading(self) -> str:
        """The heading of a column, on one line."""
        return (self.metric.heading or self.metric.name).replace("\n", " ")

    def of(self, values: Iterable[float]) -> list[float]:
        """Return the metric's values in this unit."""
        return [self.factor * value for value in values]

    def order(self, value: float) -> tuple[bool, float]:
        """Return a key that sorts numbers in this unit from the best to the worst, and NaN last."""
        return isnan(value), -value if self.metric.higher_is_better else value

    def digits(self, values: Iterable[float]) -> int:
        """Return the decimals of numbers in this unit: one for a share, else enough for three significant digits.

        -1: some are so large that they need a power of ten; see `number_text`.
        """
        largest = max((abs(value) for value in values if isfinite(value)), default=0.0)
        if self.metric.percent or not largest:
            return 1
        if largest >= LARGE:
            return -1
        return min(max(_SIGNIFICANT - 1 - floor(log10(largest)), 0), 9)

    def text(self, *seeds: float) -> str:
        """Return numbers in this unit without its sign: ``"94.2"``, or ``"94.2±0.3"`` over several seeds."""
        return str(over_seeds(seeds, self.digits(seeds)))

    def in_words(self, *seeds: float) -> str:
        """Return numbers in this unit for a sentence: ``"94.2 ± 0.3 %"``, or ``"a mean squared error of 2,900"``.

        Its blanks around signs do not break lines.
        """
        text = self.text(*seeds).replace("±", "\u00a0±\u00a0")
        return f"{text}\u00a0%" if self.sign else f"a {self.phrase} of {text}"


@dataclass(frozen=True)
class TableCell:
    """A number as it is printed: mean and standard deviation over seeds, and whether it is the best of its column."""

    mean: str
    spread: str = ""
    best: bool = False

    def __str__(self) -> str:
        return f"{self.mean}±{self.spread}" if self.spread else self.mean


def over_seeds(values: Sequence[float], digits: int = 1, best: str | None = None) -> TableCell:
    """Return one number per seed as a cell; ``"–"`` without any.

    Parameters
    ----------
    best : the best mean of the column, as it is printed, so that equal ones all count.
    """
    if not values:
        return TableCell("–")

    mean = number_text(fmean(values), digits)
    spread = number_text(deviation(values), digits) if len(values) > 1 else ""
    return TableCell(mean, spread, mean == best)


def number_text(value: float, digits: int, sign: str = "") -> str:
    """Return a number with so many decimals: ``"2,900.5"``; with -1, ``"2,900"`` or, if it is large, ``"2.934e9"``.

    Parameters
    ----------
    sign : ``"+"``: positive numbers have a sign, too.
    """
    if digits < 0 and LARGE <= abs(value) < inf:
        mantissa, _, exponent = f"{value:{sign}.3e}".partition("e")
        return f"{mantissa}e{int(exponent)}"
    decimals = max(digits, 0)
    return f"{round(value, decimals) + 0.0:{sign},.{decimals}f}"  # never -0.0


def megabyte_digits(values: Iterable[float]) -> int:
    """Return the decimals of a column of megabytes: enough for two significant digits of its smallest number above 0.

    They are one to three, and three if all numbers are below 1 MB, as with a small network.
    """
    spent = [value for value in values if value > 0]
    if not spent or min(spent) >= 1:
        return 1
    return 3 if max(spent) < 1 or min(spent) < 0.1 else 2


def deviation(values: Sequence[float]) -> float:
    """Return the sample standard deviation of two numbers or more; NaN if one of them is infinite or NaN.

    ``statistics.stdev`` raises for these. A loss may be infinite, such as that of an excluded class.
    """
    return stdev(values) if all(map(isfinite, values)) else nan


def capitalised(text: str) -> str:
    """Return the text with an upper-case first letter."""
    return text[0].upper() + text[1:]
