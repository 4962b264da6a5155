"""The figures of a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow.compute as pc
from markupsafe import Markup
from matplotlib.figure import Figure

from raypfl.data.summary import Summary
from raypfl.results import client_data
from raypfl.results.compared import RunGroup
from raypfl.results.drawing import Curves, draw_clients, draw_curves, scale, scale_rounds
from raypfl.results.numbers import (
    Axis,
    Curve,
    clients_from_worst,
    clients_with_both,
    logged_curve,
    loss_curve,
    metric_curves,
)
from raypfl.results.report.svg import FAINT, drawn, paint
from raypfl.results.report.tables import listed, protocol_name

NARROW, WIDE, SQUARE = (380, 290), (900, 380), (300, 290)
"""CSS pixels: of a figure that shares its row or fills a phone, of one with a row to itself, of one among many."""

_MOST_LOGGED = 12
_MOST_PLACES = 800  # of clients in the plane
_DISC, _LARGEST_DISC, _SMALLEST_DISC = 18.0, 500.0, 2.0  # square pixels, for a client
_AXIS = {"round": "round", "megabytes": "megabytes sent, up and down", "seconds": "seconds, without evaluation"}


@dataclass(frozen=True)
class Drawing:
    """A figure on the page: `wide` is shown instead of `svg` where there is room for it."""

    title: str
    svg: Markup
    caption: str = ""
    wide: Markup | None = None


def curves(compared: Sequence[RunGroup], protocol: str, against: Axis, wide: bool = False) -> Drawing:
    """The primary metric over rounds, megabytes or seconds, with a band from the least to the greatest of the seeds."""
    found = metric_curves(compared, protocol, against)
    unsent = {key: curve for key, curve in found.items() if against == "megabytes" and not curve.x.any()}
    unit, tested = compared[0].unit, protocol_name(protocol)

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        draw_curves(axes, compared, {key: curve for key, curve in found.items() if key not in unsent}, paint)
        for (i, _), curve in unsent.items():
            axes.axhline(curve.mean[-1], **paint(i), linestyle=(0, (1, 2)), linewidth=1.6)
        scale(axes.yaxis)
        if any(len(curve.x) > 1 for curve in found.values()):
            axes.set_xlim(0)
        (scale_rounds(axes) if against == "round" else scale(axes.xaxis))
        axes.set(xlabel=_AXIS[against], ylabel=unit.label)

    ends = [
        f"{compared[i].label}, {model} model: from {unit.text(curve.mean[0])} to {unit.text(curve.mean[-1])}{unit.sign}"
        for (i, model), curve in found.items()
    ]
    alt = f"Lines of {unit.phrase} on {tested}, against {_AXIS[against]}. {'; '.join(ends)}."
    name = f"curves-{protocol}-{against}"
    title = {"round": f"On {tested}", "megabytes": "Against megabytes", "seconds": "Against seconds"}[against]
    large = drawn(f"{name}-wide", alt, *WIDE, draw) if wide else None
    return Drawing(title, drawn(name, alt, *NARROW, draw), _exceptions(compared, protocol, found, unsent), large)


def losses(compared: Sequence[RunGroup]) -> Drawing | None:
    """Mean training loss of the cohort over rounds; None if no client trained."""
    found = {i: curve for i, one in enumerate(compared) if (curve := loss_curve(one))}
    return _by_round(compared, found, "loss", "training loss", "Training loss, mean over the cohort")


def logged(compared: Sequence[RunGroup]) -> list[Drawing]:
    """The numbers that methods logged, over rounds: a figure for each of the first dozen names."""
    tables = [result.logged for one in compared for result in one.results]
    drawings = []
    for name in dict.fromkeys(name for table in tables for name in pc.unique(table["name"]).to_pylist()):
        found = {i: curve for i, one in enumerate(compared) if (curve := logged_curve(one, name))}
        drawings.append(_by_round(compared, found, f"logged-{name}", name, name))
    return [drawing for drawing in drawings[:_MOST_LOGGED] if drawing]


def _by_round(
    compared: Sequence[RunGroup], found: Mapping[int, Curve], key: str, what: str, title: str
) -> Drawing | None:
    """Curves of groups, by their index; None: there is none."""
    if not found:
        return None

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        draw_curves(axes, compared, {(i, "personal"): curve for i, curve in found.items()}, paint)
        scale_rounds(axes)
        scale(axes.yaxis)
        axes.set(xlabel="round", ylabel=what.removeprefix("training "))
        if min(curve.low.min() for curve in found.values()) > 0:
            axes.set_ylim(0)

    ends = [f"{compared[i].label}: from {curve.mean[0]:.3g} to {curve.mean[-1]:.3g}" for i, curve in found.items()]
    alt = f"Lines of {what} by round. {'; '.join(ends)}."
    return Drawing(title, drawn(key, alt, *NARROW, draw))


def sorted_clients(compared: Sequence[RunGroup], protocol: str) -> Drawing:
    """The final primary metric of each client with the model that it uses, from the worst to the best."""
    unit = compared[0].unit

    def draw(figure: Figure) -> None:
        draw_clients(figure.subplots(), compared, protocol, paint)

    ends = []
    for one in compared:
        values = clients_from_worst(one, protocol)
        if len(values):
            worst, middle, best = (unit.text(values[0]), unit.text(float(np.median(values))), unit.text(values[-1]))
            ends.append(f"{one.label}: worst {worst}, median {middle}, best {best}{unit.sign}")
    alt = f"Sorted final values of {unit.phrase} of clients on {protocol_name(protocol)}. {'; '.join(ends)}."
    narrow, wide = drawn("sorted", alt, *NARROW, draw), drawn("sorted-wide", alt, *WIDE, draw)
    return Drawing("Every client, from worst to best", narrow, wide=wide)


def personal_against_global(compared: Sequence[RunGroup], protocol: str) -> list[Drawing]:
    """For each method that has both models, discs where its clients are; the area says how many."""
    found = {i: both for i, one in enumerate(compared) if len(both := clients_with_both(one, protocol))}
    return [_plane(i, compared[i], both) for i, both in found.items()]


def partition(summary: Summary) -> Drawing:
    """Who holds what."""
    alt = (
        f"What {summary.num_clients:,} clients train on: between {summary.sizes['train'].min():,} and "
        f"{summary.sizes['train'].max():,} samples, of between {summary.classes_held.min()} and "
        f"{summary.classes_held.max()} of {len(summary.class_names)} classes."
    )
    height = round(72 * client_data.height(summary))
    narrow, wide = (
        drawn(f"partition-{width}", alt, width, height, lambda figure: client_data.paint(figure, summary))
        for width in (NARROW[0], WIDE[0])
    )
    return Drawing("", narrow, wide=wide)


def _exceptions(compared: Sequence[RunGroup], protocol: str, found: Curves, unsent: Curves) -> str:
    """Which methods are not drawn as the others are."""
    sentences = []
    if unsent:
        names = listed(list(dict.fromkeys(compared[i].label for i, _ in unsent)))
        sentences.append(f"Dotted, at the final value: {names}, where nothing is sent.")
    shown = {i for i, _ in found}
    if missing := [one.label for i, one in enumerate(compared) if i not in shown and protocol in one.protocols]:
        sentences.append(f"Not drawn: {listed(missing)}, whose seeds were never evaluated in the same round.")
    return " ".join(sentences)


def _plane(i: int, one: RunGroup, both: np.ndarray) -> Drawing:
    shared, own = both[:, 0], both[:, 1]
    unit, percent = one.unit, one.unit.metric.percent
    low, high = float(both.min()), 100.0 if percent else float(both.max())
    places, counts = _places(both, 100.0 if percent else max(high - low, 1e-9))
    room = 0.05 * (high - low + percent) or 1.0

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        axes.axline((low, low), slope=1, color=FAINT, linewidth=1)
        sizes = counts * max(min(_DISC, _LARGEST_DISC / counts.max()), _SMALLEST_DISC)
        axes.scatter(places[:, 0], places[:, 1], s=sizes, **paint(i), alpha=0.75, linewidths=0)
        for axis in (axes.xaxis, axes.yaxis):
            scale(axis, 5)
        limits = (low - room, high + room)
        sign: Any = " (%)" if percent else ""
        axes.set(xlim=limits, ylim=limits, aspect="equal", xlabel=f"global model{sign}", ylabel=f"personal model{sign}")

    better, worse = int((own > shared).sum()), int((own < shared).sum())
    if not unit.metric.higher_is_better:
        better, worse = worse, better
    mean = float((own - shared).mean())
    gain = f"{mean:+.{unit.digits([mean])}f}{' points' if percent else ''}".replace("-", "−")
    caption = f"Better for {better:,} of {len(both):,} clients, worse for {worse:,}; on average {gain}."
    alt = f"{one.label}: each client's {unit.phrase} with its personal model against that with the global. {caption}"
    return Drawing(one.label, drawn(f"plane-{i}", alt, *SQUARE, draw), caption)


def _places(both: np.ndarray, span: float) -> tuple[np.ndarray, np.ndarray]:
    """Where clients are in the plane, and how many: on a grid over `span`, as fine as keeps the places few."""
    for step in (span * 0.001, span * 0.005, span * 0.01, span * 0.02):
        places, counts = np.unique(np.round(both / step), axis=0, return_counts=True)
        if len(places) <= _MOST_PLACES:
            break
    return places * step, counts
