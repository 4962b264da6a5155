"""The latent space over rounds, as a picture: where test samples of each class and their prototypes lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from torch import Tensor

from raypfl.common.errors import ConfigError
from raypfl.engine.prepared import Prepared
from raypfl.models.flat import FlatModel
from raypfl.results.drawing.canvas import GREY, INK, png
from raypfl.results.drawing.classes import FEW_CLASSES, class_colour, draw_class_legend, name_row
from raypfl.results.run_groups import RunGroup, group_runs
from raypfl.results.setting_text import setting_text
from raypfl.runs.result import RunResult

_SAMPLES = 600
_ROWS = 4
_COLUMNS = 3  # rounds at most: the start, one between, and the end
_PANEL_INCHES = 2.9


@dataclass(frozen=True)
class LatentSpace:
    """The latent space of one run after some of its rounds.

    Attributes
    ----------
    rounds : ascending, from 0, the start.
    features : ``float64[n, d]`` of test samples after each round, the input of the output layer.
    prototypes : ``float64[C, d]`` after each round, the rows of that layer; ``[0, d]`` if it has no such matrix.
    labels : ``int64[n]`` of the test samples.
    """

    rounds: list[int]
    features: list[np.ndarray]
    prototypes: list[np.ndarray]
    labels: np.ndarray
    class_names: list[str]

    @property
    def columns(self) -> list[int]:
        """The indices of the rounds that are drawn: the first, the last and one between, as far as there are any."""
        return np.unique(np.linspace(0, len(self.rounds) - 1, _COLUMNS).round().astype(int)).tolist()

    @property
    def is_flat(self) -> bool:
        """Whether it has two dimensions."""
        return self.features[0].shape[1] == 2

    @property
    def colours(self) -> np.ndarray:
        """A colour for each class, ``float[C, 3]``."""
        classes = len(self.class_names)
        return np.array([class_colour(index, classes)[:3] for index in range(classes)])


def groups_to_draw(results: Sequence[RunResult]) -> list[RunGroup]:
    """Return the first four methods with a global model, of those whose runs ask for the picture
    (``tracking.latent``)."""
    groups = [group for group in group_runs(results) if group.results[0].experiment.tracking.latent]
    return [group for group in groups if _has_global_model(group.results[0])][:_ROWS]


def _has_global_model(result: RunResult) -> bool:
    return result.experiment.global_model(result.server_state()) is not None


def latent_of(result: RunResult) -> LatentSpace:
    """Return the latent space at the start and after each round with a kept checkpoint, of up to 600 test samples."""
    experiment = result.experiment
    data = experiment.load_data()
    prepared = Prepared(experiment, data)
    context = prepared.context

    tested = context.union("test")
    evenly_spread = np.linspace(0, len(tested) - 1, min(_SAMPLES, len(tested))).astype(int)
    x, y = context.samples.take(tested[evenly_spread])
    x = context.samples.normalise(x)

    rounds = []
    features = []
    prototypes = []
    for round, state in [(0, experiment.method.start(prepared.task)), *result.server_states()]:
        theta = experiment.global_model(state)
        if theta is not None:
            round_features, round_prototypes = _features_and_prototypes(prepared.model, theta, x)
            rounds.append(round)
            features.append(round_features)
            prototypes.append(round_prototypes)

    names = getattr(data, "class_names", None) or [str(index) for index in range(data.num_classes)]
    return LatentSpace(rounds, features, prototypes, y.numpy(), list(names))


def _features_and_prototypes(model: FlatModel, theta: Tensor, x: Tensor) -> tuple[np.ndarray, np.ndarray]:
    with torch.no_grad(), model.mode(train=False):
        features, _ = model.features(theta, x)

    tensors = model.unflatten(theta).values()
    matrices = [t for t in tensors if t.dim() == 2 and t.shape[1] == features.shape[1] and t.any()]
    # The last one that is not all zeros: the global model of FedROD has an empty personal head after the generic one.
    prototypes = matrices[-1] if matrices else features[:0]
    return features.double().numpy(), prototypes.double().numpy()


def draw(results: Sequence[RunResult], path: str | Path) -> Path:
    """Write a PNG with a row for each of :func:`groups_to_draw` (its first seed), and return its path.

    A row has the latent space at the start, halfway (if a checkpoint between is kept) and at the end, and the cosine of
    every two prototypes at the end. In two dimensions, features are drawn to a scale of their own, and arrows are
    prototypes, the longest of length 1. In more, directions are projected onto the plane in which the classes' mean
    directions differ most at the end; stars are prototypes, with lines that follow them from the start.

    The folder of `path` must exist.

    Raises
    ------
    ConfigError : if none of the results is shown.
    """
    rows = [(group, latent_of(group.results[0])) for group in groups_to_draw(results)]
    if not rows:
        raise ConfigError(
            "None of these runs has a latent space to draw: give one with tracking.latent=true, of a method with a "
            "global model."
        )

    columns = max(len(latent.columns) for _, latent in rows)
    with png(path, (columns + 1.35) * _PANEL_INCHES, len(rows) * (_PANEL_INCHES + 0.25) + 1.1) as figure:
        grid = figure.subplots(len(rows), columns + 1, squeeze=False)
        for panels, (group, latent) in zip(grid, rows, strict=True):
            _draw_row(figure, panels, latent)
            name_row(panels[0], group, x=-0.2)

        figure.suptitle(fill(setting_text(results), 100), fontsize=10, color=GREY)
        _draw_legend(figure, rows[0][1])
    return Path(path)


def _draw_row(figure: Figure, panels: np.ndarray, latent: LatentSpace) -> None:
    axis = "direction"
    draw_panel = _draw_directions
    if latent.is_flat:
        axis = "latent dimension"
        draw_panel = _draw_features

    panels[0].set_ylabel(f"{axis} 2", fontsize=9)
    for axes, index in zip(panels, latent.columns, strict=False):
        draw_panel(axes, latent, index)
        axes.set_title(f"round {latent.rounds[index]}" if index else "start")
        axes.set_xlabel(f"{axis} 1", fontsize=9)

    for axes in panels[len(latent.columns) : -1]:
        axes.set_visible(False)
    _draw_cosines(figure, panels[-1], latent)


def _draw_features(axes: Axes, latent: LatentSpace, index: int) -> None:
    """Features in the plane with prototypes as arrows, in the round at `index`."""
    z = latent.features[index]
    z = z / max(float(np.quantile(np.linalg.norm(z, axis=1), 0.95)), 1e-12)
    w = latent.prototypes[index]
    w = w / max(np.linalg.norm(w, axis=1).max(initial=0.0), 1e-12)

    axes.scatter(z[:, 0], z[:, 1], s=5, c=latent.colours[latent.labels], linewidths=0, alpha=0.55)
    for end, colour in zip(w, latent.colours, strict=False):
        style = {"arrowstyle": "-|>", "color": colour, "linewidth": 2.2, "shrinkA": 0, "shrinkB": 0}
        axes.annotate("", xy=tuple(end), xytext=(0, 0), arrowprops=style)
    axes.plot(0, 0, "o", color=INK, markersize=3)
    _frame(axes, np.zeros(2), 1.35)


def _draw_directions(axes: Axes, latent: LatentSpace, index: int) -> None:
    """Directions of features, projected, with prototypes as stars and their paths from the start to this round."""
    centre, basis = _class_plane(latent)

    def project(rows: np.ndarray) -> np.ndarray:
        return (_unit_rows(rows) - centre) @ basis

    first, points, last = (project(latent.features[i]) for i in (0, index, -1))
    # [rounds, C, 2]
    prototypes = np.stack([project(w) for w in latent.prototypes])

    axes.scatter(points[:, 0], points[:, 1], s=5, c=latent.colours[latent.labels], linewidths=0, alpha=0.45)
    for path, colour in zip(prototypes[: index + 1].swapaxes(0, 1), latent.colours, strict=False):
        axes.plot(*path.T, color=colour, linewidth=1.0, alpha=0.8)
        axes.plot(*path[-1], "*", color=colour, markersize=13, markeredgecolor="white", markeredgewidth=0.8)

    # All panels of the row have the same limits.
    everything = np.concatenate([first, last, *prototypes])
    low = everything.min(0)
    high = everything.max(0)
    _frame(axes, (low + high) / 2, float((high - low).max()) * 0.54)


def _class_plane(latent: LatentSpace) -> tuple[np.ndarray, np.ndarray]:
    """Centre ``[d]`` and two directions ``[d, 2]`` along which the classes' mean directions differ most at the end."""
    directions = _unit_rows(latent.features[-1])
    means = np.stack([directions[latent.labels == label].mean(0) for label in np.unique(latent.labels)])
    centre = means.mean(0)
    return centre, np.linalg.svd(means - centre, full_matrices=False)[2][:2].T


def _draw_cosines(figure: Figure, axes: Axes, latent: LatentSpace) -> None:
    prototypes = _unit_rows(latent.prototypes[-1])
    if not len(prototypes):
        axes.set_visible(False)
        return

    image = axes.imshow(prototypes @ prototypes.T, cmap="RdBu_r", vmin=-1, vmax=1)
    axes.grid(False)
    axes.set_title(f"cosines of prototypes, round {latent.rounds[-1]}", fontsize=10)
    axes.set_xlabel("class", fontsize=9)
    axes.set_ylabel("class", fontsize=9)

    names = latent.class_names if len(prototypes) <= FEW_CLASSES else []
    are_long = max(map(len, names), default=0) > 2
    axes.set_xticks(range(len(names)), names, fontsize=8, rotation=90 if are_long else 0)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    figure.colorbar(image, ax=axes, fraction=0.046, pad=0.03).outline.set_visible(False)


def _frame(axes: Axes, centre: np.ndarray, reach: float) -> None:
    """Draw a square frame without numbers."""
    span = reach * np.array([-1, 1])
    axes.set(xlim=centre[0] + span, ylim=centre[1] + span, aspect="equal")
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set(visible=True, color="#DDDDDD")


def _unit_rows(rows: np.ndarray) -> np.ndarray:
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)


def _draw_legend(figure: Figure, latent: LatentSpace) -> None:
    marker: Any = r"$\rightarrow$" if latent.is_flat else "*"
    prototype = Line2D([], [], color=INK, linestyle="", markersize=12, label="prototype", marker=marker)
    draw_class_legend(figure, latent.class_names, prototype)
