"""What rounds do to the latent space: where test samples of each class and their prototypes lie, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

import matplotlib
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from torch import Tensor

from raypfl.common.files import draft
from raypfl.data import load_federated
from raypfl.results.contenders import Contender, contenders, setting
from raypfl.results.picture import STYLE
from raypfl.server.setup import make_context, make_task

if TYPE_CHECKING:
    from raypfl.models.flat import FlatModel
    from raypfl.runs import Result

_SAMPLES = 600
_ROWS = 4
_SHOWN = 3  # rounds at most, of which the first is the start and the last the end
_SIZE = 2.9
_FEW_CLASSES = 20
_COSINES = "RdBu_r"


@dataclass(frozen=True)
class Portrait:
    """A global model's latent space after `round` rounds.

    Attributes
    ----------
    features : ``float64[n, d]`` of test samples, the input of the output layer.
    prototypes : ``float64[C, d]``, its rows; none if the layer has no such matrix.
    """

    round: int
    features: np.ndarray
    prototypes: np.ndarray


@dataclass(frozen=True)
class Latent:
    """The latent space of one run over its rounds.

    Attributes
    ----------
    portraits : in the order of rounds, from the start. labels : ``int64[n]`` of the test samples.
    """

    portraits: list[Portrait]
    labels: np.ndarray
    class_names: list[str]


def shown(results: Sequence[Result]) -> list[Contender]:
    """The first four methods with a global model, of those whose runs ask for the picture (``tracking.latent``)."""
    asked = [one for one in contenders(results) if one.results[0].experiment.tracking.latent]
    return [one for one in asked if _global(one.results[0], one.results[0].server_state()) is not None][:_ROWS]


def latent_of(result: Result) -> Latent:
    """The latent space at the start and after each round of which a checkpoint was kept, of up to 600 test samples."""
    experiment = result.experiment
    data = load_federated(experiment.data, experiment.partition, seed=experiment.seed)
    task = make_task(experiment, data, torch.device("cpu"))
    context = make_context(experiment, data, task)
    tested = context.everyone("test")
    x, y = context.samples.take(tested[np.linspace(0, len(tested) - 1, min(_SAMPLES, len(tested))).astype(int)])
    x = context.samples.normalise(x)
    states = [(0, experiment.method.start(task)), *result.server_states()]
    models = [(round, _global(result, state)) for round, state in states]
    portraits = [_portrait(task.model, round, theta, x) for round, theta in models if theta is not None]
    names = getattr(data, "class_names", None) or [str(c) for c in range(data.num_classes)]
    return Latent(portraits, y.numpy(), list(names))


def _portrait(model: FlatModel, round: int, theta: Tensor, x: Tensor) -> Portrait:
    with torch.no_grad(), model.mode(train=False):
        z, _ = model.features(theta, x)
    matrices = [t for t in model.unflatten(theta).values() if t.dim() == 2 and t.shape[1] == z.shape[1] and t.any()]
    # The last one that is of use: FedROD's personal head, all zeros in the global model, comes after the generic one.
    weight = matrices[-1] if matrices else z[:0]
    return Portrait(round, z.double().numpy(), weight.double().numpy())


def _global(result: Result, server: dict[str, Any]) -> Tensor | None:
    return result.experiment.method.global_model(server)


def draw(results: Sequence[Result], path: str | Path) -> Path:
    """Write a PNG: a row for each of :func:`shown` (its first seed), and in it the latent space at the start, halfway
    (if a checkpoint between is kept) and at the end, and the cosine of every two prototypes at the end.

    In two dimensions, features are as they are, on a scale of their own, and arrows are prototypes, the longest being
    1. In more, directions are projected onto the plane in which the classes' mean directions differ most at the end;
    stars are prototypes, which lines follow from the start.

    Parameters
    ----------
    results : at least one of them shown.
    path : of the PNG; its folder must exist.

    Returns
    -------
    The path.
    """
    rows = [(one, latent_of(one.results[0])) for one in shown(results)]
    columns = max(len(_chosen(latent)) for _, latent in rows)
    with matplotlib.rc_context(STYLE):
        size = ((columns + 1.35) * _SIZE, len(rows) * (_SIZE + 0.25) + 1.1)
        figure = Figure(figsize=size, layout=ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08))
        grid = figure.subplots(len(rows), columns + 1, squeeze=False)
        for axes, (contender, latent) in zip(grid, rows, strict=True):
            _row(figure, axes, latent)
            name = {"color": contender.colour, "fontsize": 12, "fontweight": "bold", "rotation": 90}
            axes[0].text(-0.2, 0.5, contender.label, transform=axes[0].transAxes, va="center", ha="center", **name)
        figure.suptitle(fill(setting(results[0].experiment, results[0].metadata), 100), fontsize=10, color="#777777")
        _legend(figure, rows[0][1])
        with draft(Path(path)) as file:
            figure.savefig(file, dpi=160)
    return Path(path)


def _row(figure: Figure, axes: np.ndarray, latent: Latent) -> None:
    chosen = _chosen(latent)
    flat = latent.portraits[-1].features.shape[1] == 2
    plane = None if flat else _plane(latent)
    axes[0].set_ylabel("latent dimension 2" if flat else "direction 2", fontsize=9)
    for place, at in enumerate(chosen):
        if plane is None:
            _as_it_is(axes[place], latent, at)
        else:
            _projected(axes[place], latent, at, plane)
        axes[place].set_title("start" if at == 0 else f"round {latent.portraits[at].round}")
        axes[place].set_xlabel("latent dimension 1" if flat else "direction 1", fontsize=9)
    for place in range(len(chosen), len(axes) - 1):
        axes[place].set_visible(False)
    _cosines(figure, axes[-1], latent)


def _chosen(latent: Latent) -> np.ndarray:
    """Which portraits are shown: the first, the last and one between, as far as there are any."""
    return np.unique(np.linspace(0, len(latent.portraits) - 1, _SHOWN).round().astype(int))


def _as_it_is(axes: Axes, latent: Latent, at: int) -> None:
    z, w = latent.portraits[at].features, latent.portraits[at].prototypes
    z = z / max(float(np.quantile(np.linalg.norm(z, axis=1), 0.95)), 1e-12)
    w = w / max(float(np.linalg.norm(w, axis=1).max()), 1e-12)
    axes.scatter(z[:, 0], z[:, 1], s=5, c=_colours(latent, latent.labels), linewidths=0, alpha=0.55)
    for c, (x, y) in enumerate(w):
        style = {"arrowstyle": "-|>", "color": _colours(latent)[c], "linewidth": 2.2, "shrinkA": 0, "shrinkB": 0}
        axes.annotate("", xy=(x, y), xytext=(0, 0), arrowprops=style)
    axes.plot(0, 0, "o", color="#333333", markersize=3)
    _square(axes, np.zeros(2), 1.35)


def _projected(axes: Axes, latent: Latent, at: int, plane: tuple[np.ndarray, np.ndarray]) -> None:
    centre, basis = plane
    paths = np.stack([(_unit(portrait.prototypes) - centre) @ basis for portrait in latent.portraits[: at + 1]])
    points = (_unit(latent.portraits[at].features) - centre) @ basis
    axes.scatter(points[:, 0], points[:, 1], s=5, c=_colours(latent, latent.labels), linewidths=0, alpha=0.45)
    for c, colour in enumerate(_colours(latent)):
        axes.plot(*paths[:, c].T, color=colour, linewidth=1.0, alpha=0.8)
        axes.plot(*paths[-1, c], "*", color=colour, markersize=13, markeredgecolor="white", markeredgewidth=0.8)
    ends = [(_unit(p.features) - centre) @ basis for p in (latent.portraits[0], latent.portraits[-1])]
    ends += [(_unit(p.prototypes) - centre) @ basis for p in latent.portraits]
    everything = np.concatenate(ends)
    low, high = everything.min(0), everything.max(0)
    _square(axes, (low + high) / 2, float((high - low).max()) * 0.54)


def _plane(latent: Latent) -> tuple[np.ndarray, np.ndarray]:
    """Centre ``[d]`` and two directions ``[d, 2]`` along which the classes' mean directions differ most at the end."""
    f = _unit(latent.portraits[-1].features)
    means = np.stack([f[latent.labels == c].mean(0) for c in np.unique(latent.labels)])
    centre = means.mean(0)
    return centre, np.linalg.svd(means - centre, full_matrices=False)[2][:2].T


def _cosines(figure: Figure, axes: Axes, latent: Latent) -> None:
    w = _unit(latent.portraits[-1].prototypes)
    if not len(w):
        axes.set_visible(False)
        return
    image = axes.imshow(w @ w.T, cmap=_COSINES, vmin=-1, vmax=1)
    few = len(w) <= _FEW_CLASSES
    axes.set_title(f"cosines of prototypes, round {latent.portraits[-1].round}", fontsize=10)
    axes.set_xlabel("class", fontsize=9)
    axes.set_ylabel("class", fontsize=9)
    axes.set_xticks(range(len(w)) if few else [], latent.class_names if few else [], fontsize=8, rotation=0)
    axes.set_yticks(range(len(w)) if few else [], latent.class_names if few else [], fontsize=8)
    if few and max(map(len, latent.class_names)) > 2:
        axes.tick_params(axis="x", rotation=90)
    bar = figure.colorbar(image, ax=axes, fraction=0.046, pad=0.03)
    bar.outline.set_visible(False)


def _square(axes: Axes, centre: np.ndarray, reach: float) -> None:
    axes.set_xlim(centre[0] - reach, centre[0] + reach)
    axes.set_ylim(centre[1] - reach, centre[1] + reach)
    axes.set_aspect("equal")
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_visible(True)
        spine.set_color("#DDDDDD")


def _unit(rows: np.ndarray) -> np.ndarray:
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)


def _colours(latent: Latent, labels: np.ndarray | None = None) -> Any:
    """A colour for each class, or for each sample."""
    scale = matplotlib.colormaps["tab10" if len(latent.class_names) <= 10 else "turbo"]
    count = len(latent.class_names)
    palette = np.array([to_rgb(scale(c if count <= 10 else c / (count - 1))) for c in range(count)])
    return palette if labels is None else palette[labels]


def _legend(figure: Figure, latent: Latent) -> None:
    handles: list[Line2D] = []
    if len(latent.class_names) <= _FEW_CLASSES:
        handles = [
            Line2D([], [], color=colour, marker="o", linestyle="", label=name)
            for name, colour in zip(latent.class_names, _colours(latent), strict=True)
        ]
    flat = latent.portraits[-1].features.shape[1] == 2
    shape = r"$\rightarrow$" if flat else "*"
    handles.append(Line2D([], [], color="#333333", linestyle="", markersize=12, label="prototype", marker=shape))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, handletextpad=0.2)
