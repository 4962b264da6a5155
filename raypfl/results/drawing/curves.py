"""Curves over rounds and clients, with their scales, as pictures and reports share them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from raypfl.results.colours import mark
from raypfl.results.numbers import Curve, clients_from_worst
from raypfl.results.run_groups import RunGroup

_DAY = 24 * 3600.0  # seconds
_STEPS = [1, 2, 2.5, 5, 10]
_DASH = 3.0
_MARKERS = {"": None, "●": "o", "■": "s", "▲": "^", "◆": "D", "▼": "v"}
_MANY_CURVES = 6  # the bands of more curves would hide each other
_MANY_CLIENTS = 60  # the points of more clients would merge
_MOST_POINTS = 400  # in a line over clients

Curves = Mapping[tuple[int, str], Curve]
"""Curves by the index of a group and the model."""
Paint = Callable[[int], dict[str, Any]]
"""Returns Matplotlib's options for the group at an index: its colour, and what else tells it apart."""


def scale(axis: Any, ticks: int = 7, integer: bool = False) -> None:
    """Put about `ticks` round numbers on an axis."""
    axis.set_major_locator(MaxNLocator(ticks, steps=_STEPS, integer=integer, min_n_ticks=1))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}".replace("-", "−")))


def scale_logarithmic(axis: Any, ticks: int = 9) -> None:
    """Put plain numbers on a logarithmic axis, whose limits are set: 1, 2, 5, 10, or powers of 10 if these are more
    than `ticks`."""
    low, high = axis.get_view_interval()
    steps = (1.0, 2.0, 5.0) if 3 * np.log10(high / low) <= ticks else (1.0,)
    axis.set_major_locator(LogLocator(subs=steps))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))


def scale_rounds(axes: Axes) -> None:
    """Mark whole rounds on the horizontal axis; a single round is in the middle."""
    low, high = axes.get_xlim()
    if high - low < 1:
        axes.set_xlim(low - 1, high + 1)
    scale(axes.xaxis, integer=True)


def time_scale(seconds: float) -> tuple[float, str]:
    """Return the length in seconds of the unit in which so many seconds read well, and its name."""
    if seconds < 300:
        return 1.0, "seconds"
    if seconds < 3 * 3600:
        return 60.0, "minutes"
    if seconds < 3 * _DAY:
        return 3600.0, "hours"
    return _DAY, "days"


def line_style(model: str, turn: int = 0, turns: int = 1) -> dict[str, Any]:
    """Return a solid line for personal models and a dashed one for the global model.

    Of `turns` lines in the same place, each gets dashes in its turn, so that all show.
    """
    dash = _DASH if turns == 1 else 2 * _DASH
    if model == "global":
        # Gaps stay between the dashes of several lines, which would otherwise look like a solid one; above solid lines.
        gap = 0.6 * _DASH
        step = dash + gap
        return {"linestyle": (-step * turn, (dash, gap + step * (turns - 1))), "linewidth": 1.6, "zorder": 2.1}
    if turn == 0:
        return {"linestyle": "-", "linewidth": 2.0}
    return {"linestyle": (-dash * turn, (dash, dash * (turns - 1))), "linewidth": 2.0}


def point_style(model: str) -> dict[str, Any]:
    """Return a ring for a global model and a dot for personal ones, so that equal ones both show."""
    if model == "personal":
        return {"marker": "o"}
    return {"marker": "o", "markersize": 10, "fillstyle": "none"}


def draw_curves(axes: Axes, groups: Sequence[RunGroup], curves: Curves, paint: Paint) -> bool:
    """Draw curves, each with a band from the least to the greatest of its seeds.

    Returns
    -------
    Whether lines are in the same place, and so have dashes in turn.
    """
    turns = _turns([(model, curve.x, curve.mean) for (_, model), curve in curves.items()])
    for ((i, model), curve), turn in zip(curves.items(), turns, strict=True):
        if len(groups[i].results) > 1:
            alpha = 0.16 if len(groups) <= _MANY_CURVES else 0.07
            axes.fill_between(curve.x, curve.low, curve.high, alpha=alpha, linewidth=0, **paint(i))

        look: dict[str, Any] = {"marker": _MARKERS[mark(i)], "markevery": max(len(curve.x) // 8, 1), "markersize": 4.5}
        if len(curve.x) == 1:
            look |= point_style(model)
        axes.plot(curve.x, curve.mean, **paint(i), **line_style(model, *turn), **look)
    return _are_shared(turns)


def draw_clients(axes: Axes, groups: Sequence[RunGroup], protocol: str, paint: Paint) -> bool:
    """Draw every client's final value of the primary metric, from worst to best, with the worst decile shaded.

    Returns
    -------
    Whether lines are in the same place, and so have dashes in turn.
    """
    ink = matplotlib.rcParams["text.color"]
    axes.axvspan(0, 10, color=ink, alpha=0.08, linewidth=0)

    clients = [clients_from_worst(group, protocol) for group in groups]
    models = [group.deployed(protocol) for group in groups]
    turns = _turns(list(zip(models, clients, strict=True)))
    for i, (values, model, turn) in enumerate(zip(clients, models, turns, strict=True)):
        share = 100 * (np.arange(len(values)) + 0.5) / max(len(values), 1)
        points = np.unique(np.linspace(0, len(values) - 1, min(len(values), _MOST_POINTS)).astype(int))

        marker = _MARKERS[mark(i)]
        look: dict[str, Any] = {"marker": marker, "markevery": 0.15}
        if len(values) <= _MANY_CLIENTS:
            look = {"marker": marker or "o", "markevery": 1}
        axes.plot(share[points], values[points], **paint(i), **line_style(model, *turn), **look, markersize=4)

    unit = groups[0].unit
    axes.set_xlim(0, 100)
    axes.set(xlabel="clients, from worst to best (%)", ylabel=unit.label)
    scale(axes.yaxis)
    # On the left, the worst clients are at the bottom, or at the top if lower is better: put the text at the other end.
    y, side = (0.98, "top") if unit.metric.higher_is_better else (0.02, "bottom")
    axes.text(1.5, y, "worst\ndecile", transform=axes.get_xaxis_transform(), va=side, fontsize="small")
    return _are_shared(turns)


def _turns(lines: Sequence[tuple[Any, ...]]) -> list[tuple[int, int]]:
    """Return each line's position among the lines that equal it, and their number."""
    keys = []
    for line in lines:
        # The bytes of an array, which can be compared as a whole.
        keys.append(tuple(part.tobytes() if isinstance(part, np.ndarray) else part for part in line))
    return [(keys[:i].count(key), keys.count(key)) for i, key in enumerate(keys)]


def _are_shared(turns: Sequence[tuple[int, int]]) -> bool:
    return any(lines > 1 for _, lines in turns)
