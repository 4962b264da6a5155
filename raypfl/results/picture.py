"""One picture of a comparison: the primary metric over rounds, and how it is spread over the clients at the end."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from textwrap import fill
from typing import TYPE_CHECKING, Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from raypfl.common.files import draft
from raypfl.results.contenders import Contender, contenders, setting
from raypfl.results.numbers import MODELS, clients, judged
from raypfl.results.units import capital

if TYPE_CHECKING:
    from raypfl.runs import Result

_INK, _FAINT = "#333333", "#E4E4E4"
STYLE: dict[Any, Any] = {
    "axes.edgecolor": "#999999",
    "axes.labelcolor": _INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "font.size": 10,
    "grid.color": _FAINT,
    "grid.linewidth": 0.6,
    "text.color": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
}
_DASH = 3.0
_STEPS = [1, 2, 5, 10]
_MANY_CLIENTS = 60  # beyond it, points on the curves would merge


def draw(results: Sequence[Result], path: str | Path) -> Path:
    """Write a PNG of finished runs of one comparison.

    Left: the primary metric by round, mean over clients on their own test data, of the personal models (solid) and of
    the global one (dashed); a band spans the seeds. Right: each client's at the end, from worst to best, with the model
    that the client would use: its personal one where the method makes one.

    Parameters
    ----------
    results : at least one, each evaluated at least once.
    path : of the PNG; its folder must exist.

    Returns
    -------
    The path.
    """
    compared = contenders(results)
    protocol = "local" if "local" in compared[0].protocols else compared[0].protocols[0]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(11, 5), layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1))
        left, right = figure.subplots(1, 2, width_ratios=(1.15, 1))
        dashed = [one.label for one in compared if one.scores(protocol, "global", one.measures.primary.name)]
        for contender in compared:
            turn = dashed.index(contender.label) if contender.label in dashed else 0
            lines = {model: line(model, turn, len(dashed)) for model in MODELS}
            _curves(left, contender, protocol, lines)
            _sorted_clients(right, contender, protocol, lines)
        _explain(left, right, compared, protocol)
        figure.suptitle(fill(setting(results[0].experiment, results[0].metadata), 110), fontsize=11, color="#777777")
        _legend(figure, compared, protocol)
        with draft(Path(path)) as file:
            figure.savefig(file, dpi=160)
    return Path(path)


def line(model: str, turn: int = 0, turns: int = 1) -> dict[str, Any]:
    """Solid or dashed; dashes take turns, so that the equal global models of several methods all show."""
    if model == "personal":
        return {"linestyle": "-", "linewidth": 2.0}
    gap = _DASH * max(min(turns, 3) - 1, 0.6)
    return {"linestyle": (-_DASH * (turn % 3), (_DASH, gap)), "linewidth": 1.6}


def _dot(model: str) -> dict[str, Any]:
    """One value's: filled, or for the global model a ring around where equal ones lie."""
    return {"marker": "o"} if model == "personal" else {"marker": "o", "markersize": 11, "markerfacecolor": "none"}


def _curves(axes: Axes, contender: Contender, protocol: str, lines: dict[str, dict[str, Any]]) -> None:
    for model, line in lines.items():
        if curve := judged(contender, protocol, model):
            if len(contender.results) > 1:
                axes.fill_between(curve.x, curve.low, curve.high, color=contender.colour, alpha=0.15, linewidth=0)
            axes.plot(curve.x, curve.mean, color=contender.colour, **line, **(_dot(model) if len(curve.x) == 1 else {}))


def _sorted_clients(axes: Axes, contender: Contender, protocol: str, lines: dict[str, dict[str, Any]]) -> None:
    model = contender.deployed(protocol)
    reached = from_worst(contender, clients(contender, protocol, model))
    share = 100 * (np.arange(len(reached)) + 0.5) / len(reached)
    marker = "o" if len(reached) <= _MANY_CLIENTS else None
    axes.plot(share, reached, color=contender.colour, marker=marker, markersize=4, **lines[model])


def from_worst(contender: Contender, reached: np.ndarray) -> np.ndarray:
    """Clients' values of the primary metric, from the worst to the best."""
    return np.sort(reached) if contender.unit.metric.higher_is_better else np.sort(reached)[::-1]


def _explain(left: Axes, right: Axes, compared: list[Contender], protocol: str) -> None:
    tested = "their own test data" if protocol == "local" else f"the {protocol} test data"
    unit = compared[0].unit
    what, percent = capital(unit.words), unit.metric.percent
    left.set(title=f"{what} over rounds, mean over clients", xlabel="round", ylabel=f"{unit.words} on {tested}")
    if percent:
        left.set_ylabel(f"{unit.words} on {tested} (%)")
    right.set(title=f"{what} of each client at the end", xlabel="clients, from worst to best (%)", ylabel=unit.label)
    right.set_xlim(0, 100)
    right.axvspan(0, 10, color=_INK, alpha=0.05, linewidth=0)
    free = (0.98, "top") if unit.metric.higher_is_better else (0.02, "bottom")
    right.text(
        1, free[0], "worst\ndecile", transform=right.get_xaxis_transform(), va=free[1], fontsize=8, color="#777777"
    )
    for axes in (left, right):
        axes.grid(True)
        axes.set_axisbelow(True)
        axes.yaxis.set_major_locator(MaxNLocator(9, steps=_STEPS, integer=percent))
    low, high = left.get_xlim()
    if high - low < 1:  # a single round, around which fractions of rounds would be marked
        left.set_xlim(low - 1, high + 1)
    left.xaxis.set_major_locator(MaxNLocator(7, steps=_STEPS, integer=True))
    models = [
        model for model in MODELS if any(one.scores(protocol, model, one.measures.primary.name) for one in compared)
    ]
    keys = [Line2D([], [], color=_INK, label=f"{model} model", **line(model)) for model in models]
    left.legend(handles=keys, loc="lower right" if unit.metric.higher_is_better else "upper right", frameon=False)


def _legend(figure: Figure, compared: list[Contender], protocol: str) -> None:
    def label(one: Contender) -> str:
        scores = one.scores(protocol, one.deployed(protocol), one.measures.primary.name)
        return f"{one.label}  {one.unit.printed(fmean(scores))}{one.unit.sign}"

    handles = [Line2D([], [], color=one.colour, linewidth=5, label=label(one)) for one in compared]
    figure.legend(
        handles=handles, loc="outside lower center", ncols=min(len(handles), 5), frameon=False, handlelength=1
    )
