"""The picture of a search: the score of each trial against one of the settings that were searched."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from raypfl.common.counting import counted
from raypfl.experiment.spaces import Space, in_words
from raypfl.results.drawing.canvas import page_paint, svg
from raypfl.results.drawing.curves import scale, scale_logarithmic
from raypfl.results.report.figures import NARROW, ReportFigure

_DISC = 40.0  # square pixels
_RING = 150.0  # around the disc of a trial that was chosen
_MARGIN = 0.05  # share of the axis on both sides of a space
_PALE = 0.35


@dataclass(frozen=True)
class Disc:
    """A trial in the picture.

    Attributes
    ----------
    texts : what a table says of the trial, by column; settings that it does not have are empty.
    score : in its unit; NaN: the trial has none.
    is_whole : whether it was trained to its end.
    place : number of the study's setting, which has a colour; 0 if there is one.
    """

    texts: Mapping[str, str]
    score: float
    is_chosen: bool
    is_whole: bool = True
    place: int = 0


def search_figure(
    name: str, key: str, spaces: Sequence[Space], discs: Sequence[Disc], label: str
) -> ReportFigure | None:
    """Draw scores against a setting: numbers on an axis like their space, other values side by side.

    Parameters
    ----------
    name : unique on the page.
    spaces : those of this setting, which has several if choices have spaces of their own.
    label : of the score.

    Returns
    -------
    None if no trial has both this setting and a score.
    """
    with_setting = [disc for disc in discs if disc.texts[key]]
    scored = [disc for disc in with_setting if math.isfinite(disc.score)]
    if not scored:
        return None

    are_numbers = all(space.is_range for space in spaces)
    names = list(dict.fromkeys(str(in_words(value)) for space in spaces for value in space.values))

    def position(disc: Disc) -> float:
        return float(disc.texts[key]) if are_numbers else names.index(disc.texts[key])

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for disc in scored:
            paint = page_paint(disc.place)
            alpha = 0.85 if disc.is_whole else _PALE
            axes.scatter(position(disc), disc.score, s=_DISC, linewidths=0, alpha=alpha, **paint)
            if disc.is_chosen:
                ring = {"facecolors": "none", "edgecolors": paint["color"], "gid": paint["gid"]}
                axes.scatter(position(disc), disc.score, s=_RING, **ring)

        if are_numbers:
            _scale_like(axes, spaces)
        else:
            axes.set_xticks(range(len(names)), names)
            axes.set_xlim(-0.5, len(names) - 0.5)
        scale(axes.yaxis)
        axes.set(xlabel=key, ylabel=label)

    chosen = [f"{disc.texts[key]} with {disc.score:.4g}" for disc in scored if disc.is_chosen]
    alt = f"Discs of {label} against {key}, one for each of {counted(len(scored), 'trial')}."
    if chosen:
        alt += f" Chosen, in a ring: {', '.join(chosen)}."
    return ReportFigure("", svg(f"{name}-{key}", alt, *NARROW, draw), _caption(with_setting, scored))


def _scale_like(axes: Axes, spaces: Sequence[Space]) -> None:
    """Let the horizontal axis show all of these ranges, logarithmic if they are."""
    low = min(space.values[0] for space in spaces)
    high = max(space.values[1] for space in spaces)
    if all(space.is_logarithmic for space in spaces):
        margin = (high / low) ** _MARGIN
        axes.set(xscale="log", xlim=(low / margin, high * margin))
        scale_logarithmic(axes.xaxis)
    else:
        margin = (high - low) * _MARGIN
        axes.set_xlim(low - margin, high + margin)
        scale(axes.xaxis, 5)


def _caption(with_setting: Sequence[Disc], scored: Sequence[Disc]) -> str:
    sentences = []
    if not all(disc.is_whole for disc in scored):
        sentences.append("Pale: ended before the last round.")
    missing = len(with_setting) - len(scored)
    if missing:
        sentences.append(f"Not drawn: {counted(missing, 'trial')} without a score.")
    return " ".join(sentences)
