"""Matplotlib's figures as SVG elements of the page, in its font and in its colours for light and dark backgrounds."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import Any
from xml.etree import ElementTree

import matplotlib
from markupsafe import Markup
from matplotlib.figure import Figure

from raypfl.results.client_data import COLOUR, PALE

FAINT, GRID = "#020202", "#030303"
"""Placeholders that the page's style sheet gives a colour."""

_VARIABLES = {FAINT: "--faint", GRID: "--grid", COLOUR.lower(): "--data", PALE.lower(): "--grid"}
_GROUP = re.compile(r"#0505([0-9a-f]{2})")
_GROUP_CLASS = "of-"
_NAMESPACE, _LINK = "{http://www.w3.org/2000/svg}", "{http://www.w3.org/1999/xlink}href"
_FONT, _FAMILY = re.compile(r"font: ([\d.]+px) [^;\"]*"), re.compile(r"font-family: [^;\"]*;? ?")
_NUMBER, _SPACE = re.compile(r"-?\d+\.\d{2,}"), re.compile(r"\s+")
_GEOMETRY = ("d", "x", "y", "width", "height", "transform", "viewBox")
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
    return {"color": f"#0505{index:02x}", "gid": f"{_GROUP_CLASS}{index}"}


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
    text = _GROUP.sub(lambda match: f"var(--m{int(match[1], 16)})", _FONT.sub(r"font-size: \1", file.getvalue()))
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, f"var({variable})")
    root = ElementTree.fromstring(_FAMILY.sub("", text))
    _tidy(root, used=set(re.findall(r"(?:url\(|href=\")#([^)\"]+)", text)))
    for attribute in ("width", "height", "version"):
        del root.attrib[attribute]
    root.attrib.update({"role": "img", "aria-label": alt})
    return Markup(ElementTree.tostring(root, encoding="unicode"))


def _tidy(root: ElementTree.Element, used: set[str]) -> None:
    """Remove what HTML does not need: namespaces, metadata, styles, and ids other than the `used` ones."""
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag.endswith(("metadata", "style")):
                parent.remove(child)
    for element in root.iter():
        element.tag = element.tag.removeprefix(_NAMESPACE)
        attributes = element.attrib
        if _LINK in attributes:
            attributes["href"] = attributes.pop(_LINK)
        if attributes.get("id", "").startswith(_GROUP_CLASS):
            attributes["class"] = attributes.pop("id")
        elif attributes.get("id") not in used:
            attributes.pop("id", None)
        if attributes.get("transform", "").startswith("rotate(-0 "):
            del attributes["transform"]
        attributes.update({key: _rounded(attributes[key]) for key in _GEOMETRY if key in attributes})
        element.text, element.tail = (element.text or "").strip(), None


def _rounded(text: str) -> str:
    """A tenth of a pixel is enough, and keeps the page small."""
    return _SPACE.sub(" ", _NUMBER.sub(lambda match: f"{float(match[0]):.1f}".removesuffix(".0"), text)).strip()
