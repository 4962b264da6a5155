"""What rounds do to the latent space, as a picture: where test samples of each class and their prototypes lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import Any

import matplotlib
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from torch import Tensor

from raypfl.common.errors import ConfigError
from raypfl.data import load_federated
from raypfl.engine.prepared import Prepared
from raypfl.models.flat import FlatModel
from raypfl.results.compared import RunGroup, group_runs, setting
from raypfl.results.drawing import GREY, INK, png
from raypfl.runs.result import RunResult

_SAMPLES = 600
_ROWS = 4
_COLUMNS = 3  # rounds at most, of which the first is the start and the last the end
_INCHES = 2.9  # of a panel
_FEW_CLASSES = 20
_COSINES = "RdBu_r"


@dataclass(frozen=True)
class Latent:
    """The latent space of one run after some of its rounds.

    Attributes
    ----------
    rounds : ascending, from 0, the start.
    features : after each, ``float64[n, d]`` of test samples, the input of the output layer.
    prototypes : after each, ``float64[C, d]``, the rows of that layer; ``[0, d]`` if it has no such matrix.
    labels : ``int64[n]`` of the test samples.
    """

    rounds: list[int]
    features: list[np.ndarray]
    prototypes: list[np.ndarray]
    labels: np.ndarray
    class_names: list[str]

    @property
    def columns(self) -> list[int]:
        """Which of the rounds are drawn: the first, the last and one between, as far as there are any."""
        return np.unique(np.linspace(0, len(self.rounds) - 1, _COLUMNS).round().astype(int)).tolist()

    @property
    def is_flat(self) -> bool:
        """Whether it has two dimensions."""
        return self.features[0].shape[1] == 2

    @property
    def colours(self) -> np.ndarray:
        """One for each class, ``float[C, 3]``."""
        count = len(self.class_names)
        scale = matplotlib.colormaps["tab10" if count <= 10 else "turbo"]
        return np.array([to_rgb(scale(c if count <= 10 else c / (count - 1))) for c in range(count)])


def shown(results: Sequence[RunResult]) -> list[RunGroup]:
    """The first four methods with a global model, of those whose runs ask for the picture (``tracking.latent``)."""
    asked = [one for one in group_runs(results) if one.results[0].experiment.tracking.latent]
    return [one for one in asked if _global(one.results[0], one.results[0].server_state()) is not None][:_ROWS]


def latent_of(result: RunResult) -> Latent:
    """The latent space at the start and after each round with a kept checkpoint, of up to 600 test samples."""
    experiment = result.experiment
    data = load_federated(experiment.data, experiment.partition, seed=experiment.seed)
    prepared = Prepared(experiment, data)
    context = prepared.context
    tested = context.union("test")
    x, y = context.samples.take(tested[np.linspace(0, len(tested) - 1, min(_SAMPLES, len(tested))).astype(int)])
    x = context.samples.normalise(x)
    states = [(0, experiment.method.start(prepared.task)), *result.server_states()]
    models = [(round, theta) for round, state in states if (theta := _global(result, state)) is not None]
    features, prototypes = zip(*(_portrait(prepared.model, theta, x) for _, theta in models), strict=True)
    names = getattr(data, "class_names", None) or [str(c) for c in range(data.num_classes)]
    return Latent([round for round, _ in models], list(features), list(prototypes), y.numpy(), list(names))


def _portrait(model: FlatModel, theta: Tensor, x: Tensor) -> tuple[np.ndarray, np.ndarray]:
    with torch.no_grad(), model.mode(train=False):
        z, _ = model.features(theta, x)
    matrices = [t for t in model.unflatten(theta).values() if t.dim() == 2 and t.shape[1] == z.shape[1] and t.any()]
    # The last one that is not all zeros: the global model of FedROD has an empty personal head after the generic one.
    weight = matrices[-1] if matrices else z[:0]
    return z.double().numpy(), weight.double().numpy()


def _global(result: RunResult, server: dict[str, Any]) -> Tensor | None:
    return result.experiment.method.global_model(server)


def draw(results: Sequence[RunResult], path: str | Path) -> Path:
    """Write a PNG: a row for each of :func:`shown` (its first seed), and in it the latent space at the start, halfway
    (if a checkpoint between is kept) and at the end, and the cosine of every two prototypes at the end.

    In two dimensions, features are drawn to a scale of their own, and arrows are prototypes, the longest of length 1.
    In more, directions are projected onto the plane in which the classes' mean directions differ most at the end;
    stars are prototypes, with lines that follow them from the start.

    It returns the path, whose folder must exist.

    Raises
    ------
    ConfigError : if none of the results is shown.
    """
    rows = [(one, latent_of(one.results[0])) for one in shown(results)]
    if not rows:
        raise ConfigError(
            "None of these runs has a latent space to draw: give one with tracking.latent=true, of a method with a "
            "global model."
        )
    columns = max(len(latent.columns) for _, latent in rows)
    with png(path, (columns + 1.35) * _INCHES, len(rows) * (_INCHES + 0.25) + 1.1) as figure:
        grid = figure.subplots(len(rows), columns + 1, squeeze=False)
        for axes, (group, latent) in zip(grid, rows, strict=True):
            _row(figure, axes, latent)
            name = {"color": group.colour, "fontsize": 12, "fontweight": "bold", "rotation": 90}
            axes[0].text(-0.2, 0.5, group.label, transform=axes[0].transAxes, va="center", ha="center", **name)
        figure.suptitle(fill(setting(results[0].experiment, results[0].metadata), 100), fontsize=10, color=GREY)
        _legend(figure, rows[0][1])
    return Path(path)


def _row(figure: Figure, axes: np.ndarray, latent: Latent) -> None:
    name = "latent dimension" if latent.is_flat else "direction"
    axes[0].set_ylabel(f"{name} 2", fontsize=9)
    for panel, at in zip(axes, latent.columns, strict=False):
        if latent.is_flat:
            _features(panel, latent, at)
        else:
            _directions(panel, latent, at)
        panel.set_title(f"round {latent.rounds[at]}" if at else "start")
        panel.set_xlabel(f"{name} 1", fontsize=9)
    for panel in axes[len(latent.columns) : -1]:
        panel.set_visible(False)
    _cosines(figure, axes[-1], latent)


def _features(axes: Axes, latent: Latent, at: int) -> None:
    z, w = latent.features[at], latent.prototypes[at]
    z = z / max(float(np.quantile(np.linalg.norm(z, axis=1), 0.95)), 1e-12)
    w = w / max(np.linalg.norm(w, axis=1).max(initial=0.0), 1e-12)
    axes.scatter(z[:, 0], z[:, 1], s=5, c=latent.colours[latent.labels], linewidths=0, alpha=0.55)
    for end, colour in zip(w, latent.colours, strict=False):
        style = {"arrowstyle": "-|>", "color": colour, "linewidth": 2.2, "shrinkA": 0, "shrinkB": 0}
        axes.annotate("", xy=tuple(end), xytext=(0, 0), arrowprops=style)
    axes.plot(0, 0, "o", color=INK, markersize=3)
    _square(axes, np.zeros(2), 1.35)


def _directions(axes: Axes, latent: Latent, at: int) -> None:
    centre, basis = _plane(latent)
    prototypes = np.stack([(_unit(w) - centre) @ basis for w in latent.prototypes])  # [rounds, C, 2]
    first, points, last = ((_unit(latent.features[i]) - centre) @ basis for i in (0, at, -1))
    axes.scatter(points[:, 0], points[:, 1], s=5, c=latent.colours[latent.labels], linewidths=0, alpha=0.45)
    for path, colour in zip(prototypes[: at + 1].swapaxes(0, 1), latent.colours, strict=False):
        axes.plot(*path.T, color=colour, linewidth=1.0, alpha=0.8)
        axes.plot(*path[-1], "*", color=colour, markersize=13, markeredgecolor="white", markeredgewidth=0.8)
    everything = np.concatenate([first, last, *prototypes])  # the same limits in every round
    low, high = everything.min(0), everything.max(0)
    _square(axes, (low + high) / 2, float((high - low).max()) * 0.54)


def _plane(latent: Latent) -> tuple[np.ndarray, np.ndarray]:
    """Centre ``[d]`` and two directions ``[d, 2]`` along which the classes' mean directions differ most at the end."""
    f = _unit(latent.features[-1])
    means = np.stack([f[latent.labels == c].mean(0) for c in np.unique(latent.labels)])
    centre = means.mean(0)
    return centre, np.linalg.svd(means - centre, full_matrices=False)[2][:2].T


def _cosines(figure: Figure, axes: Axes, latent: Latent) -> None:
    w = _unit(latent.prototypes[-1])
    if not len(w):
        axes.set_visible(False)
        return
    image = axes.imshow(w @ w.T, cmap=_COSINES, vmin=-1, vmax=1)
    names = latent.class_names if len(w) <= _FEW_CLASSES else []
    axes.grid(False)
    axes.set_title(f"cosines of prototypes, round {latent.rounds[-1]}", fontsize=10)
    axes.set_xlabel("class", fontsize=9)
    axes.set_ylabel("class", fontsize=9)
    axes.set_xticks(range(len(names)), names, fontsize=8, rotation=90 if max(map(len, names), default=0) > 2 else 0)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    figure.colorbar(image, ax=axes, fraction=0.046, pad=0.03).outline.set_visible(False)


def _square(axes: Axes, centre: np.ndarray, reach: float) -> None:
    axes.set(xlim=centre[0] + reach * np.array([-1, 1]), ylim=centre[1] + reach * np.array([-1, 1]), aspect="equal")
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set(visible=True, color="#DDDDDD")


def _unit(rows: np.ndarray) -> np.ndarray:
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)


def _legend(figure: Figure, latent: Latent) -> None:
    classes = zip(latent.class_names, latent.colours, strict=True) if len(latent.class_names) <= _FEW_CLASSES else ()
    handles = [Line2D([], [], color=colour, marker="o", linestyle="", label=name) for name, colour in classes]
    shape = r"$\rightarrow$" if latent.is_flat else "*"
    handles.append(Line2D([], [], color=INK, linestyle="", markersize=12, label="prototype", marker=shape))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), handletextpad=0.2)
