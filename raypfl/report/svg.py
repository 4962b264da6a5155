"""Matplotlib's figures as SVG that belongs to the page: in its font, and in its colours on light and dark ground."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from xml.etree import ElementTree

import matplotlib
from markupsafe import Markup
from matplotlib.figure import Figure

from raypfl.results.data_picture import COLOUR, QUIET

INK, FAINT, GRID = "#010101", "#020202", "#030303"
"""What to draw with: the page's style sheet decides what these are, on light ground and on dark."""

_VARIABLES = {INK: "--ink", FAINT: "--faint", GRID: "--grid", COLOUR.lower(): "--data", QUIET.lower(): "--grid"}
_CONTENDER = re.compile(r"#0505([0-9a-f]{2})")
_SVG, _LINK = "{http://www.w3.org/2000/svg}", "{http://www.w3.org/1999/xlink}href"
_SHOWN_ID = "of-"
_NUMBER, _SPACE = re.compile(r"-?\d+\.\d{2,}"), re.compile(r"\s+")
_PLACES = ("d", "x", "y", "width", "height", "transform", "viewBox")
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


def contender_colour(index: int) -> str:
    """What to draw the contender at `index` with."""
    return f"#0505{index:02x}"


def contender_group(index: int) -> str:
    """The `gid` of what belongs to the contender at `index`, by which the page points it out."""
    return f"{_SHOWN_ID}{index}"


def drawn(name: str, alt: str, width: int, height: int, draw: Callable[[Figure], None]) -> Markup:
    """An ``svg`` element for an HTML page.

    Parameters
    ----------
    name : unique on the page. alt : what a person hears who cannot see it.
    width, height : in CSS pixels, at which its text has the size of the page's small text.
    draw : is given an empty figure.
    """
    with _style(name):
        figure = Figure(figsize=(width / 72, height / 72), layout="constrained")
        draw(figure)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    root = ElementTree.fromstring(file.getvalue())
    _tidy(root)
    root.attrib.update({"role": "img", "aria-label": alt})
    for attribute in ("width", "height", "version"):
        del root.attrib[attribute]
    return Markup(ElementTree.tostring(root, encoding="unicode"))


@contextmanager
def _style(name: str) -> Iterator[None]:
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": name}):  # the salt makes ids unique to the figure
        yield


def _tidy(root: ElementTree.Element) -> None:
    """HTML needs no namespaces, one page has one element of an id, and colours are the style sheet's."""
    text = ElementTree.tostring(root, encoding="unicode")
    wanted = set(re.findall(r"(?:url\(|href=\")#([^)\"]+)", text))
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag.endswith(("metadata", "style")):
                parent.remove(child)
    for element in root.iter():
        element.tag = element.tag.removeprefix(_SVG)
        attributes = element.attrib
        if _LINK in attributes:
            attributes["href"] = attributes.pop(_LINK)
        if attributes.get("id", "").startswith(_SHOWN_ID):
            attributes["class"] = attributes.pop("id")
        elif attributes.get("id") not in wanted:
            attributes.pop("id", None)
        if "style" in attributes:
            attributes["style"] = _coloured(attributes["style"])
        if attributes.get("transform", "").startswith("rotate(-0 "):
            del attributes["transform"]
        attributes.update({place: _rounded(attributes[place]) for place in _PLACES if place in attributes})
        element.text, element.tail = (element.text or "").strip(), None


def _coloured(style: str) -> str:
    style = _CONTENDER.sub(lambda match: f"var(--m{int(match[1], 16)})", style)
    for colour, variable in _VARIABLES.items():
        style = style.replace(colour, f"var({variable})")
    return re.sub(r"font-family: [^;]*;? ?", "", re.sub(r"font: ([\d.]+px) [^;]*", r"font-size: \1", style))


def _rounded(text: str) -> str:
    """A tenth of a pixel is enough, and keeps the page small."""
    return _SPACE.sub(" ", _NUMBER.sub(lambda match: f"{float(match[0]):.1f}".removesuffix(".0"), text)).strip()
