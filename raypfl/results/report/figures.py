"""The figures of a report: what to draw, a caption, and the text for those who cannot see it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import pyarrow.compute as pc
from markupsafe import Markup
from matplotlib.figure import Figure

from raypfl.common.counting import series
from raypfl.data.summary import Summary
from raypfl.results import client_data
from raypfl.results.drawing.canvas import FAINT, page_paint, svg
from raypfl.results.drawing.curves import Curves, draw_clients, draw_curves, scale, scale_rounds
from raypfl.results.numbers import (
    Axis,
    Curve,
    clients_from_worst,
    clients_with_both,
    logged_curve,
    loss_curve,
    metric_curves,
)
from raypfl.results.report.tables import protocol_name
from raypfl.results.run_groups import RunGroup
from raypfl.results.units import number_text

NARROW = (380, 290)
"""CSS pixels of a figure that shares its row or fills a phone."""
WIDE = (900, 380)
"""CSS pixels of a figure with a row to itself."""
SQUARE = (300, 290)
"""CSS pixels of a figure among many."""

_MOST_LOGGED = 12
_MOST_PLACES = 800  # discs in the plane of clients
_DISC = 18.0  # square pixels for each client
_LARGEST_DISC = 500.0
_SMALLEST_DISC = 2.0
_AXIS_LABELS = {
    "round": "round",
    "megabytes": "megabytes sent, up and down",
    "seconds": "seconds: rounds x median round, without evaluation",
    "simulated_seconds": "seconds on the clients' devices, simulated",
    "kilojoules": "energy of the clients' devices in kJ, simulated",
}
_AXIS_TITLES = {
    "megabytes": "Against megabytes",
    "seconds": "Against seconds",
    "simulated_seconds": "Against simulated time",
    "kilojoules": "Against energy",
}


@dataclass(frozen=True)
class ReportFigure:
    """A figure on the page.

    Attributes
    ----------
    wide : another drawing of the same, shown instead of `svg` where there is room for it.
    """

    title: str
    svg: Markup
    caption: str = ""
    wide: Markup | None = None


def metric_figure(groups: Sequence[RunGroup], protocol: str, against: Axis, wide: bool = False) -> ReportFigure:
    """Draw the primary metric over rounds or what they cost, with a band from the least to the greatest seed."""
    curves = metric_curves(groups, protocol, against)
    unsent = {key: curve for key, curve in curves.items() if against == "megabytes" and not curve.x.any()}
    unit = groups[0].unit
    test_data = protocol_name(protocol)

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        draw_curves(axes, groups, {key: curve for key, curve in curves.items() if key not in unsent}, page_paint)
        for (i, _), curve in unsent.items():
            axes.axhline(curve.mean[-1], **page_paint(i), linestyle=(0, (1, 2)), linewidth=1.6)

        scale(axes.yaxis)
        if any(len(curve.x) > 1 for curve in curves.values()):
            axes.set_xlim(0)
        if against == "round":
            scale_rounds(axes)
        else:
            scale(axes.xaxis)
        axes.set(xlabel=_AXIS_LABELS[against], ylabel=unit.label)

    ends = []
    for (i, model), curve in curves.items():
        first = unit.text(curve.mean[0])
        last = unit.text(curve.mean[-1])
        ends.append(f"{groups[i].label}, {model} model: from {first} to {last}{unit.sign}")
    alt = f"Lines of {unit.phrase} on {test_data}, against {_AXIS_LABELS[against]}. {'; '.join(ends)}."

    name = f"curves-{protocol}-{against}"
    title = _AXIS_TITLES.get(against, f"On {test_data}")
    large = svg(f"{name}-wide", alt, *WIDE, draw) if wide else None
    return ReportFigure(title, svg(name, alt, *NARROW, draw), _caption(groups, protocol, curves, unsent), large)


def loss_figure(groups: Sequence[RunGroup]) -> ReportFigure | None:
    """Draw the mean training loss of the cohort over rounds; None if no client trained."""
    curves = [loss_curve(group) for group in groups]
    return _round_figure(groups, curves, "loss", "training loss", "Training loss, mean over the cohort")


def logged_figures(groups: Sequence[RunGroup]) -> list[ReportFigure]:
    """Draw the numbers that methods logged, over rounds: a figure for each of the first dozen names."""
    tables = [result.logged for group in groups for result in group.results]
    names = dict.fromkeys(name for table in tables for name in pc.unique(table["name"]).to_pylist())

    figures = []
    for name in list(names)[:_MOST_LOGGED]:
        curves = [logged_curve(group, name) for group in groups]
        figure = _round_figure(groups, curves, f"logged-{name}", name, name)
        if figure is not None:
            figures.append(figure)
    return figures


def _round_figure(
    groups: Sequence[RunGroup], curve_of_each: Sequence[Curve | None], name: str, quantity: str, title: str
) -> ReportFigure | None:
    """A curve over rounds for each group that has one; None: none has."""
    curves = {i: curve for i, curve in enumerate(curve_of_each) if curve is not None}
    if not curves:
        return None

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        draw_curves(axes, groups, {(i, "personal"): curve for i, curve in curves.items()}, page_paint)
        scale_rounds(axes)
        scale(axes.yaxis)
        axes.set(xlabel="round", ylabel=quantity.removeprefix("training "))
        if min(curve.low.min() for curve in curves.values()) > 0:
            axes.set_ylim(0)

    ends = [f"{groups[i].label}: from {curve.mean[0]:.3g} to {curve.mean[-1]:.3g}" for i, curve in curves.items()]
    alt = f"Lines of {quantity} by round. {'; '.join(ends)}."
    caption = " ".join(_equal_lines(groups, {(i, ""): (curve.x, curve.mean) for i, curve in curves.items()}))
    return ReportFigure(title, svg(name, alt, *NARROW, draw), caption)


def clients_figure(groups: Sequence[RunGroup], protocol: str) -> ReportFigure:
    """Draw the final primary metric of each client with the model that it uses, from worst to best."""
    unit = groups[0].unit

    def draw(figure: Figure) -> None:
        draw_clients(figure.subplots(), groups, protocol, page_paint)

    ends = []
    lines = {}
    for i, group in enumerate(groups):
        values = clients_from_worst(group, protocol)
        if len(values):
            lines[i, group.deployed(protocol)] = [values]
            worst = unit.text(values[0])
            median = unit.text(float(np.median(values)))
            best = unit.text(values[-1])
            ends.append(f"{group.label}: worst {worst}, median {median}, best {best}{unit.sign}")
    alt = f"Sorted final values of {unit.phrase} of clients on {protocol_name(protocol)}. {'; '.join(ends)}."

    narrow = svg("sorted", alt, *NARROW, draw)
    wide = svg("sorted-wide", alt, *WIDE, draw)
    caption = " ".join(_equal_lines(groups, lines))
    return ReportFigure("Every client, from worst to best", narrow, caption, wide)


def personal_against_global(groups: Sequence[RunGroup], protocol: str) -> list[ReportFigure]:
    """Draw each client's scores in a plane, for each method with both models; a disc's area is a number of clients.

    Methods whose global model is partly untrained are left out.
    """
    figures = []
    for i, group in enumerate(groups):
        if group.leaves_untrained:
            continue
        scores = clients_with_both(group, protocol)
        if len(scores):
            figures.append(_plane_figure(i, group, scores))
    return figures


def partition_figure(summary: Summary) -> ReportFigure:
    """Draw what each client holds."""
    alt = (
        f"What {summary.num_clients:,} clients train on: between {summary.sizes['train'].min():,} and "
        f"{summary.sizes['train'].max():,} samples, of between {summary.classes_held.min()} and "
        f"{summary.classes_held.max()} of {len(summary.class_names)} classes."
    )

    draw = partial(client_data.paint, summary=summary)
    height = round(72 * client_data.height(summary))
    narrow, wide = (svg(f"partition-{width}", alt, width, height, draw) for width in (NARROW[0], WIDE[0]))
    return ReportFigure("", narrow, wide=wide)


def _caption(groups: Sequence[RunGroup], protocol: str, curves: Curves, unsent: Curves) -> str:
    """Sentences on the methods that are drawn in another way, or not at all."""
    sentences = []
    if unsent:
        names = series(dict.fromkeys(groups[i].label for i, _ in unsent))
        sentences.append(f"Dotted, at the final value: {names}, where nothing is sent.")

    groups_with_curve = {i for i, _ in curves}
    missing = []
    for i, group in enumerate(groups):
        if i not in groups_with_curve and protocol in group.protocols:
            missing.append(group.label)
    if missing:
        sentences.append(f"Not drawn: {series(missing)}, whose seeds were never evaluated in the same round.")
    lines = {key: (curve.x, curve.mean) for key, curve in curves.items()}
    return " ".join([*sentences, *_equal_lines(groups, lines)])


def _equal_lines(groups: Sequence[RunGroup], lines: Mapping[tuple[int, str], Sequence[np.ndarray]]) -> list[str]:
    """A sentence on the lines, by group and model, that are in the same place; empty if none are."""
    names_at: dict[tuple[bytes, ...], list[str]] = {}
    for (i, model), values in lines.items():
        name = f"{groups[i].label} ({model})" if model else groups[i].label
        names_at.setdefault(tuple(array.tobytes() for array in values), []).append(name)

    equal = [series(names) for names in names_at.values() if len(names) > 1]
    return [f"Equal lines: {'; '.join(equal)}."] if equal else []


def _plane_figure(index: int, group: RunGroup, scores: np.ndarray) -> ReportFigure:
    """Clients in the plane of the global and the personal model's `scores`, ``float64[n, 2]``."""
    unit = group.unit
    percent = unit.metric.percent
    low = float(scores.min())
    if percent:
        high = 100.0
        span = 100.0
    else:
        high = float(scores.max())
        span = max(high - low, 1e-9)
    places, counts = _places(scores, span)
    margin = 0.05 * (high - low + percent) or 1.0

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        axes.axline((low, low), slope=1, color=FAINT, linewidth=1)
        sizes = counts * max(min(_DISC, _LARGEST_DISC / counts.max()), _SMALLEST_DISC)
        axes.scatter(places[:, 0], places[:, 1], s=sizes, **page_paint(index), alpha=0.75, linewidths=0)

        for axis in (axes.xaxis, axes.yaxis):
            scale(axis, 5)
        limits = (low - margin, high + margin)
        sign = " (%)" if percent else ""
        axes.set(xlim=limits, ylim=limits, aspect="equal", xlabel=f"global model{sign}", ylabel=f"personal model{sign}")

    caption = _gain_caption(group, scores)
    alt = f"{group.label}: each client's {unit.phrase} with its personal model against that with the global. {caption}"
    return ReportFigure(group.label, svg(f"plane-{index}", alt, *SQUARE, draw), caption)


def _gain_caption(group: RunGroup, scores: np.ndarray) -> str:
    """A sentence on how many clients gain by their personal models, and how much on average."""
    unit = group.unit
    gains = scores[:, 1] - scores[:, 0]
    better = int((gains > 0).sum())
    worse = int((gains < 0).sum())
    if not unit.metric.higher_is_better:
        better, worse = worse, better

    mean = float(gains.mean())
    gain = number_text(mean, unit.digits([mean]), "+").replace("-", "−")
    if unit.metric.percent:
        gain += " points"
    return f"Better for {better:,} of {len(scores):,} clients, worse for {worse:,}; on average {gain}."


def _places(scores: np.ndarray, span: float) -> tuple[np.ndarray, np.ndarray]:
    """The places of clients in the plane, and the clients at each, on the finest grid over `span` with few places."""
    for step in (span * 0.001, span * 0.005, span * 0.01, span * 0.02):
        places, counts = np.unique(np.round(scores / step), axis=0, return_counts=True)
        if len(places) <= _MOST_PLACES:
            break
    return places * step, counts
