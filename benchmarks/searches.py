"""What the page of published tables says of a study with a search: what it chose."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from raypfl.common.counting import counted


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


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _space(space: Mapping[str, Any]) -> str:
    ((kind, values),) = space.items()
    if kind in ("choice", "grid"):
        return " or ".join(map(str, values))
    text = f"{values[0]:g} to {values[1]:g}"
    return f"{text}, logarithmic" if "log" in kind else text
