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
from raypfl.results.run_groups import RunGroup, group_runs
from raypfl.results.setting_text import setting_text
from raypfl.runs.result import RunResult
from raypfl.trained.descriptors import Descriptors, descriptors_of
from raypfl.trained.models import TrainedModels

_ROWS = 4
_PANEL_INCHES = 3.6

_POINTS = 4000
"""Pairs of clients at most in the panel of distances."""


def groups_to_draw(results: Sequence[RunResult]) -> list[RunGroup]:
    """Return the first four methods with descriptors, of those that ask for a picture (``tracking.latent``)."""
    groups = []
    for group in group_runs(results):
        experiment = group.results[0].experiment
        if experiment.tracking.latent and isinstance(experiment.method, PeFLL):
            groups.append(group)
    return groups[:_ROWS]


def draw(results: Sequence[RunResult], path: str | Path) -> Path:
    """Write a PNG with a row for each of :func:`groups_to_draw` (its first seed), and return its path.

    A row has its clients before the first round and at the end, and distances between descriptors over distances
    between label mixes. Descriptors are projected onto the plane in which they differ most. The two colours of a client
    are its most frequent classes; unseen clients have a dark edge.

    The folder of `path` must exist, and at least one of the results must be shown.
    """
    rows = [(group, *_start_and_end(group.results[0])) for group in groups_to_draw(results)]
    with png(path, 3 * _PANEL_INCHES, len(rows) * (_PANEL_INCHES + 0.25) + 0.9) as figure:
        grid = figure.subplots(len(rows), 3, squeeze=False)
        for panels, (group, start, end, _) in zip(grid, rows, strict=True):
            _draw_clients(panels[0], start, "start")
            _draw_clients(panels[1], end, f"round {group.results[0].round}")
            _draw_distances(panels[2], end)
            name_row(panels[0], group, x=-0.1)

        figure.suptitle(fill(setting_text(results[:1]), 100), fontsize=10, color=GREY)
        class_names = rows[0][-1]
        unseen = Line2D([], [], marker="o", linestyle="", color="none", markeredgecolor=INK, label="unseen")
        draw_class_legend(figure, class_names, unseen)
    return Path(path)


def _start_and_end(result: RunResult) -> tuple[Descriptors, Descriptors, list[str]]:
    models = TrainedModels.of_run(result.run_dir, whole=False)
    names = getattr(models.outline, "class_names", None) or [str(c) for c in range(models.outline.num_classes)]
    return descriptors_of(models, models.at_start()), descriptors_of(models), list(names)


def _draw_clients(axes: Axes, descriptors: Descriptors, title: str) -> None:
    centred = descriptors.values - descriptors.values.mean(0)
    points = centred @ np.linalg.svd(centred, full_matrices=False)[2][:2].T
    points = np.pad(points, ((0, 0), (0, max(0, 2 - points.shape[1]))))  # descriptors may be single numbers

    num_classes = descriptors.mixes.shape[1]
    for client, (point, mix) in enumerate(zip(points, descriptors.mixes, strict=True)):
        first, *rest = np.argsort(-mix, kind="stable")[:2]
        second = rest[0] if rest and mix[rest[0]] > 0 else first
        edge = INK if client in descriptors.unseen else "white"
        colours: dict[str, Any] = {
            "markerfacecolor": class_colour(first, num_classes),
            "markerfacecoloralt": class_colour(second, num_classes),
        }
        axes.plot(*point, "o", fillstyle="left", markersize=8, markeredgecolor=edge, markeredgewidth=0.9, **colours)
    axes.set(xticks=[], yticks=[], title=title)
    axes.grid(False)


def _draw_distances(axes: Axes, descriptors: Descriptors) -> None:
    clients = descriptors.unseen if len(descriptors.unseen) else np.arange(len(descriptors.values))
    distances, mix_distances = descriptors.distances(clients)
    points = np.linspace(0, distances.size - 1, min(distances.size, _POINTS)).astype(int)
    axes.plot(mix_distances.ravel()[points], distances.ravel()[points], ".", markersize=3, alpha=0.3, color=GREY)
    axes.set_xlabel("distance of label mixes", fontsize=9)
    axes.set_ylabel("distance of descriptors", fontsize=9)
    if len(descriptors.unseen):
        correlation = np.mean(descriptors.rank_correlations)
        axes.set_title(f"Spearman, mean of unseen clients: {correlation:.2f}", fontsize=10)
