"""Classes in pictures of what a model learned: a colour for each, their legend, and the name beside a row."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import fill
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from raypfl.results.run_groups import RunGroup

FEW_CLASSES = 20
"""Classes up to which a picture names them."""

_NAME_WIDTH = 32  # characters of a line of a method's name beside a panel

Colour = tuple[float, float, float, float]


def class_colour(index: int, classes: int) -> Colour:
    """Return the colour of the class at `index` of `classes`, as red, green, blue and alpha."""
    if classes <= 10:
        return matplotlib.colormaps["tab10"](index)
    return matplotlib.colormaps["turbo"](index / (classes - 1))


def draw_class_legend(figure: Figure, class_names: Sequence[str], symbol: Line2D) -> None:
    """Draw a legend below the figure: the classes, if they are few, and another `symbol` of the picture."""
    handles = []
    if len(class_names) <= FEW_CLASSES:
        for index, name in enumerate(class_names):
            colour = class_colour(index, len(class_names))
            handles.append(Line2D([], [], color=colour, marker="o", linestyle="", label=name))
    handles.append(symbol)
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), handletextpad=0.2)


def name_row(axes: Axes, group: RunGroup, x: float) -> None:
    """Write a method's name beside the first panel of its row, at `x` in the panel's widths."""
    look: dict[str, Any] = {"color": group.colour, "fontsize": 12, "fontweight": "bold", "rotation": 90}
    axes.text(x, 0.5, fill(group.label, _NAME_WIDTH), transform=axes.transAxes, va="center", ha="center", **look)
