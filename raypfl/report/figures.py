"""The figures of a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from raypfl.data import Summary
from raypfl.report.labels import listed, protocol_in_words, signed
from raypfl.report.svg import FAINT, contender_colour, contender_group, drawn
from raypfl.results import data_picture, numbers
from raypfl.results.contenders import COLOURS, Contender
from raypfl.results.numbers import MODELS, Against, Curve, clients, judged, loss, pairs
from raypfl.results.picture import from_worst, line
from raypfl.results.units import Unit

NARROW, WIDE, SQUARE = (380, 290), (900, 380), (300, 290)
"""CSS pixels: of a figure that shares its row or fills a phone, of one with a row to itself, of one among many."""

_MOST_POINTS = 400  # of a curve over clients
_MOST_PLACES = 800  # of clients in the plane
_DISC, _LARGEST_DISC, _SMALLEST_DISC = 18.0, 500.0, 2.0  # square pixels, for a client
_MARKERS = {"": None, "●": "o", "■": "s", "▲": "^", "◆": "D", "▼": "v"}  # for contenders whose colour is another's too
_FEW = 6  # contenders, whose bands do not yet hide each other
_STEPS = [1, 2, 2.5, 5, 10]
_Curves = dict[tuple[int, str], Curve]  # of a contender's number and a model
_AXIS = {"round": "round", "megabytes": "megabytes sent, up and down", "seconds": "seconds, without evaluation"}


@dataclass(frozen=True)
class Drawing:
    """A figure on the page: `wide` is shown instead of `svg` where there is room for it."""

    title: str
    svg: Markup
    caption: str = ""
    wide: Markup | None = None


def curves(compared: Sequence[Contender], protocol: str, against: Against, wide: bool = False) -> Drawing:
    """The primary metric over rounds, megabytes or seconds, with a band from the worst to the best of the seeds."""
    found = {
        (i, model): curve
        for i, one in enumerate(compared)
        for model in MODELS
        if (curve := judged(one, protocol, model, against))
    }
    unit = compared[0].unit
    free = {key for key, curve in found.items() if against == "megabytes" and not curve.x.any()}

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        _lines(axes, compared, found, free)
        _scaled(axes.yaxis)
        axes.xaxis.set_major_locator(MaxNLocator(7, steps=_STEPS, integer=against == "round"))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,g}"))
        axes.set_xlim(0)
        axes.set(xlabel=_AXIS[against], ylabel=unit.label)

    ends = [
        f"{compared[i].label}, {model} model: from {_told(unit, curve.mean[0])} to "
        f"{_told(unit, curve.mean[-1])}{unit.sign}"
        for (i, model), curve in found.items()
    ]
    tested = protocol_in_words(protocol)
    alt = f"Lines of {unit.words} on {tested}, against {_AXIS[against]}. {'; '.join(ends)}."
    name = f"curves-{protocol}-{against}"
    title = {"round": f"On {tested}", "megabytes": "Against megabytes", "seconds": "Against seconds"}[against]
    large = drawn(f"{name}-wide", alt, *WIDE, draw) if wide else None
    return Drawing(title, drawn(name, alt, *NARROW, draw), _exceptions(compared, protocol, found, free), large)


def losses(compared: Sequence[Contender]) -> Drawing | None:
    """Mean training loss of the cohort over rounds; None: nobody trained."""
    found = {i: curve for i, one in enumerate(compared) if (curve := loss(one))}
    return _by_round(compared, found, "loss", "training loss", "Training loss, mean over the cohort")


def logged(compared: Sequence[Contender], name: str) -> Drawing | None:
    """A number that methods logged, over rounds; None: nobody has a finite one."""
    found = {i: curve for i, one in enumerate(compared) if (curve := numbers.logged(one, name))}
    return _by_round(compared, found, f"logged-{name}", name, name)


def _by_round(
    compared: Sequence[Contender], found: Mapping[int, Curve], key: str, what: str, title: str
) -> Drawing | None:
    """Curves over rounds of contenders, by their numbers; None: there is none."""
    if not found:
        return None

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for i, curve in found.items():
            hides = any(np.array_equal(curve.mean, other.mean) for j, other in found.items() if j < i)
            look: dict[str, Any] = {"linewidth": 2.0, "linestyle": (0, (4, 4)) if hides else "-"}
            look |= {"marker": _marker(i, curve), "markevery": _every(curve)}
            _curve(axes, curve, i, _band(compared, i), look)
        _rounds(axes)
        axes.set(ylabel=what.removeprefix("training "))
        if min(curve.low.min() for curve in found.values()) > 0:
            axes.set_ylim(0)

    ends = [f"{compared[i].label}: from {curve.mean[0]:.3g} to {curve.mean[-1]:.3g}" for i, curve in found.items()]
    alt = f"Lines of {what} by round. {'; '.join(ends)}."
    return Drawing(title, drawn(key, alt, *NARROW, draw))


def sorted_clients(compared: Sequence[Contender], protocol: str) -> Drawing:
    """The primary metric of each client at the end, with the model that it would use, from the worst to the best."""
    unit = compared[0].unit
    found = {i: from_worst(one, clients(one, protocol, one.deployed(protocol))) for i, one in enumerate(compared)}
    found = {i: reached for i, reached in found.items() if len(reached)}

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        axes.axvspan(0, 10, color=FAINT, alpha=0.08, linewidth=0)
        for i, reached in found.items():
            share = 100 * (np.arange(len(reached)) + 0.5) / len(reached)
            chosen = np.unique(np.linspace(0, len(reached) - 1, min(len(reached), _MOST_POINTS)).astype(int))
            look = line(compared[i].deployed(protocol)) | {"marker": _MARKERS[mark(i)], "markevery": 0.15}
            axes.plot(share[chosen], reached[chosen], **_owned(i), markersize=4, **look)
        _scaled(axes.yaxis)
        axes.set_xlim(0, 100)
        axes.set(xlabel="clients, from worst to best (%)", ylabel=unit.label)
        axes.text(1.5, 0.01, "worst decile", transform=axes.get_xaxis_transform(), va="bottom", fontsize=11)

    ends = [
        f"{compared[i].label}: worst {_told(unit, reached[0])}, median {_told(unit, float(np.median(reached)))}, "
        f"best {_told(unit, reached[-1])}{unit.sign}"
        for i, reached in found.items()
    ]
    alt = f"Sorted final values of {unit.words} of clients on {protocol_in_words(protocol)}. {'; '.join(ends)}."
    narrow, wide = drawn("sorted", alt, *NARROW, draw), drawn("sorted-wide", alt, *WIDE, draw)
    return Drawing("Every client, from worst to best", narrow, wide=wide)


def personal_against_global(compared: Sequence[Contender], protocol: str) -> list[Drawing]:
    """For each contender that has both models, a disc where clients are: as large as there are many of them."""
    found = {i: both for i, one in enumerate(compared) if len(both := pairs(one, protocol))}
    return [_plane(i, compared[i], both) for i, both in found.items()]


def partition(summary: Summary, name: str) -> Drawing:
    """Who holds what; `name` is unique on the page."""
    alt = (
        f"What {summary.num_clients:,} clients train on: between {summary.sizes['train'].min():,} and "
        f"{summary.sizes['train'].max():,} samples, of between {summary.classes_held.min()} and "
        f"{summary.classes_held.max()} of {len(summary.class_names)} classes."
    )
    height = round(72 * data_picture.height(summary))

    def of(size: str, width: int) -> Markup:
        return drawn(f"{name}-{size}", alt, width, height, lambda figure: data_picture.paint(figure, summary))

    return Drawing("", of("narrow", NARROW[0]), wide=of("wide", WIDE[0]))


def mark(i: int) -> str:
    """The marker of the contender at `i` as a character; empty: its colour is enough."""
    return list(_MARKERS)[min(i // len(COLOURS), len(_MARKERS) - 1)]


def _lines(axes: Axes, compared: Sequence[Contender], found: _Curves, free: set[tuple[int, str]]) -> None:
    dashed = [i for i, model in found if model == "global"]
    for (i, model), curve in found.items():
        turn = dashed.index(i) if model == "global" else 0
        look = line(model, turn, len(dashed)) | {"marker": _marker(i, curve), "markevery": _every(curve)}
        if (i, model) in free:
            axes.axhline(curve.mean[-1], **_owned(i), linestyle=(0, (1, 2)), linewidth=1.6)
        else:
            _curve(axes, curve, i, _band(compared, i), look)


def _exceptions(compared: Sequence[Contender], protocol: str, found: _Curves, free: set[tuple[int, str]]) -> str:
    """Who is not drawn as the others are."""
    said = []
    if free:
        names = listed(list(dict.fromkeys(compared[i].label for i, _ in free)))
        said.append(f"Dotted, at the final value: {names}, for nothing is sent.")
    shown = {i for i, _ in found}
    if apart := [one.label for i, one in enumerate(compared) if i not in shown and protocol in one.protocols]:
        said.append(f"Not drawn: {listed(apart)}, whose seeds were never evaluated in the same round.")
    return " ".join(said)


def _plane(i: int, one: Contender, both: np.ndarray) -> Drawing:
    shared, own = both[:, 0], both[:, 1]
    unit, label = one.unit, one.label
    low, high = float(both.min()), 100.0 if unit.metric.percent else float(both.max())
    places, counts = _places(both, 100.0 if unit.metric.percent else max(high - low, 1e-9))
    room = 0.05 * (high - low + (1 if unit.metric.percent else 0)) or 1.0

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        axes.axline((low, low), slope=1, color=FAINT, linewidth=1)
        sizes = counts * max(min(_DISC, _LARGEST_DISC / counts.max()), _SMALLEST_DISC)
        axes.scatter(places[:, 0], places[:, 1], s=sizes, **_owned(i), alpha=0.75, linewidths=0)
        for axis in (axes.xaxis, axes.yaxis):
            _scaled(axis, 5)
        axes.set(xlim=(low - room, high + room), ylim=(low - room, high + room), aspect="equal")
        axes.set(xlabel=f"global model{_in_percent(unit)}", ylabel=f"personal model{_in_percent(unit)}")

    better, worse = int((own > shared).sum()), int((own < shared).sum())
    if not unit.metric.higher_is_better:
        better, worse = worse, better
    mean = float((own - shared).mean())
    gain = f"{signed(mean, unit.digits([mean]))}{' points' if unit.metric.percent else ''}"
    told = f"Better for {better:,} of {len(both):,} clients, worse for {worse:,}; on average {gain}."
    alt = f"{label}: each client's {unit.words} with its personal model against that with the global one. {told}"
    return Drawing(label, drawn(f"plane-{i}", alt, *SQUARE, draw), told)


def _told(unit: Unit, value: float) -> str:
    """A value that is in its unit already."""
    return f"{value:.{unit.digits([value])}f}"


def _in_percent(unit: Unit) -> str:
    return " (%)" if unit.metric.percent else ""


def _places(both: np.ndarray, span: float) -> tuple[np.ndarray, np.ndarray]:
    """Where clients are in the plane, and how many: on a grid, of a span, as fine as keeps the places few."""
    for step in (span * 0.001, span * 0.005, span * 0.01, span * 0.02):
        places, counts = np.unique(np.round(both / step), axis=0, return_counts=True)
        if len(places) <= _MOST_PLACES:
            break
    return places * step, counts


def _curve(axes: Axes, curve: Curve, i: int, band: float, look: dict[str, Any]) -> None:
    """`band` : its opacity, 0 for none."""
    if band:
        axes.fill_between(curve.x, curve.low, curve.high, alpha=band, linewidth=0, **_owned(i))
    axes.plot(curve.x, curve.mean, **_owned(i), markersize=4.5, **look)


def _band(compared: Sequence[Contender], i: int) -> float:
    alone = len(compared[i].results) == 1
    return 0.0 if alone else 0.16 if len(compared) <= _FEW else 0.07


def _owned(i: int) -> dict[str, Any]:
    return {"color": contender_colour(i), "gid": contender_group(i)}


def _marker(i: int, curve: Curve) -> str | None:
    return "o" if len(curve.x) == 1 else _MARKERS[mark(i)]


def _every(curve: Curve) -> int:
    return max(len(curve.x) // 8, 1)


def _rounds(axes: Axes) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(7, steps=_STEPS, integer=True))
    axes.set_xlabel("round")


def _scaled(axis: Any, ticks: int = 7) -> None:
    axis.set_major_locator(MaxNLocator(ticks, steps=_STEPS))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
