"""Matplotlib's figures as SVG elements of the page, in its font and in its colours for light and dark backgrounds."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import Any

import matplotlib
from markupsafe import Markup, escape
from matplotlib.figure import Figure

from raypfl.results.client_data import COLOUR, PALE

FAINT, GRID = "#020202", "#030303"
"""Placeholders that the page's style sheet gives a colour."""

_VARIABLES = {FAINT: "--faint", GRID: "--grid", COLOUR.lower(): "--data", PALE.lower(): "--grid"}
_TIDY = (
    (r"\A.*?<svg[^>]*( viewBox=\"[^\"]*\")[^>]*>", r"<svg\1>"),
    (r"<defs>\s*<style.*?</style>\s*</defs>|<metadata>.*?</metadata>", ""),
    (r" id=\"(of-\d+)\"", r' class="\1"'),
    (r" id=\"[\w.]+_\d{1,3}\"", ""),  # of groups, which nothing refers to
    (r"#0505([0-9a-f]{2})", lambda match: f"var(--m{int(match[1], 16)})"),
    (r"font: ([\d.]+px) [^;\"]*", r"font-size: \1"),
    (r"font-family: [^;\"]*;? ?| transform=\"rotate\(-0 [^\"]*\"", ""),
    (r"xlink:(?=href)", ""),
    (r">\s+<", "><"),
)
"""What the page does not need of Matplotlib's file, or has of its own: size, fonts, ids, colours of groups."""
_GEOMETRY = re.compile(r"\b(?:d|x|y|width|height|transform|viewBox)=\"[^\"]*\"")
_NUMBER = re.compile(r"-?\d+\.\d{2,}")
_STYLE: dict[Any, Any] = {
    "axes.edgecolor": FAINT,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.labelcolor": FAINT,
    "axes.labelsize": 12,
    "axes.linewidth": 0.8,
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.facecolor": "none",
    "font.size": 12,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "legend.frameon": False,
    "legend.title_fontsize": 12,
    "path.simplify": False,
    "savefig.facecolor": "none",
    "svg.fonttype": "none",
    "text.color": FAINT,
    "text.parse_math": False,
    "xtick.color": FAINT,
    "xtick.major.size": 3,
    "ytick.color": FAINT,
    "ytick.major.size": 0,
}


def paint(index: int) -> dict[str, Any]:
    """What to draw the group at `index` with: a placeholder of its colour, and the class by which the page finds it."""
    return {"color": f"#0505{index:02x}", "gid": f"of-{index}"}


def drawn(name: str, alt: str, width: int, height: int, draw: Callable[[Figure], None]) -> Markup:
    """An ``svg`` element for an HTML page.

    Parameters
    ----------
    name : unique on the page. alt : the text for people who cannot see it.
    width, height : in CSS pixels, at which its text has the size of the page's small text.
    draw : is given an empty figure.
    """
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": name}):  # makes ids unique to the figure
        figure = Figure(figsize=(width / 72, height / 72), layout="constrained")
        draw(figure)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = file.getvalue()
    for pattern, replacement in _TIDY:
        text = re.sub(pattern, replacement, text, flags=re.DOTALL)
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, f"var({variable})")
    text = _GEOMETRY.sub(lambda match: _NUMBER.sub(_tenths, match[0]), text)
    return Markup(text.replace("<svg", f'<svg role="img" aria-label="{escape(alt)}"', 1))


def _tenths(number: re.Match[str]) -> str:
    """A tenth of a pixel is enough, and keeps the page small."""
    return f"{float(number[0]):.1f}".removesuffix(".0")
