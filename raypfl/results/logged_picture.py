"""The images that methods logged, over rounds, as one picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill

import numpy as np
from matplotlib import image

from raypfl.results.compared import RunGroup, group_runs, setting
from raypfl.results.drawing import GREY, png
from raypfl.runs.result import RunResult

_COLUMNS = 4
_ROWS = 6  # rounds at most, of which the first and the last are among
_INCHES = 3.2  # of a column, or more if its images are plots
_PLOT = 8.0
_PIXELS = 150  # of a plot in an inch


@dataclass(frozen=True)
class Strip:
    """Images of one name that a method logged.

    Attributes
    ----------
    rounds, files : of the images that are drawn, ascending by round.
    """

    group: RunGroup
    name: str
    rounds: list[int]
    files: list[Path]


def shown(results: Sequence[RunResult]) -> list[Strip]:
    """The images of each method's first seed, by name; four strips at most."""
    strips = []
    for group in group_runs(results):
        rows = group.results[0].images.to_pylist()
        for name in dict.fromkeys(row["name"] for row in rows):
            named = sorted((row["round"], Path(row["file"])) for row in rows if row["name"] == name)
            chosen = np.unique(np.linspace(0, len(named) - 1, _ROWS).round().astype(int))
            rounds, files = zip(*(named[i] for i in chosen), strict=True)
            strips.append(Strip(group, name, list(rounds), list(files)))
    return strips[:_COLUMNS]


def draw(results: Sequence[RunResult], path: str | Path) -> Path:
    """Write a PNG with a column for each of :func:`shown`, from the first round at the top to the last.

    It returns the path, whose folder must exist; at least one of the results must have logged images.
    """
    strips = shown(results)
    pixels = [[image.imread(file) for file in strip.files] for strip in strips]
    rows = max(map(len, pixels))
    widths = [min(max(_INCHES, one[0].shape[1] / _PIXELS), _PLOT) for one in pixels]
    columns = list(zip(widths, pixels, strict=True))
    heights = [
        max(width * one[i].shape[0] / one[i].shape[1] for width, one in columns if i < len(one)) + 0.35
        for i in range(rows)
    ]
    with png(path, sum(widths) + 0.25 * len(strips), sum(heights) + 0.8) as figure:
        grid = figure.subplots(rows, len(strips), squeeze=False, height_ratios=heights, width_ratios=widths)
        for axes in grid.flat:
            axes.set_axis_off()
        for column, strip, images in zip(grid.T, strips, pixels, strict=True):
            for axes, round, one in zip(column, strip.rounds, images, strict=False):
                axes.imshow(one, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
                axes.set_title(f"round {round}", fontsize=9, color=GREY, pad=3)
            heading = f"{strip.group.label}: {strip.name}\nround {strip.rounds[0]}"
            column[0].set_title(heading, fontsize=10, color=strip.group.colour, fontweight="bold", pad=3)
        figure.suptitle(fill(setting(results[0].experiment, results[0].metadata), 100), fontsize=9, color=GREY)
    return Path(path)
