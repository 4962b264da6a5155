"""How a study's table is arranged: blocks of lines, and the text of each number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from raypfl.results.ranking.standings import Standing
from raypfl.results.units import LARGE, number_text
from raypfl.studies.description import PublishedTable, Study
from raypfl.studies.table.entries import TableEntry
from raypfl.studies.table.notes import PENDING, NoteList, notes_on

EMPTY = "–"
AGAINST_THE_BEST = "against the best"
"""The titles of the blocks that say how methods stand end with this."""

_STANDING_LINES = ("rank", "95%", "to best", "P(better)")


@dataclass(frozen=True)
class TableBlock:
    """Part of a study's table for one setting of `study.down`.

    Attributes
    ----------
    headings : ``(group, metric)`` of each column.
    lines : up to four lines per method: the method's name (empty after the first line), then what is in the line, such
        as ``here``, ``published`` or ``gap``, then a text for each column. If the study has measured numbers alone,
        nothing says what is in a line.
    words : number of texts of a line before its columns: 2, or 1 if nothing says what is in a line.
    """

    title: str
    headings: list[tuple[str, str]]
    lines: list[list[str]]
    words: int = 2


@dataclass(frozen=True)
class StudyTable:
    """A study's table, ready to be shown.

    Attributes
    ----------
    name : the study's name.
    results : the table as in the paper.
    standings : how methods stand; empty if no two of them can be compared.
    notes : what stands below, the legend first.
    """

    name: str
    results: list[TableBlock]
    standings: list[TableBlock]
    notes: NoteList

    @property
    def titled_blocks(self) -> list[TableBlock]:
        """All blocks, with titles that tell results from standings."""
        titled = [replace(block, title=f"{block.title} {AGAINST_THE_BEST}".strip()) for block in self.standings]
        return [*self.results, *titled]


def arrange(
    study: Study,
    published: PublishedTable | None,
    entries: Sequence[TableEntry],
    deviations: Sequence[str],
    searched: Sequence[str] = (),
) -> StudyTable:
    """Arrange the entries of a study as in the paper, with notes.

    Parameters
    ----------
    published : the table that the study reproduces; None: there is none.
    deviations : where the runs depart from the published protocol, a sentence each.
    searched : what a search chose, a sentence each.
    """
    notes = notes_on(study, published, entries, deviations, searched)
    return StudyTable(study.name, blocks(entries), standing_blocks(entries), notes)


def blocks(entries: Sequence[TableEntry]) -> list[TableBlock]:
    """Arrange entries as in the paper: a block for each setting down, a column for each metric and setting across."""
    has_published = any(entry.published for entry in entries)
    table = []
    for title in dict.fromkeys(entry.down for entry in entries):
        block_entries = [entry for entry in entries if entry.down == title]
        headings = list(dict.fromkeys((entry.across, entry.metric) for entry in block_entries))

        lines = []
        for method in dict.fromkeys(entry.method for entry in block_entries):
            by_heading = {(entry.across, entry.metric): entry for entry in block_entries if entry.method == method}
            row = [by_heading[heading] for heading in headings]
            lines += _lines(method, row) if has_published else [[method, *map(_measured, row)]]
        table.append(TableBlock(title, headings, lines, words=2 if has_published else 1))
    return table


def standing_blocks(entries: Sequence[TableEntry]) -> list[TableBlock]:
    """Arrange how methods stand as `blocks` does; none if no two of them can be compared."""
    table = []
    for title in dict.fromkeys(entry.down for entry in entries):
        ranked = [entry for entry in entries if entry.down == title and entry.standing]
        headings = list(dict.fromkeys((entry.across, entry.metric) for entry in ranked))

        lines = []
        for method in dict.fromkeys(entry.method for entry in ranked):
            by_heading = {(entry.across, entry.metric): entry.standing for entry in ranked if entry.method == method}
            columns = [_standing_texts(by_heading.get(heading)) for heading in headings]
            for kind, *texts in zip(_STANDING_LINES, *columns, strict=True):
                lines.append([method if kind == "rank" else "", kind, *texts])
        if lines:
            table.append(TableBlock(title, headings, lines))
    return table


def _lines(method: str, row: Sequence[TableEntry]) -> list[list[str]]:
    """Return a method's lines; published numbers and gaps have a line unless all of them are empty."""
    published = [_number(*entry.published) if entry.published else EMPTY for entry in row]
    gaps = [_gap(entry) for entry in row]

    lines = [[method, "here", *map(_measured, row)]]
    for kind, texts in (("published", published), ("gap", gaps)):
        if {*texts} != {EMPTY}:
            lines.append(["", kind, *texts])
    return lines


def _standing_texts(standing: Standing | None) -> list[str]:
    """Return a text for each of the `_STANDING_LINES`; None: the method cannot be compared."""
    if standing is None:
        return [EMPTY] * len(_STANDING_LINES)
    first, last = standing.rank_interval
    low, high = standing.interval
    texts = [f"{standing.rank} ({first} to {last})", f"{_text(low)} to {_text(high)}"]
    if standing.is_best:
        return [*texts, EMPTY, EMPTY]
    behind_low, behind_high = map(_signed, standing.difference_interval)
    return [*texts, f"{_signed(standing.difference)} ({behind_low} to {behind_high})", f"{standing.chance:.1%}"]


def _measured(entry: TableEntry) -> str:
    if entry.never:
        return f"{entry.never} of {entry.never + len(entry.values)} never" + PENDING * bool(entry.missing)
    if entry.mean is None:
        if entry.missing:
            return PENDING
        return "diverged" if entry.diverged else EMPTY
    number = _number(entry.mean, entry.spread)
    return number + PENDING if entry.missing else number


def _number(value: float, spread: float | None) -> str:
    return _text(value) if spread is None else f"{_text(value)}±{_text(spread)}"


def _gap(entry: TableEntry) -> str:
    if entry.gap is None:
        return EMPTY
    if entry.spread_gap is None:
        return _signed(entry.gap)
    return f"{_signed(entry.gap)} ({_signed(entry.spread_gap)})"


def _signed(value: float) -> str:
    return _text(value, "+")


def _text(value: float, sign: str = "") -> str:
    return number_text(value, -1 if abs(value) >= LARGE else 2, sign)
