"""Who holds what, as a picture: clients across, classes down, and how much each client has above."""

from __future__ import annotations

from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from raypfl.common.files import draft
from raypfl.data.summary import Summary
from raypfl.results.picture import STYLE

COLOUR, QUIET = "#1F5FA8", "#B9C3CE"
_SHADES = LinearSegmentedColormap.from_list("shades", [f"{COLOUR}00", COLOUR])  # shows on light ground and on dark
_FEW_CLASSES = 30
_WIDTH, _MARGIN = 0.28, 1.8  # inches for each client, and beside them
_NARROWEST = 0.17  # for a bubble
# Columns of the picture of many clients; where there are more clients, neighbours share one.
_COLUMNS = 1500
_NAME_LENGTH = 18
_LARGEST = 340.0  # bubble, in square points


def draw(summary: Summary, path: str | Path) -> Path:
    """Write a PNG of the training samples.

    Up to about 60 clients and 30 classes: a bubble for each client and class, its area in proportion to the samples.
    Beyond: each client's label mix as a column of shades, and of more clients than that in the order of the class that
    they have most of.

    Parameters
    ----------
    path : of the PNG; its folder must exist.

    Returns
    -------
    The path.
    """
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(min(5 + _WIDTH * summary.num_clients, 13), height(summary)), layout="constrained")
        paint(figure, summary)
        figure.axes[0].set_title(f"{summary.name}: what {summary.num_clients:,} clients train on")
        with draft(Path(path)) as file:
            figure.savefig(file, dpi=160)
    return Path(path)


def height(summary: Summary) -> float:
    """That suits the picture, in inches."""
    return 2.6 + 0.3 * min(max(len(summary.class_names), 6), 24)


def paint(figure: Figure, summary: Summary) -> None:
    """The picture on an empty figure: bubbles if it is wide enough for them, else shades."""
    width, tall = figure.get_size_inches()
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(1, max(tall - 2.2, 1.5)))
    room = (width - _MARGIN) / summary.num_clients
    few = room >= _NARROWEST
    order = np.arange(summary.num_clients) if few else _sorted(summary.shares)
    if few and len(summary.class_names) <= _FEW_CLASSES:
        _bubbles(below, summary, _LARGEST * min(room / _WIDTH, 1.0) ** 2)
    else:
        _shades(figure, below, summary.shares[order])
    _sizes(above, summary, order, few)
    _explain(above, below, summary, few)


def _sorted(shares: np.ndarray) -> np.ndarray:
    """Clients by the class that they have most of, and within it by how much of it they have."""
    most = shares.argmax(axis=1)
    return np.lexsort((-shares.max(axis=1), most))


def _bubbles(axes: Axes, summary: Summary, largest: float) -> None:
    client, label = np.nonzero(summary.counts)
    counts = summary.counts[client, label]
    colours = np.where(np.isin(client, summary.unseen), QUIET, COLOUR)
    axes.scatter(client, label, s=largest * counts / counts.max(), c=colours.tolist(), linewidths=0)
    for step in _steps(int(counts.max())):
        axes.scatter([], [], s=largest * step / counts.max(), c=COLOUR, linewidths=0, label=f"{step:,}")
    axes.legend(
        title="samples", loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, labelspacing=1.4, borderpad=1.0
    )
    axes.grid(True)
    axes.set_axisbelow(True)


def _steps(largest: int) -> list[int]:
    """Up to three numbers for a legend, ascending: the last of 1, 2, 5, 10, 20, ... within `largest`, and every second
    one before it."""
    powers = 10 ** np.arange(len(str(largest)))
    known = np.outer(powers, (1, 2, 5)).ravel()
    return known[known <= largest][::-1][:5:2][::-1].tolist()


def _shades(figure: Figure, axes: Axes, shares: np.ndarray) -> None:
    starts = np.unique(np.linspace(0, len(shares), min(_COLUMNS, len(shares)), endpoint=False).astype(int))
    lengths = np.diff(np.append(starts, len(shares)))[:, None]
    columns = np.add.reduceat(shares, starts, axis=0) / lengths
    extent = (-0.5, len(shares) - 0.5, shares.shape[1] - 0.5, -0.5)
    # Up to the largest share there is, since those of many classes are small.
    most = float(columns.max()) or 1.0
    image = axes.imshow(
        columns.T, aspect="auto", cmap=_SHADES, vmin=0, vmax=most, extent=extent, interpolation="nearest"
    )
    axes.grid(False)
    bar = figure.colorbar(image, ax=axes, label="share of the client's samples", pad=0.01, fraction=0.03)
    bar.outline.set_visible(False)
    bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:.3g} %"))


def _sizes(axes: Axes, summary: Summary, order: np.ndarray, few: bool) -> None:
    sizes = summary.sizes["train"][order]
    colours = np.where(np.isin(order, summary.unseen), QUIET, COLOUR)
    if few:
        axes.bar(np.arange(len(order)), sizes, width=0.7, color=colours.tolist())
    else:
        trained = ~np.isin(order, summary.unseen)
        for chosen, colour in ((trained, COLOUR), (~trained, QUIET)):
            axes.fill_between(np.arange(len(order)), sizes * chosen, step="mid", color=colour, linewidth=0)
    if sizes.max() > 50 * max(np.median(sizes), 1):
        axes.set_yscale("log")
    else:
        axes.set_ylim(0)
        axes.yaxis.set_major_locator(MaxNLocator(3, integer=True))
    axes.tick_params(labelbottom=False)
    axes.grid(True, axis="y")
    axes.set_axisbelow(True)


def _explain(above: Axes, below: Axes, summary: Summary, few: bool) -> None:
    above.set(ylabel="samples")
    count = len(summary.class_names)
    every = -(-count // _FEW_CLASSES)
    below.set_yticks(range(0, count, every), [_short(name) for name in summary.class_names[::every]])
    below.set_ylim(count - 0.5, -0.5)
    below.set_xlim(-0.7, summary.num_clients - 0.3)
    below.xaxis.set_major_locator(MaxNLocator(min(summary.num_clients + 1, 13), integer=True, steps=[1, 2, 5, 10]))
    below.xaxis.set_minor_locator(NullLocator())
    kind = summary.one
    clients = "client" if few else f"clients, sorted by the {kind} that they have most of"
    quiet = " (grey: never trained)" if len(summary.unseen) else ""
    below.set(ylabel=kind, xlabel=clients + quiet)


def _short(name: str) -> str:
    return name if len(name) <= _NAME_LENGTH else f"{name[: _NAME_LENGTH - 1]}…"
