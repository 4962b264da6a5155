"""What methods logged: curves of numbers, and tables and images of the last round that has them."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from raypfl.report import figures
from raypfl.report.figures import Drawing
from raypfl.results.contenders import Contender

_MOST_CURVES = 12
_MOST_ROWS = 20  # of a table


@dataclass(frozen=True)
class Excerpt:
    """The first rows of a table, of the first seed's last round that has it; `more` of them are left out."""

    index: int
    label: str
    name: str
    round: int
    headings: list[str]
    rows: list[list[str]]
    more: int


@dataclass(frozen=True)
class Image:
    """The first seed's last image of a name, as a URI that holds it."""

    index: int
    label: str
    name: str
    round: int
    uri: str


def curves(compared: Sequence[Contender]) -> list[Drawing]:
    """The numbers over rounds, a figure for each of the first dozen names."""
    names = dict.fromkeys(
        name for one in compared for result in one.results for name in pc.unique(result.logged["name"]).to_pylist()
    )
    drawn = (figures.logged(compared, name) for name in list(names)[:_MOST_CURVES])
    return [drawing for drawing in drawn if drawing]


def excerpts(compared: Sequence[Contender]) -> list[Excerpt]:
    """Of each method's tables."""
    return [
        _excerpt(i, one.label, name, table)
        for i, one in enumerate(compared)
        for name, table in one.results[0].analysis.items()
    ]


def images(compared: Sequence[Contender]) -> list[Image]:
    """Of each method's images."""
    last = {
        (i, row["name"]): Image(i, one.label, row["name"], row["round"], row["file"])
        for i, one in enumerate(compared)
        for row in one.results[0].images.to_pylist()
    }
    return [Image(one.index, one.label, one.name, one.round, _inside(Path(one.uri))) for one in last.values()]


def _excerpt(i: int, label: str, name: str, table: pa.Table) -> Excerpt:
    last = pc.max(table["round"]).as_py()
    rows = table.filter(pc.field("round") == last).drop_columns(["round"])
    columns = [[_printed(value) for value in column.to_pylist()] for column in rows.slice(0, _MOST_ROWS).columns]
    shown = [list(row) for row in zip(*columns, strict=True)]
    return Excerpt(i, label, name, last, rows.column_names, shown, rows.num_rows - len(shown))


def _printed(value: float | str) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _inside(file: Path) -> str:
    return f"data:image/png;base64,{base64.b64encode(file.read_bytes()).decode()}"
