"""The picture of a plan: its first rounds, turn by turn, and the lengths of all rounds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from raypfl.results.drawing.canvas import DATA, GREY, INK, PALE, png
from raypfl.runs.planning import DAY, PERCENTILES, Plan

_MOST_BARS = 400
"""Turns in the picture; further rounds are left out."""

_COLOURS = {"counted": DATA, "late": PALE, "dropped": "#C4453A"}
_LABELS = {"counted": "counts", "late": "late: its work is lost", "dropped": "drops out"}


def draw(plan: Plan, path: str | Path) -> Path:
    """Write a PNG of the first rounds, turn by turn, and of the lengths of all rounds; its folder must exist."""
    with png(path, 10, 6.2) as figure:
        above, below = figure.subplots(2, 1, height_ratios=(2.4, 1))
        _draw_turns(above, plan)
        _draw_lengths(below, plan)
    return Path(path)


def _draw_turns(axes: Axes, plan: Plan) -> None:
    """A bar for each turn, from the shortest of a round to its longest, and a line where a round ends."""
    per_round = np.bincount([turn.round for turn in plan.turns])[1:]
    num_rounds = max(int((np.cumsum(per_round) <= _MOST_BARS).sum()), 1)
    shown = sorted((turn for turn in plan.turns if turn.round <= num_rounds), key=lambda turn: (turn.round, turn.ends))
    scale, unit = _scale(plan.begins[num_rounds - 1] + plan.seconds[num_rounds - 1])

    for kind, colour in _COLOURS.items():
        of_kind = [(place, turn) for place, turn in enumerate(shown) if turn.kind == kind]
        places = [place for place, _ in of_kind]
        lengths = [(turn.ends - turn.begins) / scale for _, turn in of_kind]
        starts = [turn.begins / scale for _, turn in of_kind]
        if places:
            axes.barh(places, lengths, left=starts, height=1.0, color=colour, label=_LABELS[kind], linewidth=0)
    for end in (plan.begins + plan.seconds)[:num_rounds]:
        axes.axvline(end / scale, color=GREY, linewidth=0.6)

    rounds = "The first round" if num_rounds == 1 else f"The first {num_rounds} rounds"
    axes.set(title=f"{rounds}, turn by turn; a grey line is the end of a round", ylabel="turns", yticks=[])
    axes.set(xlabel=f"simulated {unit}", ylim=(len(shown) - 0.5, -0.5), xlim=(0, None))
    axes.grid(False)
    axes.legend(loc="upper right", frameon=True, framealpha=1.0, edgecolor="none")


def _draw_lengths(axes: Axes, plan: Plan) -> None:
    scale, unit = _scale(float(np.percentile(plan.seconds, 95)))
    lengths = plan.seconds / scale
    low, high = lengths.min(), lengths.max()
    if high - low < 1e-6 * high:
        # Rounds that all end at their deadline differ by rounding alone.
        low, high = 0.9 * low, 1.1 * high
    axes.hist(lengths, bins=min(60, max(plan.rounds // 2, 5)), range=(low, high), color=DATA)
    for percent in PERCENTILES:
        position = np.percentile(plan.seconds, percent) / scale
        axes.axvline(position, color=INK, linewidth=0.8, linestyle="--")
        axes.annotate(
            f" {percent} %", (position, 0.92), xycoords=("data", "axes fraction"), color=INK, fontsize=9, va="top"
        )
    axes.set(title=f"How long all {plan.rounds:,} rounds take", xlabel=unit, ylabel="rounds")


def _scale(seconds: float) -> tuple[float, str]:
    """The unit in which so many seconds read well."""
    if seconds < 300:
        return 1.0, "seconds"
    if seconds < 3 * 3600:
        return 60.0, "minutes"
    if seconds < 3 * DAY:
        return 3600.0, "hours"
    return DAY, "days"
