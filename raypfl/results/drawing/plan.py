"""The picture of a plan: its first rounds, turn by turn, the lengths of all rounds, and how stale replies are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import fill

import numpy as np
from matplotlib.axes import Axes

from raypfl.common.counting import counted
from raypfl.results.drawing.canvas import DATA, GREY, INK, PALE, png
from raypfl.results.drawing.curves import scale, scale_logarithmic, time_scale
from raypfl.runs.planning.plan import PERCENTILES, Plan
from raypfl.runs.planning.turns import PlannedTurn

_TITLE_WIDTH = 75  # characters across the figure

_MOST_BARS = 200
"""Turns in the picture, about; further rounds are left out."""

_FEWEST_ROUNDS = 4
"""Rounds that are drawn even if they have more turns."""

_PACE_COLOURS = ("#8FC1E8", DATA, "#D98A3D")
_PACE_LABELS = ("fastest third of devices", "middle third", "slowest third")
_OTHER_COLOURS = {"late": "#9BA5AF", "dropped": "#C4453A", "unfinished": PALE}
_OTHER_LABELS = {"late": "late: its work is lost", "dropped": "drops out", "unfinished": "at work when the run ends"}
_WAITING = "#EDF0F3"


@dataclass(frozen=True)
class _Bars:
    """Turns that are drawn in one colour."""

    turns: list[PlannedTurn]
    label: str
    colour: str


def draw(plan: Plan, path: str | Path, title: str) -> Path:
    """Write a PNG of the first rounds, turn by turn, and of the lengths of all rounds; its folder must exist."""
    with png(path, 10, 6.5) as figure:
        figure.suptitle(fill(title, _TITLE_WIDTH), fontsize=13, fontweight="bold")
        rows = figure.add_gridspec(2, 1, height_ratios=(2.4, 1))
        above = figure.add_subfigure(rows[0])
        below = figure.add_subfigure(rows[1])
        _draw_turns(above.subplots(), plan)
        if plan.staleness is None:
            _draw_lengths(below.subplots(), plan)
        else:
            left, right = below.subplots(1, 2)
            _draw_lengths(left, plan)
            _draw_staleness(right, plan.staleness)
    return Path(path)


def _draw_turns(axes: Axes, plan: Plan) -> None:
    """Draw a row for each client that is at work at a time: its turns, and its waits for the end of the round."""
    num_rounds = _num_drawn_rounds(plan.turns)
    round_ends = (plan.begins + plan.seconds)[:num_rounds]
    seconds, unit = time_scale(round_ends[-1])
    shown = [turn for turn in plan.turns if turn.round <= num_rounds]
    row_of_place = {place: row for row, place in enumerate(sorted({turn.place for turn in shown}))}

    for bars in _bars(shown, round_ends, waits=plan.staleness is None):
        rows = [row_of_place[turn.place] for turn in bars.turns]
        begins = np.array([turn.begins for turn in bars.turns]) / seconds
        lengths = np.array([turn.ends for turn in bars.turns]) / seconds - begins
        axes.barh(rows, lengths, 1.0, begins, color=bars.colour, label=bars.label, edgecolor="white", linewidth=0.4)
    for end in round_ends:
        axes.axvline(end / seconds, color=GREY, linewidth=0.6)

    rounds = "The first round" if num_rounds == 1 else f"The first {num_rounds} rounds"
    axes.set(title=f"{rounds}, turn by turn; a grey line is the end of a round", yticks=[])
    axes.set(xlabel=f"simulated {unit}", xlim=(0, round_ends[-1] / seconds), ylim=(len(row_of_place) - 0.5, -0.5))
    axes.set(ylabel=_rows_label(shown, len(row_of_place)))
    axes.grid(False)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _bars(turns: Sequence[PlannedTurn], round_ends: np.ndarray, waits: bool) -> list[_Bars]:
    """Return the turns of each kind, in the order of the legend.

    `waits` : whether clients whose turns are over wait for the end of their round.
    """
    counted = [turn for turn in turns if turn.kind == "counted"]
    has_paces = len({turn.pace for turn in turns}) > 1
    kinds = []
    for pace, colour in enumerate(_PACE_COLOURS):
        label = _PACE_LABELS[pace] if has_paces else "counts"
        kinds.append(_Bars([turn for turn in counted if turn.pace == pace], label, colour))

    for kind, colour in _OTHER_COLOURS.items():
        kinds.append(_Bars([turn for turn in turns if turn.kind == kind], _OTHER_LABELS[kind], colour))

    if waits:
        waiting = [replace(turn, begins=turn.ends, ends=round_ends[turn.round - 1]) for turn in counted]
        kinds.append(_Bars(waiting, "waits for the round's end", _WAITING))
    return [bars for bars in kinds if bars.turns]


def _num_drawn_rounds(turns: Sequence[PlannedTurn]) -> int:
    per_round = np.bincount([turn.round for turn in turns])[1:]
    num_rounds = int((np.cumsum(per_round) <= _MOST_BARS).sum())
    return min(max(num_rounds, _FEWEST_ROUNDS), len(per_round))


def _rows_label(turns: Sequence[PlannedTurn], num_rows: int) -> str:
    num_places = 1 + max(turn.place for turn in turns)
    return "clients at work" if num_rows == num_places else f"{num_rows} of {num_places:,} clients at work"


def _draw_lengths(axes: Axes, plan: Plan) -> None:
    seconds, unit = time_scale(float(np.percentile(plan.seconds, 95)))
    lengths = plan.seconds / seconds
    low, high = lengths.min(), lengths.max()
    if high - low < 1e-6 * high:
        # Rounds that all end at their deadline differ by rounding alone.
        low, high = 0.9 * low, 1.1 * high
    axes.hist(lengths, bins=min(60, max(plan.rounds // 2, 5)), range=(low, high), color=DATA)
    for position in np.percentile(plan.seconds, PERCENTILES) / seconds:
        axes.axvline(position, color=INK, linewidth=0.8, linestyle="--")
    scale(axes.yaxis, ticks=4, integer=True)
    # The bars leave room for the dashes, which are hard to see on them.
    axes.margins(y=0.25)
    percentiles = " and ".join(f"{percent}th" for percent in PERCENTILES)
    axes.set(title=f"Lengths of {counted(plan.rounds, 'round')}", ylabel="rounds")
    axes.set(xlabel=f"{unit}; dashed: {percentiles} percentiles")


def _draw_staleness(axes: Axes, staleness: np.ndarray) -> None:
    counts = np.bincount(staleness)
    axes.bar(np.arange(len(counts)), counts, width=0.9, color=DATA)
    axes.set(title="How stale replies are (logarithmic)", xlabel="models made while a reply was under way")
    # A few replies of slow devices are far more stale than all others, and would be invisible on a linear axis.
    axes.set(yscale="log", ylabel="replies", ylim=(0.7, 1.5 * counts.max()))
    scale_logarithmic(axes.yaxis, ticks=4)
    scale(axes.xaxis, integer=True)
