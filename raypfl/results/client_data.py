"""What each client holds: as tables, as JSON, and as a picture with clients across, classes down, sizes above."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from raypfl.common.counting import counted
from raypfl.common.errors import listed
from raypfl.data.summary import Summary
from raypfl.learning.objectives.regression import standardising
from raypfl.results.drawing.canvas import DATA, PALE, png

_SHADES = LinearSegmentedColormap.from_list("shades", [f"{DATA}00", DATA])  # for light and dark backgrounds
_FEW_CLASSES = 30
_CLIENT_INCHES = 0.28
_NARROWEST_CLIENT_INCHES = 0.17
_INCHES_FOR_NAMES = 0.8
_MARGIN_INCHES = 1.8  # for axes and legend
_MOST_COLUMNS = 1500  # in the picture of many clients; with more clients, neighbours share a column
_LONGEST_NAME = 18
_LONGEST_LINE = 60
_MOST_NAMED = 30  # clients, in the table and the picture
_MOST_WORDS = 12
_LARGEST_BUBBLE = 340.0  # square points


def show(console: Console, summary: Summary) -> None:
    """Print what clients hold, split by split, how their labels differ, and the pools."""
    shape = "x".join(map(str, summary.input_shape))
    inputs = f"{shape} numbers" if len(summary.input_shape) == 1 else shape
    kinds = "" if summary.numbers else f"{counted(len(summary.class_names), summary.unit, summary.units)}, "
    clients = counted(summary.num_clients, "client")
    samples = counted(sum(int(sizes.sum()) for sizes in summary.sizes.values()), "sample")
    unseen = f", {len(summary.unseen)} of them never trained" if len(summary.unseen) else ""
    console.print(Text.assemble((summary.name, "bold"), f": {samples} of {inputs}, {kinds}{clients}{unseen}"))

    totals = {name: f"{sizes.sum():,}" for name, sizes in summary.sizes.items()}
    console.print(_table("samples of a client", sizes_of(summary), totals))
    console.print(_table("training labels of a client", labels_of(summary)))
    if summary.kind == "classes" and summary.unseen_with_new_classes.size:
        unseen_clients = listed(summary.unseen_with_new_classes, _MOST_NAMED)
        console.print(Text(f"No trained client has just the classes of these unseen clients: {unseen_clients}."))

    if summary.client_names is not None:
        console.print(_table_of_names(summary, summary.client_names))
    if summary.features is not None:
        console.print(_table_of_moments("input", "feature", summary.features))
    if summary.vocabulary is not None:
        size = counted(len(summary.vocabulary), "token")
        words = listed(map(_shortened, summary.vocabulary), _MOST_WORDS)
        console.print(Text.assemble(f"vocabulary of {size}: ", words))
    if summary.numbers is not None:
        console.print(_table_of_moments("output", "number to predict", summary.numbers))
        _, mean, deviation = summary.numbers[0]
        if len(summary.numbers) == 1 and deviation > 0:
            console.print(Text(f"To standardise it: {standardising(mean, deviation)}"))
    outputs = _outputs(summary)
    if outputs:
        console.print(Text.assemble("outputs: ", outputs))

    for name, count in summary.pools.items():
        console.print(Text.assemble("pool ", (name, "bold"), f": {counted(count, 'sample')}"))


def as_json(summary: Summary) -> dict[str, Any]:
    """Return the same as numbers."""
    classes, entropy, distance = labels_of(summary).values()
    samples = {name: {"total": int(summary.sizes[name].sum()), **spread} for name, spread in sizes_of(summary).items()}
    return {
        "name": summary.name,
        "input_shape": list(summary.input_shape),
        "classes": summary.class_names,
        "clients": summary.num_clients,
        "features": _moments_as_json(summary.features),
        "numbers": _moments_as_json(summary.numbers),
        "vocabulary": summary.vocabulary,
        "client_names": None if summary.client_names is None else list(summary.client_names),
        "unseen": summary.unseen.tolist(),
        "unseen_with_new_classes": summary.unseen_with_new_classes.tolist(),
        "samples": samples,
        "classes_held": classes,
        "label_entropy_bits": entropy,
        "earth_movers_distance": distance,
        "pools": summary.pools,
    }


def sizes_of(summary: Summary) -> dict[str, dict[str, float]]:
    """Return how many samples clients hold of each split: min, median, mean and max."""
    return {name: _over_clients(sizes) for name, sizes in summary.sizes.items()}


def labels_of(summary: Summary) -> dict[str, dict[str, float]]:
    """Return how clients' training labels differ, in three measures: min, median, mean and max of each."""
    return {
        f"{summary.units} held": _over_clients(summary.classes_held),
        f"label entropy (bits, at most {math.log2(len(summary.class_names)):.2f})": _over_clients(summary.entropy),
        "earth mover's distance to all clients' mix": _over_clients(summary.distance),
    }


def number(value: float) -> str:
    """Return a number as text: none, one or two decimals, so that both counts and shares read well."""
    if value == round(value):
        return f"{value:,.0f}"
    if value >= 100:
        return f"{value:,.1f}"
    return f"{value:.2f}"


def draw(summary: Summary, path: str | Path) -> Path:
    """Write a PNG of the training samples, and return its path; its folder must exist.

    Up to about 60 clients and 30 classes: a bubble for each client and class, its area in proportion to the samples.
    Beyond: each client's label mix as a column of shades. More clients than that are sorted by the class that they
    have most of.
    """
    width = min(5 + _CLIENT_INCHES * summary.num_clients, 13)
    with png(path, width, height(summary)) as figure:
        paint(figure, summary)
        figure.axes[0].set_title(f"{summary.name}: what {summary.num_clients:,} clients train on")
    return Path(path)


def height(summary: Summary) -> float:
    """Return the height in inches that suits the picture."""
    inches_for_names = 0.0 if _few_names(summary) is None else _INCHES_FOR_NAMES
    return 2.6 + 0.3 * min(max(len(summary.class_names), 6), 24) + inches_for_names


def paint(figure: Figure, summary: Summary) -> None:
    """Draw the picture on an empty figure: bubbles if it is wide enough for them, else shades."""
    width, figure_height = figure.get_size_inches()
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(1, max(figure_height - 2.2, 1.5)))
    client_inches = (width - _MARGIN_INCHES) / summary.num_clients
    few_clients = client_inches >= _NARROWEST_CLIENT_INCHES

    shares = summary.shares
    order = np.arange(summary.num_clients)
    if not few_clients:
        # Many clients are sorted by the class that they have most of, and within it by how much of it they have.
        order = np.lexsort((-shares.max(axis=1), shares.argmax(axis=1)))

    if few_clients and len(summary.class_names) <= _FEW_CLASSES:
        _draw_bubbles(below, summary, _LARGEST_BUBBLE * min(client_inches / _CLIENT_INCHES, 1.0) ** 2)
    else:
        _draw_shades(figure, below, shares[order])
    _draw_sizes(above, summary, order, few_clients)
    _label_axes(above, below, summary, few_clients)


def _draw_bubbles(axes: Axes, summary: Summary, largest: float) -> None:
    clients, classes = np.nonzero(summary.counts)
    counts = summary.counts[clients, classes]
    colours = np.where(np.isin(clients, summary.unseen), PALE, DATA)
    axes.scatter(clients, classes, s=largest * counts / counts.max(), c=colours.tolist(), linewidths=0)

    for step in _legend_steps(int(counts.max())):
        axes.scatter([], [], s=largest * step / counts.max(), c=DATA, linewidths=0, label=f"{step:,}")
    axes.legend(title="samples", loc="center left", bbox_to_anchor=(1.01, 0.5), labelspacing=1.4, borderpad=1.0)


def _legend_steps(largest: int) -> list[int]:
    """Up to three numbers for a legend, ascending: the last of 1, 2, 5, 10, 20, ... within `largest`, and every second
    one before it."""
    steps = np.outer(10 ** np.arange(len(str(largest))), (1, 2, 5)).ravel()
    descending = steps[steps <= largest][::-1]
    return descending[:5:2][::-1].tolist()


def _draw_shades(figure: Figure, axes: Axes, shares: np.ndarray) -> None:
    clients, classes = shares.shape
    starts = np.unique(np.linspace(0, clients, min(_MOST_COLUMNS, clients), endpoint=False).astype(int))
    columns = np.add.reduceat(shares, starts, axis=0) / np.diff(np.append(starts, clients))[:, None]

    look: dict[str, Any] = {"aspect": "auto", "interpolation": "nearest", "cmap": _SHADES}
    extent = (-0.5, clients - 0.5, classes - 0.5, -0.5)
    # Scaled to the largest share, since shares are small if there are many classes.
    image = axes.imshow(columns.T, extent=extent, vmin=0, vmax=float(columns.max()) or 1.0, **look)
    axes.grid(False)

    bar = figure.colorbar(image, ax=axes, label="share of the client's samples", pad=0.01, fraction=0.03)
    bar.outline.set_visible(False)
    bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:.3g} %"))


def _draw_sizes(axes: Axes, summary: Summary, order: np.ndarray, few_clients: bool) -> None:
    sizes = summary.sizes["train"][order]
    unseen = np.isin(order, summary.unseen)
    for chosen, colour in ((~unseen, DATA), (unseen, PALE)):
        if few_clients:
            axes.bar(np.flatnonzero(chosen), sizes[chosen], width=0.7, color=colour)
        else:
            axes.fill_between(np.arange(len(order)), sizes * chosen, step="mid", color=colour, linewidth=0)

    if sizes.max() > 50 * max(np.median(sizes), 1):
        axes.set_yscale("log")
    else:
        axes.set_ylim(0)
        axes.yaxis.set_major_locator(MaxNLocator(3, integer=True))
    axes.tick_params(labelbottom=False)
    axes.grid(False, axis="x")


def _label_axes(above: Axes, below: Axes, summary: Summary, few_clients: bool) -> None:
    above.set(ylabel="samples")

    classes = len(summary.class_names)
    # Name every class or, if there are many, one in `step`.
    step = math.ceil(classes / _FEW_CLASSES)
    class_names = [_shortened(name) for name in summary.class_names[::step]]
    below.set_yticks(range(0, classes, step), class_names)
    below.set(ylim=(classes - 0.5, -0.5), xlim=(-0.7, summary.num_clients - 0.3))
    below.xaxis.set_major_locator(MaxNLocator(min(summary.num_clients + 1, 13), integer=True, steps=[1, 2, 5, 10]))
    below.xaxis.set_minor_locator(NullLocator())

    clients = "client" if few_clients else f"clients, sorted by the {summary.unit} that they have most of"
    unseen = " (grey: never trained)" if len(summary.unseen) else ""
    below.set(ylabel=summary.unit, xlabel=f"{clients}{unseen}")
    client_names = _few_names(summary)
    if few_clients and client_names is not None:
        labels = [_shortened(name) for name in client_names]
        below.set_xticks(range(len(labels)), labels, rotation=45, ha="right", rotation_mode="anchor")


def _few_names(summary: Summary) -> Sequence[str] | None:
    """Return the clients' names, if they have names that fit below the picture."""
    return summary.client_names if summary.num_clients <= _MOST_NAMED else None


def _shortened(name: str, longest: int = _LONGEST_NAME) -> str:
    return name if len(name) <= longest else f"{name[: longest - 1]}…"


def _table_of_names(summary: Summary, names: Sequence[str]) -> Table:
    """Return a row for each of the first clients: number, name, and samples of each split."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("client", justify="right")
    table.add_column("name")
    for split in summary.sizes:
        table.add_column(split, justify="right")

    for client, name in enumerate(names[:_MOST_NAMED]):
        unseen = " (never trained)" if client in summary.unseen else ""
        counts = [f"{sizes[client]:,}" for sizes in summary.sizes.values()]
        table.add_row(str(client), Text(f"{_shortened(name, _LONGEST_LINE)}{unseen}"), *counts)
    _caption_left_out(table, len(names))
    return table


def _table_of_moments(position: str, heading: str, moments: Sequence[tuple[str, float, float]]) -> Table:
    """Return a row for each of the network's first inputs or outputs: its position and name, and what standardises it.

    Parameters
    ----------
    position, heading : headings of the first two columns.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(position, justify="right")
    table.add_column(heading)
    table.add_column("mean", justify="right")
    table.add_column("deviation", justify="right")

    for index, (name, mean, deviation) in enumerate(moments[:_MOST_NAMED]):
        cells = [f"{mean:.4g}", f"{deviation:.4g}"]
        if (mean, deviation) == (0.0, 1.0):
            cells = ["as it is", ""]
        table.add_row(str(index), Text(_shortened(name, _LONGEST_LINE)), *cells)
    _caption_left_out(table, len(moments))
    return table


def _caption_left_out(table: Table, count: int) -> None:
    """Say below a table how many of `count` it leaves out."""
    if count > _MOST_NAMED:
        table.caption = f"and {count - _MOST_NAMED:,} more, which --json lists"


def _outputs(summary: Summary) -> str:
    """Return the network's outputs by number and name; empty if classes are numbered or outputs are of another kind."""
    names = summary.class_names
    is_numbered = names == [str(number) for number in range(len(names))]
    if summary.kind not in ("classes", "labels") or is_numbered:
        return ""

    return listed((f"{number} {_shortened(name)}" for number, name in enumerate(names)), _MOST_NAMED)


def _moments_as_json(moments: Sequence[tuple[str, float, float]] | None) -> list[dict[str, Any]] | None:
    if moments is None:
        return None
    return [{"name": name, "mean": mean, "deviation": deviation} for name, mean, deviation in moments]


def _over_clients(values: np.ndarray) -> dict[str, float]:
    return {name: float(getattr(np, name)(values)) for name in ("min", "median", "mean", "max")}


def _table(title: str, rows: Mapping[str, Mapping[str, float]], totals: Mapping[str, str] | None = None) -> Table:
    """Return a row for each line of `rows`, with its total if there are any."""
    headings = list(next(iter(rows.values())))
    if totals:
        headings.append("all clients")

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(title)
    for heading in headings:
        table.add_column(heading, justify="right")

    for name, spread in rows.items():
        cells = [number(value) for value in spread.values()]
        if totals:
            cells.append(totals[name])
        table.add_row(name, *cells)
    return table
