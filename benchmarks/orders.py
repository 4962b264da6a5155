"""Whether the methods of a column stand in the same order in two records."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from raypfl.common.counting import counted

Values = Mapping[str, Sequence[float]]
"""Method -> a number for each seed, in a column of a table."""

FEWEST_METHODS = 4
"""Of fewer methods, a rank correlation says next to nothing."""


@dataclass(frozen=True)
class Measured:
    """A column of a record, and what its table calls it."""

    label: str
    values: Values


def order(heading: str, first: Measured, second: Measured, origin: str) -> Iterator[str]:
    """Yield a table of the methods that both columns have, and a sentence on how the orders agree.

    Of a method's seeds, only those count that both columns have. Nothing is yielded for fewer than FEWEST_METHODS.

    Parameters
    ----------
    heading : what the numbers are.
    origin : a sentence that says where the first column comes from, without its full stop.
    """
    methods = [method for method in second.values if method in first.values]
    if len(methods) < FEWEST_METHODS:
        return
    means: dict[str, tuple[float, float]] = {}
    seeds = min(min(len(first.values[method]), len(second.values[method])) for method in methods)
    for method in methods:
        means[method] = (fmean(first.values[method][:seeds]), fmean(second.values[method][:seeds]))

    ranks = [_ranks({method: pair[i] for method, pair in means.items()}) for i in (0, 1)]
    lines = [f"| {heading} | {first.label} | rank | {second.label} | rank | difference |", "|---" * 6 + "|"]
    for method in sorted(methods, key=lambda method: ranks[1][method]):
        before, after = means[method]
        numbers = f"{before:.1f} | {ranks[0][method]} | {after:.1f} | {ranks[1][method]} | {after - before:+.1f}"
        lines.append(f"| {method} | {numbers} |")
    yield "\n".join(lines) + "\n"

    rho, tau = correlations(*zip(*means.values(), strict=True))
    yield (
        f"{origin}; both use the {counted(seeds, 'seed')} that the two tables share. Rank correlation of the two "
        f"columns: ρ {rho:.2f}, τ {tau:.2f}.\n"
    )


def correlations(first: Sequence[float], second: Sequence[float]) -> tuple[float, float]:
    """Return Spearman's and Kendall's rank correlation; NaN if all numbers of a side are equal."""
    from scipy.stats import kendalltau, spearmanr  # slow to import

    return float(spearmanr(first, second).statistic), float(kendalltau(first, second).statistic)


def _ranks(means: Mapping[str, float]) -> dict[str, int]:
    """Return the rank of each method; equal means share the best rank that one of them has."""
    ordered = sorted(means.values(), reverse=True)
    return {method: ordered.index(mean) + 1 for method, mean in means.items()}
