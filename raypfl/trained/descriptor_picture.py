"""PeFLL's descriptors as a picture: where clients lie at the start and at the end, and what distances mean."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from raypfl.methods.personal_models.pefll import PeFLL
from raypfl.results.drawing.canvas import GREY, INK, png
from raypfl.results.drawing.classes import class_colour, draw_class_legend, name_row
from raypfl.results.groups import RunGroup, group_runs
from raypfl.results.setting_text import setting_text
from raypfl.runs.result import RunResult, newest
from raypfl.trained.descriptors import Descriptors, descriptors_of
from raypfl.trained.models import TrainedModels

_ROWS = 4
_INCHES = 3.6  # of a panel
_POINTS = 4000


def shown(results: Sequence[RunResult]) -> list[RunGroup]:
    """The first four methods with descriptors, of those that ask for a picture (``tracking.latent``)."""
    groups = group_runs(results)
    asked = [one for one in groups if one.results[0].experiment.tracking.latent]
    return [one for one in asked if isinstance(one.results[0].experiment.method, PeFLL)][:_ROWS]


def draw(results: Sequence[RunResult], path: str | Path) -> Path:
    """Write a PNG: a row for each of :func:`shown` (its first seed), with its clients before the first round and at
    the end, and distances between descriptors over distances between label mixes.

    Descriptors are projected onto the plane in which they differ most. The two colours of a client are its most
    frequent classes; unseen clients have a dark edge.

    It returns the path, whose folder must exist; at least one of the results must be shown.
    """
    rows = [(one, *_start_and_end(one.results[0])) for one in shown(results)]
    with png(path, 3 * _INCHES, len(rows) * (_INCHES + 0.25) + 0.9) as figure:
        grid = figure.subplots(len(rows), 3, squeeze=False)
        for (left, middle, right), (group, start, end, _) in zip(grid, rows, strict=True):
            _clients(left, start, "start")
            _clients(middle, end, f"round {group.results[0].round}")
            _distances(right, end)
            name_row(left, group, x=-0.1)

        text = setting_text(results[0].experiment, results[0].metadata)
        figure.suptitle(fill(text, 100), fontsize=10, color=GREY)
        class_names = rows[0][-1]
        unseen = Line2D([], [], marker="o", linestyle="", color="none", markeredgecolor=INK, label="unseen")
        draw_class_legend(figure, class_names, unseen)
    return Path(path)


def _start_and_end(result: RunResult) -> tuple[Descriptors, Descriptors, list[str]]:
    models = TrainedModels.of_snapshot(*newest(result.run_dir, whole=False))
    names = getattr(models.outline, "class_names", None) or [str(c) for c in range(models.outline.num_classes)]
    return descriptors_of(models, models.at_start()), descriptors_of(models), list(names)


def _clients(axes: Axes, found: Descriptors, title: str) -> None:
    centred = found.values - found.values.mean(0)
    points = centred @ np.linalg.svd(centred, full_matrices=False)[2][:2].T
    points = np.pad(points, ((0, 0), (0, max(0, 2 - points.shape[1]))))  # of descriptors of one number
    classes = found.mixes.shape[1]
    for client, (point, mix) in enumerate(zip(points, found.mixes, strict=True)):
        first, *others = np.argsort(-mix, kind="stable")[:2]
        second = others[0] if others and mix[others[0]] > 0 else first
        edge = INK if client in found.unseen else "white"
        colours: dict[str, Any] = {"markerfacecolor": class_colour(first, classes)}
        colours["markerfacecoloralt"] = class_colour(second, classes)
        axes.plot(*point, "o", fillstyle="left", markersize=8, markeredgecolor=edge, markeredgewidth=0.9, **colours)
    axes.set(xticks=[], yticks=[], title=title)
    axes.grid(False)


def _distances(axes: Axes, found: Descriptors) -> None:
    whose = found.unseen if len(found.unseen) else np.arange(len(found.values))
    apart, mixes = (distances.ravel() for distances in found.distances(whose))
    some = np.linspace(0, len(apart) - 1, min(len(apart), _POINTS)).astype(int)
    axes.plot(mixes[some], apart[some], ".", markersize=3, alpha=0.3, color=GREY)
    axes.set_xlabel("distance of label mixes", fontsize=9)
    axes.set_ylabel("distance of descriptors", fontsize=9)
    if len(found.unseen):
        axes.set_title(f"Spearman, mean of unseen clients: {np.mean(found.rank_correlations):.2f}", fontsize=10)
