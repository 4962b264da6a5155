"""A study's figure: measured and published numbers side by side, by method."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from raypfl.results.colours import colour
from raypfl.results.drawing.canvas import GREY, INK, png
from raypfl.studies.entries import TableEntry

_INCHES = (3.6, 0.42)  # a panel's width, a method's height
_KEY = 1.8  # inches of a key in the legend
_APART = 0.18  # metrics of a method, in methods


def draw(found: Sequence[TableEntry], title: str, path: str | Path) -> Path:
    """Write a PNG: a panel a setting, a line a method, a colour a metric.

    Full marks, with a bar for the spread, are measured here; hollow ones are published.

    Parameters
    ----------
    found : entries, of which at least one has a value. path : of the PNG; its folder must exist.
    """
    downs, acrosses = (list(dict.fromkeys(values)) for values in zip(*((e.down, e.across) for e in found), strict=True))
    metrics = list(dict.fromkeys(one.metric for one in found))
    methods = list(dict.fromkeys(one.method for one in found))
    size = (2 + _INCHES[0] * len(acrosses), 1.6 + (0.7 + _INCHES[1] * len(methods)) * len(downs))
    with png(path, *size, padding=0.1) as figure:
        panels = figure.subplots(len(downs), len(acrosses), squeeze=False, sharey=True)
        for row, down in zip(panels, downs, strict=True):
            for axes, across in zip(row, acrosses, strict=True):
                own = [one for one in found if (one.down, one.across) == (down, across)]
                _panel(axes, own, methods, metrics)
                axes.set_title(" · ".join(filter(None, (down, across))))
        for axes in panels[-1]:
            axes.set_xlabel(" / ".join(dict.fromkeys(one.label for one in found)))
        for axes in panels[:, 0]:
            axes.set_ylabel("method")
        panels[0, 0].invert_yaxis()
        figure.suptitle(title, fontsize=11, color=GREY)
        keys = _keys(found, metrics)
        fit = min(len(keys), int(size[0] / _KEY))
        figure.legend(handles=keys, loc="outside lower center", ncols=fit)
    return Path(path)


def _panel(axes: Axes, found: Sequence[TableEntry], methods: Sequence[str], metrics: Sequence[str]) -> None:
    for one in found:
        at = methods.index(one.method) + _APART * (metrics.index(one.metric) - (len(metrics) - 1) / 2)
        tint = colour(metrics.index(one.metric))
        if one.published:
            axes.plot(one.published.value, at, "o", markersize=7, markerfacecolor="none", color=tint)
        if one.mean is not None:
            axes.errorbar(one.mean, at, xerr=one.spread or 0, fmt="o", markersize=4, color=tint, elinewidth=1.2)
    axes.set_yticks(range(len(methods)), methods)
    axes.set_ylim(-0.6, len(methods) - 0.4)
    axes.grid(False, axis="y")


def _keys(found: Sequence[TableEntry], metrics: Sequence[str]) -> list[Line2D]:
    over = "clients" if any(one.spread_over == "clients" for one in found) else "seeds"
    keys = [Line2D([], [], linestyle="", marker="s", color=colour(i), label=name) for i, name in enumerate(metrics)]
    keys.append(Line2D([], [], marker="o", markersize=4, color=INK, label=f"here, ± over {over}"))
    if any(one.published for one in found):
        hollow = Line2D([], [], linestyle="", marker="o", markersize=7, markerfacecolor="none", color=INK)
        hollow.set_label("published")
        keys.append(hollow)
    return keys
