"""The images that methods logged, over rounds, as one picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np
from matplotlib import image

from raypfl.results.drawing.canvas import GREY, png
from raypfl.results.run_groups import RunGroup, group_runs
from raypfl.results.setting_text import setting_text
from raypfl.runs.result import RunResult

_COLUMNS = 4
_ROWS = 6  # rounds at most, always with the first and the last
_COLUMN_INCHES = 3.2  # more if the images are plots
_PLOT_INCHES = 8.0
_TITLE_WIDTH = 36  # characters in a line above a column
_PIXELS_PER_INCH = 150  # in a plot


@dataclass(frozen=True)
class Strip:
    """Images of one name that a method logged.

    Attributes
    ----------
    rounds, files : the images that are drawn, ascending by round.
    """

    group: RunGroup
    name: str
    rounds: list[int]
    files: list[Path]


def strips_to_draw(results: Sequence[RunResult]) -> list[Strip]:
    """Return the images of each method's first seed that logged any, by name; four strips at most."""
    strips = []
    for group in group_runs(results):
        rows: list[dict[str, Any]] = next((run.images.to_pylist() for run in group.results if run.images.num_rows), [])
        for name in dict.fromkeys(row["name"] for row in rows):
            images = sorted((row["round"], Path(row["file"])) for row in rows if row["name"] == name)
            evenly_spread = np.unique(np.linspace(0, len(images) - 1, _ROWS).round().astype(int))
            rounds, files = zip(*(images[i] for i in evenly_spread), strict=True)
            strips.append(Strip(group, name, list(rounds), list(files)))
    return strips[:_COLUMNS]


def draw(results: Sequence[RunResult], path: str | Path) -> Path:
    """Write a PNG with a column for each of :func:`strips_to_draw`, from the first round at the top to the last.

    It returns the path, whose folder must exist; at least one of the results must have logged images.
    """
    strips = strips_to_draw(results)
    columns = [[image.imread(file) for file in strip.files] for strip in strips]
    widths = [min(max(_COLUMN_INCHES, images[0].shape[1] / _PIXELS_PER_INCH), _PLOT_INCHES) for images in columns]
    heights = _row_heights(columns, widths)

    with png(path, sum(widths) + 0.25 * len(strips), sum(heights) + 0.8) as figure:
        grid = figure.subplots(len(heights), len(strips), squeeze=False, height_ratios=heights, width_ratios=widths)
        for axes in grid.flat:
            axes.set_axis_off()

        for panels, strip, images in zip(grid.T, strips, columns, strict=True):
            for axes, round, pixels in zip(panels, strip.rounds, images, strict=False):
                axes.imshow(pixels, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
                axes.set_title(f"round {round}", fontsize=9, color=GREY, pad=3)
            heading = f"{fill(f'{strip.group.label}: {strip.name}', _TITLE_WIDTH)}\nround {strip.rounds[0]}"
            panels[0].set_title(heading, fontsize=10, color=strip.group.colour, fontweight="bold", pad=3)

        figure.suptitle(fill(setting_text(results), 100), fontsize=9, color=GREY)
    return Path(path)


def _row_heights(columns: Sequence[Sequence[np.ndarray]], widths: Sequence[float]) -> list[float]:
    """Return the height of each row in inches: the tallest image, and its title."""
    heights = []
    for row in range(max(map(len, columns))):
        tallest = 0.0
        for images, width in zip(columns, widths, strict=True):
            if row < len(images):
                tallest = max(tallest, width * images[row].shape[0] / images[row].shape[1])
        heights.append(tallest + 0.35)
    return heights
