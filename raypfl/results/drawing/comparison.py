"""The picture of a comparison: curves over rounds or simulated time, and every client at the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from textwrap import fill
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from raypfl.evaluation.tables import MODELS
from raypfl.results.colours import colour
from raypfl.results.drawing.canvas import GREY, INK, png
from raypfl.results.drawing.curves import (
    Curves,
    draw_clients,
    draw_curves,
    line_style,
    point_style,
    scale,
    scale_logarithmic,
    scale_rounds,
    time_scale,
)
from raypfl.results.numbers import clients_from_worst, has_simulated_time, metric_curves
from raypfl.results.run_groups import RunGroup, group_runs
from raypfl.results.setting_text import setting_text
from raypfl.results.units import capitalised
from raypfl.runs.result import RunResult

_UNEQUAL_TIMES = 4  # longest over shortest run, from which a linear axis of time would hide the shortest
_LEGEND_WIDTH = 150  # characters across the figure
_LEGEND_GAP = 8  # characters that an entry takes besides its text
_LEGEND_LINE = 70  # characters; a longer label continues on another line


def draw(results: Sequence[RunResult], path: str | Path) -> Path:
    """Write a picture of finished runs of one comparison, and return its path.

    Left: the primary metric by round, mean over clients on their own test data, of the personal models (solid) and of
    the global one (dashed); a band spans the seeds. If all runs have simulated time, that takes the place of rounds,
    which may last differently long, on a logarithmic axis if the runs end at very different times. Right: each
    client's at the end, from worst to best, with the model that the client uses: its personal one where the method
    makes one. If only global models were tested, on one test set, a bar and a dot for each seed.

    Parameters
    ----------
    results : at least one, each evaluated at least once.
    path : the file, a PNG unless it ends in ``.pdf`` or ``.svg``; its folder must exist.
    """
    groups = group_runs(results)
    protocol = groups[0].protocols[0]
    if "local" in groups[0].protocols:
        protocol = "local"
    has_time = all(map(has_simulated_time, groups))
    curves = metric_curves(groups, protocol, "simulated_seconds" if has_time else "round")
    # A metric that is undefined for all clients has no curve, by which an axis of time would be scaled.
    has_time = has_time and bool(curves)
    tested_once = all(len(clients_from_worst(group, protocol)) <= len(group.results) for group in groups)
    metric = capitalised(groups[0].unit.phrase)

    with png(path, 11, 5, padding=0.1) as figure:
        left, right = figure.subplots(1, 2, width_ratios=(1.15, 1))

        have_turns = _draw_course(left, groups, curves, protocol, has_time)
        course = "simulated time" if has_time else "rounds"
        if tested_once:
            left.set_title(f"{metric} over {course}")
            _draw_ends(right, groups, protocol)
            right.set_title("The global model at the end")
        else:
            left.set_title(f"{metric} over {course}, mean over clients")
            have_turns |= draw_clients(right, groups, protocol, _paint)
            has_seeds = any(len(group.results) > 1 for group in groups)
            right.set_title(f"{metric} of each client{' and seed' if has_seeds else ''} at the end")

        figure.suptitle(fill(setting_text(results), 110), fontsize=11, color=GREY)
        _draw_legend(figure, groups, curves, protocol, have_turns)
    return Path(path)


def _draw_course(axes: Axes, groups: Sequence[RunGroup], curves: Curves, protocol: str, has_time: bool) -> bool:
    """Draw the curves; return whether lines coincide."""
    unit = groups[0].unit
    ylabel = f"{unit.phrase} on the {protocol} test data"
    if protocol == "local":
        ylabel = f"{unit.phrase} on their own test data"
    if unit.sign:
        ylabel += " (%)"

    axes.set_ylabel(ylabel)
    if has_time:
        seconds, time_unit = time_scale(max(curve.x[-1] for curve in curves.values()))
        curves = {key: replace(curve, x=curve.x / seconds) for key, curve in curves.items()}

    have_turns = draw_curves(axes, groups, curves, _paint)
    scale(axes.yaxis)
    if not has_time:
        axes.set_xlabel("round")
        scale_rounds(axes)
    elif _end_at_unequal_times(curves):
        axes.set(xlabel=f"simulated {time_unit}, logarithmic", xscale="log")
        scale_logarithmic(axes.xaxis)
    else:
        axes.set(xlabel=f"simulated {time_unit}", xlim=(0, None))
        scale(axes.xaxis)
    return have_turns


def _end_at_unequal_times(curves: Curves) -> bool:
    """Return whether a logarithmic axis shows all curves better than a linear one."""
    ends = [curve.x[-1] for curve in curves.values()]
    # A logarithmic axis has no place for time 0.
    start = min(curve.x[0] for curve in curves.values())
    return start > 0 and max(ends) >= _UNEQUAL_TIMES * min(ends)


def _draw_ends(axes: Axes, groups: Sequence[RunGroup], protocol: str) -> None:
    """Draw a bar for each group's final mean, and a dot for each of its seeds."""
    for i, group in enumerate(groups):
        scores = group.scores(protocol)
        if scores:
            axes.barh(i, fmean(scores), height=0.7, alpha=0.6, **_paint(i))
            axes.plot(scores, [i] * len(scores), "o", markersize=4, color=INK)

    axes.invert_yaxis()
    axes.set_yticks(range(len(groups)), [fill(group.label, 24) for group in groups])
    axes.set_xlabel(groups[0].unit.label)
    scale(axes.xaxis)


def _draw_legend(figure: Figure, groups: Sequence[RunGroup], curves: Curves, protocol: str, have_turns: bool) -> None:
    """Draw the groups with their final scores, and how lines of personal, of global and of equal models look."""
    handles: list[Artist] = []
    for group in groups:
        handles.append(Line2D([], [], color=group.colour, linewidth=5, label=_label_with_score(group, protocol)))
    is_one_round = all(len(curve.x) == 1 for curve in curves.values())
    for model in MODELS:
        if all(model != model_of_curve for _, model_of_curve in curves):
            continue
        look = line_style(model)
        if is_one_round:
            look = {"ls": "", **point_style(model)}
        handles.append(Line2D([], [], color=INK, label=f"{model} model", **look))
    if any(len(curve.x) > 1 and len(groups[i].results) > 1 for (i, _), curve in curves.items()):
        handles.append(Patch(color=GREY, alpha=0.3, linewidth=0, label="band: from the lowest to the highest seed"))
    if have_turns:
        handles.append(Line2D([], [], ls="", label="dashes of several colours: equal values"))

    widest = max(len(line) for handle in handles for line in str(handle.get_label()).splitlines())
    fitting = _LEGEND_WIDTH // (widest + _LEGEND_GAP)
    columns = max(1, min(len(handles), 5, fitting))
    figure.legend(handles=handles, loc="outside lower center", ncols=columns)


def _label_with_score(group: RunGroup, protocol: str) -> str:
    label = fill(group.label, _LEGEND_LINE)
    scores = group.scores(protocol)
    # Not every method has a model for every protocol, such as a global one for unseen clients.
    if not scores:
        return label
    # Two spaces set the score apart; textwrap would collapse them.
    return f"{label}  {group.unit.text(fmean(scores))}{group.unit.sign}"


def _paint(index: int) -> dict[str, Any]:
    return {"color": colour(index)}
