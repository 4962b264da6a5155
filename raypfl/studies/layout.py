"""A study's table, on the terminal and in Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from raypfl.results import latex
from raypfl.results.display.fitting import width_of
from raypfl.studies.description import PublishedTable, Study
from raypfl.studies.entries import TableEntry

EMPTY = "–"
PENDING = "…"
"""Stands where cells are not finished."""

_STYLES = {"here": "bold", "published": "dim", "gap": "cyan"}


@dataclass(frozen=True)
class TableBlock:
    """The part of the table for one setting of `study.down`.

    Attributes
    ----------
    headings : ``(group, metric)`` of each column.
    lines : up to three a method, each as its name (empty after the first), ``here``, ``published`` or ``gap``, and a
        text for each column.
    """

    title: str
    headings: list[tuple[str, str]]
    lines: list[list[str]]


def blocks(found: Sequence[TableEntry]) -> list[TableBlock]:
    """The table as the paper has it: a block for each setting down, a column for each metric and setting across."""
    table = []
    for title in dict.fromkeys(one.down for one in found):
        own = [one for one in found if one.down == title]
        headings = list(dict.fromkeys((one.across, one.metric) for one in own))
        lines = []
        for method in dict.fromkeys(one.method for one in own):
            at = {(one.across, one.metric): one for one in own if one.method == method}
            lines += _lines(method, [at[heading] for heading in headings])
        table.append(TableBlock(title, headings, lines))
    return table


def show(
    console: Console,
    study: Study,
    published: PublishedTable | None,
    found: Sequence[TableEntry],
    deviations: Sequence[str],
) -> None:
    """Print the table and the notes on it."""
    for block in blocks(found):
        console.print()
        if block.title:
            console.print(Text(block.title, "bold"))
        for part in _parts(block, console):
            console.print(part)
    for heading, lines in _notes(study, published, found, deviations):
        loud = heading.startswith("Deviations")
        console.print(Text(heading, "bold yellow" if loud else "dim"))
        for line in lines:
            console.print(Padding(Text(line, "" if loud else "dim"), (0, 0, 0, 2)))


def markdown(
    study: Study, published: PublishedTable | None, found: Sequence[TableEntry], deviations: Sequence[str]
) -> str:
    """The table and its notes as Markdown."""
    parts = [f"# {study.name}"]
    for block in blocks(found):
        parts += [f"## {block.title}"] if block.title else []
        headings = ["", "", *(" ".join(filter(None, heading)) for heading in block.headings)]
        rows = [headings, ["---", "---", *["---:"] * len(block.headings)], *block.lines]
        parts.append("\n".join(f"| {' | '.join(row)} |" for row in rows))
    for heading, lines in _notes(study, published, found, deviations):
        parts.append("\n".join([f"**{heading}**", "", *(f"- {line}" for line in lines)]))
    return "\n\n".join(parts) + "\n"


def as_latex(
    study: Study, published: PublishedTable | None, found: Sequence[TableEntry], deviations: Sequence[str]
) -> str:
    """The table as LaTeX, one for all blocks with the same columns, and its notes as comments."""
    of_headings: dict[tuple[tuple[str, str], ...], list[TableBlock]] = {}
    for block in blocks(found):
        of_headings.setdefault(tuple(block.headings), []).append(block)
    (_, (legend,)), *notes = _notes(study, published, found, deviations)
    tables = []
    for headings, alike in of_headings.items():
        named = ["method", "", *(latex.escaped(" ".join(filter(None, heading))) for heading in headings)]
        rows = [
            (latex.escaped(block.title), [list(map(latex.number, line)) for line in block.lines]) for block in alike
        ]
        tables.append(latex.table(named, rows, f"{study.name}. {legend}", words=2))
    comments = [f"% {heading}: {line}" for heading, lines in notes for line in lines]
    return "\n".join([latex.PREAMBLE, *tables, *comments, ""])


def _parts(block: TableBlock, console: Console) -> Iterator[Table]:
    """The block as a table or, if that is wider than the console, as several with some of its columns each."""
    columns = [list(texts) for texts in zip(*(line[2:] for line in block.lines), strict=True)]
    whole = _table(block, range(len(columns)), [None] * len(columns))
    if width_of(console, whole) <= console.width:
        yield whole
        return
    widths = [
        max(len(word) for text in (*heading, *texts) for word in text.split())
        for heading, texts in zip(block.headings, columns, strict=True)
    ]
    room, some = console.width - width_of(console, _table(block, [], [])), list[int]()
    for i, width in enumerate(widths):
        if some and sum(widths[one] + 2 for one in some) + width + 2 > room:
            yield _table(block, some, widths)
            some = []
        some.append(i)
    yield _table(block, some, widths)


def _table(block: TableBlock, columns: Sequence[int], widths: Sequence[int | None]) -> Table:
    """Some columns of a block, so wide that no word is broken; None: as wide as their texts."""
    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    drawn.add_column("method", style="bold")
    drawn.add_column("")
    for i in columns:
        drawn.add_column("\n".join(filter(None, block.headings[i])), justify="right", width=widths[i])
    for i, (method, kind, *texts) in enumerate(block.lines):
        if method and i:
            drawn.add_section()
        drawn.add_row(Text(method), *(Text(text, _STYLES[kind]) for text in (kind, *(texts[one] for one in columns))))
    return drawn


def _lines(method: str, row: Sequence[TableEntry]) -> list[list[str]]:
    """A method's lines; those of published numbers and of gaps only if they are not empty."""
    published = [_number(*one.published) if one.published else EMPTY for one in row]
    gaps = [_gap(one) for one in row]
    below = [["", "published", *published], ["", "gap", *gaps]]
    return [[method, "here", *map(_measured, row)], *(line for line in below if {*line[2:]} != {EMPTY})]


def _measured(one: TableEntry) -> str:
    if one.mean is None:
        return PENDING if one.missing else EMPTY
    return _number(one.mean, one.spread) + (PENDING if one.missing else "")


def _number(value: float, spread: float | None) -> str:
    return f"{value:.2f}" if spread is None else f"{value:.2f}±{spread:.2f}"


def _gap(one: TableEntry) -> str:
    if one.gap is None:
        return EMPTY
    return _signed(one.gap) if one.spread_gap is None else f"{_signed(one.gap)} ({_signed(one.spread_gap)})"


def _signed(value: float) -> str:
    return f"{round(value, 2) + 0.0:+.2f}"  # never -0.00


def _notes(
    study: Study, published: PublishedTable | None, found: Sequence[TableEntry], deviations: Sequence[str]
) -> list[tuple[str, list[str]]]:
    clients = any(one.spread_over == "clients" for one in found)
    gaps = "; gap (gap of the ±)" if published else ""
    over = f"the clients, averaged over the seeds{gaps}" if clients else "the seeds"
    shares = "In %" if all(one.label.endswith("(%)") for one in found) else "Shares in %"
    legend = f"{shares}. ± is the standard deviation over {over}. {PENDING} marks unfinished cells."
    notes = [("Numbers", [legend])]
    if published:
        notes.append(("Published", [published.source, *published.notes]))
        notes.append(("Choices where the source leaves something open", study.choices))
    heading = "Deviations from the published protocol" if published else "Deviations"
    notes.append((heading, [*deviations] or ["None: everything was run as described."]))
    return [(heading, lines) for heading, lines in notes if lines]
