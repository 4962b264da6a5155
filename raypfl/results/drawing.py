"""What all pictures share: style, scales, curves, and how a PNG file is written; and the picture of a comparison."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from textwrap import fill
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator

from raypfl.common.files import draft
from raypfl.results.compared import RunGroup, colour, group_runs, mark, shared_setting
from raypfl.results.numbers import Curve, clients_from_worst, metric_curves
from raypfl.results.table import MODELS
from raypfl.results.units import capital
from raypfl.runs.result import RunResult

INK, GREY = "#333333", "#777777"

_STYLE: dict[Any, Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": "#999999",
    "axes.grid": True,
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "font.size": 10,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}
_STEPS = [1, 2, 2.5, 5, 10]
_DASH = 3.0
_MARKERS = {"": None, "●": "o", "■": "s", "▲": "^", "◆": "D", "▼": "v"}
_MANY_CURVES = 6  # bands of more would hide each other
_MANY_CLIENTS = 60  # points of more would merge
_MOST_POINTS = 400  # of a line over clients
_LINE, _GAP = 150, 8  # characters across the figure, and what each entry of a legend takes besides its text

Curves = Mapping[tuple[int, str], Curve]
"""By the index of a group and the model."""
Paint = Callable[[int], dict[str, Any]]
"""What Matplotlib is given to draw the group at an index: its colour, and what else tells it apart."""


@contextmanager
def png(path: str | Path, width: float, height: float, padding: float = 0.08) -> Iterator[Figure]:
    """A figure in this style, in inches, that is written to a PNG file at the end; the file's folder must exist.

    Raises
    ------
    Unwritable : if it cannot be written.
    """
    with matplotlib.rc_context(_STYLE):
        layout = ConstrainedLayoutEngine(w_pad=padding, h_pad=padding)
        figure = Figure(figsize=(width, height), layout=layout)
        yield figure
        with draft(Path(path)) as file:
            figure.savefig(file, dpi=160)


def scale(axis: Any, ticks: int = 7, integer: bool = False) -> None:
    """Round numbers at about so many ticks."""
    axis.set_major_locator(MaxNLocator(ticks, steps=_STEPS, integer=integer, min_n_ticks=1))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}".replace("-", "−")))


def scale_rounds(axes: Axes) -> None:
    """Mark whole rounds on the horizontal axis, on which a single one is in the middle."""
    low, high = axes.get_xlim()
    if high - low < 1:
        axes.set_xlim(low - 1, high + 1)
    scale(axes.xaxis, integer=True)


def line(model: str, turn: int = 0, turns: int = 1) -> dict[str, Any]:
    """Solid for personal models, dashed for the global one; of `turns` equal lines each shows in turn."""
    dash = _DASH if turns == 1 else 2 * _DASH
    if model == "global":
        return {"linestyle": (-dash * turn, (dash, dash * max(turns - 1, 0.6))), "linewidth": 1.6}
    return {"linestyle": (-dash * turn, (dash, dash * (turns - 1))) if turn else "-", "linewidth": 2.0}


def draw_curves(axes: Axes, compared: Sequence[RunGroup], curves: Curves, paint: Paint) -> None:
    """Curves, each with a band from the least to the greatest of its seeds."""
    turns = _turns([(model, curve.x, curve.mean) for (_, model), curve in curves.items()])
    for ((i, model), curve), turn in zip(curves.items(), turns, strict=True):
        if len(compared[i].results) > 1:
            alpha = 0.16 if len(compared) <= _MANY_CURVES else 0.07
            axes.fill_between(curve.x, curve.low, curve.high, alpha=alpha, linewidth=0, **paint(i))
        look: dict[str, Any] = {"marker": _MARKERS[mark(i)], "markevery": max(len(curve.x) // 8, 1), "markersize": 4.5}
        look |= _point(model) if len(curve.x) == 1 else {}
        axes.plot(curve.x, curve.mean, **paint(i), **line(model, *turn), **look)


def _point(model: str) -> dict[str, Any]:
    """A ring for a global model and a dot for personal ones, so that equal ones all show."""
    return {"marker": "o"} if model == "personal" else {"marker": "o", "markersize": 10, "fillstyle": "none"}


def draw_clients(axes: Axes, compared: Sequence[RunGroup], protocol: str, paint: Paint) -> None:
    """Every client's final value of the primary metric, from the worst to the best, with the worst decile shaded."""
    found = [clients_from_worst(one, protocol) for one in compared]
    models = [one.deployed(protocol) for one in compared]
    ink = matplotlib.rcParams["text.color"]
    axes.axvspan(0, 10, color=ink, alpha=0.08, linewidth=0)
    for i, (values, turn) in enumerate(zip(found, _turns(list(zip(models, found, strict=True))), strict=True)):
        share = 100 * (np.arange(len(values)) + 0.5) / max(len(values), 1)
        drawn = np.unique(np.linspace(0, len(values) - 1, min(len(values), _MOST_POINTS)).astype(int))
        look: dict[str, Any] = {"marker": _MARKERS[mark(i)], "markevery": 0.15}
        if len(values) <= _MANY_CLIENTS:
            look = {"marker": _MARKERS[mark(i)] or "o", "markevery": 1}
        axes.plot(share[drawn], values[drawn], **paint(i), **line(models[i], *turn), **look, markersize=4)
    axes.set_xlim(0, 100)
    axes.set(xlabel="clients, from worst to best (%)", ylabel=compared[0].unit.label)
    scale(axes.yaxis)
    y, side = (0.98, "top") if compared[0].unit.metric.higher_is_better else (0.02, "bottom")
    axes.text(1.5, y, "worst\ndecile", transform=axes.get_xaxis_transform(), va=side, fontsize="small")


def _draw_ends(axes: Axes, compared: Sequence[RunGroup], protocol: str) -> None:
    """A bar for each group's final mean, and a dot for each of its seeds."""
    for i, one in enumerate(compared):
        scores = one.scores(protocol)
        axes.barh(i, fmean(scores), height=0.7, alpha=0.6, **_paint(i))
        axes.plot(scores, [i] * len(scores), "o", markersize=4, color=INK)
    axes.invert_yaxis()
    axes.set_yticks(range(len(compared)), [fill(one.label, 24) for one in compared])
    axes.set_xlabel(compared[0].unit.label)
    scale(axes.xaxis)


def _turns(lines: Sequence[tuple[Any, ...]]) -> list[tuple[int, int]]:
    """For each line, its place among those that equal it, and how many these are."""
    keys = [tuple(part.tobytes() if isinstance(part, np.ndarray) else part for part in line) for line in lines]
    return [(keys[:i].count(key), keys.count(key)) for i, key in enumerate(keys)]


def draw(results: Sequence[RunResult], path: str | Path) -> Path:
    """Write a PNG of finished runs of one comparison, and return its path.

    Left: the primary metric by round, mean over clients on their own test data, of the personal models (solid) and of
    the global one (dashed); a band spans the seeds. Right: each client's at the end, from worst to best, with the model
    that the client uses: its personal one where the method makes one. If only global models were tested, on one test
    set, a bar and a dot for each seed.

    Parameters
    ----------
    results : at least one, each evaluated at least once.
    path : of the PNG; its folder must exist.
    """
    compared = group_runs(results)
    protocol = "local" if "local" in compared[0].protocols else compared[0].protocols[0]
    unit = compared[0].unit
    what = capital(unit.phrase)
    tested = "their own test data" if protocol == "local" else f"the {protocol} test data"
    found = metric_curves(compared, protocol)
    tested_once = all(len(clients_from_worst(one, protocol)) <= len(one.results) for one in compared)
    with png(path, 11, 5, padding=0.1) as figure:
        left, right = figure.subplots(1, 2, width_ratios=(1.15, 1))
        draw_curves(left, compared, found, _paint)
        left.set(title=f"{what} over rounds{'' if tested_once else ', mean over clients'}", xlabel="round")
        left.set_ylabel(f"{unit.phrase} on {tested}{' (%)' if unit.sign else ''}")
        scale_rounds(left)
        scale(left.yaxis)
        once = all(len(curve.x) == 1 for curve in found.values())
        lines = [
            Line2D([], [], color=INK, label=f"{model} model", **({"ls": "", **_point(model)} if once else line(model)))
            for model in MODELS
            if any(model == drawn for _, drawn in found)
        ]
        if tested_once:
            _draw_ends(right, compared, protocol)
            right.set_title("The global model at the end")
        else:
            draw_clients(right, compared, protocol, _paint)
            right.set_title(f"{what} of each client at the end")
        figure.suptitle(fill(shared_setting(results), 110), fontsize=11, color=GREY)
        handles = [Line2D([], [], color=one.colour, linewidth=5, label=_named(one, protocol)) for one in compared]
        handles += lines
        fitting = _LINE // (max(len(str(one.get_label())) for one in handles) + _GAP)
        columns = max(1, min(len(handles), 5, fitting))
        figure.legend(handles=handles, loc="outside lower center", ncols=columns)
    return Path(path)


def _paint(index: int) -> dict[str, Any]:
    return {"color": colour(index)}


def _named(one: RunGroup, protocol: str) -> str:
    return f"{one.label}  {one.unit.text(fmean(one.scores(protocol)))}{one.unit.sign}"
