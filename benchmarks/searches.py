"""What the page of published tables says of a study with a search: what it chose, and whether the order changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from raypfl.common.counting import counted

Values = Mapping[str, Sequence[float]]
"""Method -> a number for each seed, in a column of a table."""

FEWEST_METHODS = 4
"""Of fewer methods, a rank correlation says next to nothing."""


def chosen(search: Mapping[str, Any], trials: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a sentence on a search, and a table of what it chose for each row.

    Parameters
    ----------
    search, trials : those of a study's record.
    """
    shared = ", ".join(f"`{key}` ({_space(space)})" for key, space in search["shared"].items())
    seconds = [trial["cpu_seconds"] for trial in trials]
    cost = "" if None in seconds else f" ({len(trials)} in all, {sum(seconds) / 3600:.1f} CPU hours)"
    yield (
        f"Every method had {search['trials']} trials{cost}, each trained with {counted(search['seeds'], 'seed')} and "
        "evaluated on validation data alone. "
        f"All searched {shared}, at the same values; some also options of their own.\n"
    )
    rows: dict[tuple[str, str, str], list[Mapping[str, Any]]] = {}
    for trial in trials:
        rows.setdefault((trial["method"], trial["down"], trial["across"]), []).append(trial)

    lines = ["| method | chosen | own space | score | other trials | CPU s of all |", "|---|---|---|---|---|---|"]
    for position, row_trials in rows.items():
        spaces = search["methods"].get(position[0], {})
        own_space = ", ".join(f"`{key}` {_space(space)}" for key, space in spaces.items())
        lines.append(f"| {' · '.join(filter(None, position))} | {' | '.join(_row(row_trials, own_space or '–'))} |")
    yield "\n".join(lines) + "\n"


def _row(trials: Sequence[Mapping[str, Any]], own_space: str) -> list[str]:
    """Return what is chosen, the space, the scores and the cost of the trials of one row."""
    values = score = "–"
    scores_of_others = []
    for trial in trials:
        if trial["chosen"]:
            values = ", ".join(f"`{key}` {_text(value)}" for key, value in trial["values"].items())
            score = f"{trial['score']:.1f}"
        elif trial["score"] is not None:
            scores_of_others.append(trial["score"])

    others = f"{min(scores_of_others):.1f} to {max(scores_of_others):.1f}" if scores_of_others else "–"
    seconds = [trial["cpu_seconds"] for trial in trials]
    return [values, own_space, score, others, "–" if None in seconds else f"{sum(seconds):.0f}"]


def order(heading: str, fixed: Values, searched: Values, origin: str) -> Iterator[str]:
    """Yield a table of the methods that were measured with fixed and with searched settings, and how the orders agree.

    Parameters
    ----------
    fixed, searched : what was measured; only the seeds count that both have.
    origin : the title of the table with fixed settings.
    """
    methods = [method for method in searched if method in fixed]
    if len(methods) < FEWEST_METHODS:
        return
    means: dict[str, tuple[float, float]] = {}
    seeds = min(min(len(fixed[method]), len(searched[method])) for method in methods)
    for method in methods:
        means[method] = (fmean(fixed[method][:seeds]), fmean(searched[method][:seeds]))

    from scipy.stats import kendalltau, spearmanr  # slow to import

    ranks = [_ranks({method: pair[i] for method, pair in means.items()}) for i in (0, 1)]
    lines = [f"| {heading} | fixed | rank | searched | rank | difference |", "|---|---|---|---|---|---|"]
    for method in sorted(methods, key=lambda method: ranks[1][method]):
        before, after = means[method]
        numbers = f"{before:.1f} | {ranks[0][method]} | {after:.1f} | {ranks[1][method]} | {after - before:+.1f}"
        lines.append(f"| {method} | {numbers} |")
    yield "\n".join(lines) + "\n"

    columns = list(zip(*means.values(), strict=True))
    rho = spearmanr(*columns).statistic
    tau = kendalltau(*columns).statistic
    yield (
        f"Fixed settings are those of {origin}; both are over the {counted(seeds, 'seed')} that both have. Rank "
        f"correlation of the two columns: ρ {rho:.2f}, τ {tau:.2f}.\n"
    )


def _ranks(means: Mapping[str, float]) -> dict[str, int]:
    ordered = sorted(means, key=lambda method: -means[method])
    return {method: rank for rank, method in enumerate(ordered, start=1)}


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _space(space: Mapping[str, Any]) -> str:
    ((kind, values),) = space.items()
    if kind in ("choice", "grid"):
        return " or ".join(map(str, values))
    text = f"{values[0]:g} to {values[1]:g}"
    return f"{text}, logarithmic" if "log" in kind else text
