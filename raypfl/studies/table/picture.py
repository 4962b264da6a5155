"""A study's figure: measured and published numbers side by side, by method."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from raypfl.results.colours import colour
from raypfl.results.drawing.canvas import GREY, INK, png
from raypfl.studies.table.entries import TableEntry

_PANEL_WIDTH = 3.6  # inches
_METHOD_HEIGHT = 0.42  # inches
_LEGEND_ENTRY_WIDTH = 1.8  # inches
_METRIC_OFFSET = 0.18  # distance between the metrics of a method, in rows


def draw(entries: Sequence[TableEntry], title: str, path: str | Path) -> Path:
    """Write a PNG with a panel per setting and unit, a row per method and a colour per metric.

    Full marks with a bar for the spread are measured; hollow marks are published.

    Parameters
    ----------
    entries : entries of the table, of which at least one has a value.
    path : path of the PNG; its folder must exist.
    """
    downs = list(dict.fromkeys(entry.down for entry in entries))
    labels = list(dict.fromkeys(entry.label for entry in entries))
    columns = list(product(dict.fromkeys(entry.across for entry in entries), labels))
    metrics = list(dict.fromkeys(entry.metric for entry in entries))
    methods = list(dict.fromkeys(entry.method for entry in entries))

    width = 2 + _PANEL_WIDTH * len(columns)
    height = 1.6 + (0.7 + _METHOD_HEIGHT * len(methods)) * len(downs)
    with png(path, width, height, padding=0.1) as figure:
        panels = figure.subplots(len(downs), len(columns), squeeze=False, sharey=True)
        for row, down in zip(panels, downs, strict=True):
            for axes, (across, label) in zip(row, columns, strict=True):
                place = (down, across, label)
                panel_entries = [entry for entry in entries if (entry.down, entry.across, entry.label) == place]
                _draw_panel(axes, panel_entries, methods, metrics)
                axes.set_title(" · ".join(filter(None, (down, across))))

        for axes, (_, label) in zip(panels[-1], columns, strict=True):
            axes.set_xlabel(label)
        for axes in panels[:, 0]:
            axes.set_ylabel("method")
        panels[0, 0].invert_yaxis()
        figure.suptitle(title, fontsize=11, color=GREY)

        handles = _legend_handles(entries, metrics)
        legend_columns = min(len(handles), int(width / _LEGEND_ENTRY_WIDTH))
        figure.legend(handles=handles, loc="outside lower center", ncols=legend_columns)
    return Path(path)


def _draw_panel(axes: Axes, entries: Sequence[TableEntry], methods: Sequence[str], metrics: Sequence[str]) -> None:
    panel_metrics = list(dict.fromkeys(entry.metric for entry in entries))
    for entry in entries:
        line = panel_metrics.index(entry.metric) - (len(panel_metrics) - 1) / 2
        y = methods.index(entry.method) + _METRIC_OFFSET * line
        tint = colour(metrics.index(entry.metric))
        if entry.published:
            axes.plot(entry.published.value, y, "o", markersize=7, markerfacecolor="none", color=tint)
        if entry.mean is not None:
            axes.errorbar(entry.mean, y, xerr=entry.spread or 0, fmt="o", markersize=4, color=tint, elinewidth=1.2)

    axes.set_yticks(range(len(methods)), methods)
    axes.set_ylim(-0.6, len(methods) - 0.4)
    axes.grid(False, axis="y")


def _legend_handles(entries: Sequence[TableEntry], metrics: Sequence[str]) -> list[Line2D]:
    spreads = {entry.spread_over for entry in entries}
    over = " or ".join(sorted(spreads, reverse=True))  # the table's legend says which metric has which
    handles = []
    for i, metric in enumerate(metrics):
        handles.append(Line2D([], [], linestyle="", marker="s", color=colour(i), label=metric))
    has_published = any(entry.published for entry in entries)
    measured = "here" if has_published else "mean"
    handles.append(Line2D([], [], marker="o", markersize=4, color=INK, label=f"{measured}, ± over {over}"))

    if has_published:
        hollow = Line2D([], [], linestyle="", marker="o", markersize=7, markerfacecolor="none", color=INK)
        hollow.set_label("published")
        handles.append(hollow)
    return handles
