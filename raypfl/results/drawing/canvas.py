"""Figures to draw on: :func:`png` writes a file, :func:`svg` returns an element of an HTML page.

Both have one style. They differ where their readers do: a PNG has its own colours on white, while an SVG takes font
and colours from the page, which is light or dark, and must be small, since a report has dozens of them.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
from markupsafe import Markup, escape
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from raypfl.common.files import draft

INK = "#333333"
GREY = "#777777"

DATA = "#1F5FA8"
"""Clients that are trained, in pictures of what each client holds."""

PALE = "#B9C3CE"
"""Clients that are never trained, in the same pictures."""

# Placeholders in an SVG of colours that the page's style sheet defines.
FAINT = "#020202"
GRID = "#030303"

_SHARED_STYLE: dict[Any, Any] = {
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "legend.frameon": False,
}
_PNG_STYLE = _SHARED_STYLE | {
    "axes.edgecolor": "#999999",
    "axes.labelcolor": INK,
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "font.size": 10,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.6,
    "pdf.fonttype": 42,  # TrueType, since publishers refuse the default Type 3
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}
_SVG_STYLE = _SHARED_STYLE | {
    "axes.edgecolor": FAINT,
    "axes.facecolor": "none",
    "axes.labelcolor": FAINT,
    "axes.labelsize": 12,
    "axes.linewidth": 0.8,
    "axes.spines.left": False,
    "figure.facecolor": "none",
    "font.size": 12,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
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

_STYLE_SHEET_COLOURS = {FAINT: "--faint", GRID: "--grid", DATA.lower(): "--data", PALE.lower(): "--grid"}

_TIDY = (
    (r"\A.*?<svg[^>]*( viewBox=\"[^\"]*\")[^>]*>", r"<svg\1>"),
    (r"<defs>\s*<style.*?</style>\s*</defs>|<metadata>.*?</metadata>", ""),
    (r" id=\"(of-\d+)\"", r' class="\1"'),
    (r" id=\"[\w.]+_\d{1,3}\"", ""),  # ids of groups, to which nothing refers
    (r"#05([0-9a-f]{4})", lambda match: f"var(--m{int(match[1], 16)})"),
    (r"font: ([\d.]+px) [^;\"]*", r"font-size: \1"),
    (r"font-family: [^;\"]*;? ?| transform=\"rotate\(-0 [^\"]*\"", ""),
    (r"xlink:(?=href)", ""),
    (r">\s+<", "><"),
)
"""Replacements for what a page defines itself or does not need: size, fonts, ids, colours of groups."""

_GEOMETRY = re.compile(r"\b(?:d|x|y|width|height|transform|viewBox)=\"[^\"]*\"")
_NUMBER = re.compile(r"-?\d+\.\d{2,}")


@contextmanager
def png(path: str | Path, width: float, height: float, padding: float = 0.08) -> Iterator[Figure]:
    """Give a figure to draw on, with sizes in inches, and write it at the end: to a PNG file, or by the path's suffix.

    The file's folder must exist.

    Raises
    ------
    Unwritable : if the file cannot be written.
    """
    with matplotlib.rc_context(_PNG_STYLE):
        layout = ConstrainedLayoutEngine(w_pad=padding, h_pad=padding)
        figure = Figure(figsize=(width, height), layout=layout)
        yield figure

        with draft(Path(path)) as file:
            figure.savefig(file, dpi=160)


def svg(name: str, alt: str, width: int, height: int, draw: Callable[[Figure], None]) -> Markup:
    """Return an ``svg`` element for an HTML page.

    Parameters
    ----------
    name : unique on the page.
    alt : the text for people who cannot see it.
    width, height : CSS pixels, at which its text has the size of the page's small text.
    draw : draws on an empty figure.
    """
    # The name as salt keeps the ids of clip paths and markers unique on a page with many figures.
    with matplotlib.rc_context(_SVG_STYLE | {"svg.hashsalt": name}):
        figure = Figure(figsize=(width / 72, height / 72), layout="constrained")
        draw(figure)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})

    text = file.getvalue()
    for pattern, replacement in _TIDY:
        text = re.sub(pattern, replacement, text, flags=re.DOTALL)
    for colour, variable in _STYLE_SHEET_COLOURS.items():
        text = text.replace(colour, f"var({variable})")
    text = _GEOMETRY.sub(lambda match: _NUMBER.sub(_in_tenths, match[0]), text)

    return Markup(text.replace("<svg", f'<svg role="img" aria-label="{escape(alt)}"', 1))


def page_paint(index: int) -> dict[str, Any]:
    """Return the look of the group at `index` in an SVG: a placeholder of its colour, and a class for the style sheet.

    The page fades groups by this class while the pointer is on another one's name.
    """
    return {"color": f"#05{index:04x}", "gid": f"of-{index}"}


def _in_tenths(number: re.Match[str]) -> str:
    # A tenth of a pixel is enough, and keeps the page small.
    return f"{float(number[0]):.1f}".removesuffix(".0")
