"""One picture of a comparison: the primary metric over rounds, and its spread over the clients at the end."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from textwrap import fill
from typing import Any

from matplotlib.lines import Line2D

from raypfl.results.compared import RunGroup, colour, group_runs, setting
from raypfl.results.drawing import GREY, INK, draw_clients, draw_curves, line, png, scale
from raypfl.results.numbers import metric_curves
from raypfl.results.table import MODELS
from raypfl.results.units import capital
from raypfl.runs.result import Result


def draw(results: Sequence[Result], path: str | Path) -> Path:
    """Write a PNG of finished runs of one comparison, and return its path.

    Left: the primary metric by round, mean over clients on their own test data, of the personal models (solid) and of
    the global one (dashed); a band spans the seeds. Right: each client's at the end, from worst to best, with the model
    that the client uses: its personal one where the method makes one.

    Parameters
    ----------
    results : at least one, each evaluated at least once.
    path : of the PNG; its folder must exist.
    """
    compared = group_runs(results)
    protocol = "local" if "local" in compared[0].protocols else compared[0].protocols[0]
    unit = compared[0].unit
    what, lower = capital(unit.words), not unit.metric.higher_is_better
    tested = "their own test data" if protocol == "local" else f"the {protocol} test data"
    found = metric_curves(compared, protocol)
    with png(path, 11, 5, padding=0.1) as figure:
        left, right = figure.subplots(1, 2, width_ratios=(1.15, 1))
        draw_curves(left, compared, found, _paint)
        left.set(title=f"{what} over rounds, mean over clients", xlabel="round")
        left.set_ylabel(f"{unit.words} on {tested}{' (%)' if unit.sign else ''}")
        low, high = left.get_xlim()
        if high - low < 1:  # a single round, around which fractions of rounds would be marked
            left.set_xlim(low - 1, high + 1)
        scale(left.xaxis, integer=True)
        scale(left.yaxis)
        lines = [
            Line2D([], [], color=INK, label=f"{model} model", **line(model))
            for model in MODELS
            if any(model == drawn for _, drawn in found)
        ]
        left.legend(handles=lines, loc="upper right" if lower else "lower right")
        draw_clients(right, compared, protocol, _paint)
        right.set_title(f"{what} of each client at the end")
        figure.suptitle(fill(setting(results[0].experiment, results[0].metadata), 110), fontsize=11, color=GREY)
        handles = [Line2D([], [], color=one.colour, linewidth=5, label=_named(one, protocol)) for one in compared]
        figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 5), handlelength=1)
    return Path(path)


def _paint(index: int) -> dict[str, Any]:
    return {"color": colour(index)}


def _named(one: RunGroup, protocol: str) -> str:
    return f"{one.label}  {one.unit.text(fmean(one.scores(protocol)))}{one.unit.sign}"
