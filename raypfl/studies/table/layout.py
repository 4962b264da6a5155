"""A study's table, on the terminal and in Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from raypfl.common.counting import counted
from raypfl.results import bootstrap, latex
from raypfl.results.differences import ENOUGH_SEEDS
from raypfl.results.display.fitting import width_of
from raypfl.results.ranking.standings import Standing
from raypfl.studies.description import PublishedTable, Study
from raypfl.studies.table.entries import TableEntry

EMPTY = "–"
PENDING = "…"
"""Mark of unfinished cells."""

_STANDING = "against the best"
_STYLES = {"here": "bold", "published": "dim", "gap": "cyan", "rank": "bold"}


@dataclass(frozen=True)
class TableBlock:
    """Part of a study's table for one setting of `study.down`.

    Attributes
    ----------
    headings : ``(group, metric)`` of each column.
    lines : up to four lines per method: the method's name (empty after the first line), then what is in the line, such
        as ``here``, ``published`` or ``gap``, then a text for each column.
    """

    title: str
    headings: list[tuple[str, str]]
    lines: list[list[str]]


def blocks(entries: Sequence[TableEntry]) -> list[TableBlock]:
    """Arrange entries as in the paper: a block for each setting down, a column for each metric and setting across."""
    table = []
    for title in dict.fromkeys(entry.down for entry in entries):
        block_entries = [entry for entry in entries if entry.down == title]
        headings = list(dict.fromkeys((entry.across, entry.metric) for entry in block_entries))

        lines = []
        for method in dict.fromkeys(entry.method for entry in block_entries):
            by_heading = {(entry.across, entry.metric): entry for entry in block_entries if entry.method == method}
            lines += _lines(method, [by_heading[heading] for heading in headings])
        table.append(TableBlock(title, headings, lines))
    return table


def standing_blocks(entries: Sequence[TableEntry]) -> list[TableBlock]:
    """Arrange how methods stand as `blocks` does; none if no two of them can be compared."""
    table = []
    for title in dict.fromkeys(entry.down for entry in entries):
        ranked = [entry for entry in entries if entry.down == title and entry.standing]
        headings = list(dict.fromkeys((entry.across, entry.metric) for entry in ranked))
        lines = []
        for method in dict.fromkeys(entry.method for entry in ranked):
            texts = [[EMPTY] * len(headings) for _ in _STANDING_LINES]
            for entry in ranked:
                if entry.method == method and entry.standing:
                    column = headings.index((entry.across, entry.metric))
                    for line, text in zip(texts, _standing_texts(entry.standing), strict=True):
                        line[column] = text
            for kind, line in zip(_STANDING_LINES, texts, strict=True):
                lines.append([method if kind == "rank" else "", kind, *line])
        if lines:
            table.append(TableBlock(f"{title} {_STANDING}".strip(), headings, lines))
    return table


def show(
    console: Console,
    study: Study,
    published: PublishedTable | None,
    entries: Sequence[TableEntry],
    deviations: Sequence[str],
    searched: Sequence[str] = (),
) -> None:
    """Print the table and its notes; `searched` says what a search chose."""
    for block in [*blocks(entries), *standing_blocks(entries)]:
        console.print()
        if block.title:
            console.print(Text(block.title, "bold"))
        for part in _parts(block, console):
            console.print(part)

    for heading, lines in _notes(study, published, entries, deviations, searched):
        is_warning = heading.startswith("Deviations")
        console.print(Text(heading, "bold yellow" if is_warning else "dim"))
        for line in lines:
            console.print(Padding(Text(line, "" if is_warning else "dim"), (0, 0, 0, 2)))


def markdown(
    study: Study,
    published: PublishedTable | None,
    entries: Sequence[TableEntry],
    deviations: Sequence[str],
    searched: Sequence[str] = (),
) -> str:
    """Return the table and its notes as Markdown."""
    parts = [f"# {study.name}"]
    for block in [*blocks(entries), *standing_blocks(entries)]:
        if block.title:
            parts.append(f"## {block.title}")
        headings = ["", "", *(" ".join(filter(None, heading)) for heading in block.headings)]
        rows = [headings, ["---", "---", *["---:"] * len(block.headings)], *block.lines]
        parts.append("\n".join(f"| {' | '.join(row)} |" for row in rows))

    for heading, lines in _notes(study, published, entries, deviations, searched):
        parts.append("\n".join([f"**{heading}**", "", *(f"- {line}" for line in lines)]))
    return "\n\n".join(parts) + "\n"


def as_latex(
    study: Study,
    published: PublishedTable | None,
    entries: Sequence[TableEntry],
    deviations: Sequence[str],
    searched: Sequence[str] = (),
) -> str:
    """Return the table as LaTeX, one for all blocks with the same columns, and its notes as comments."""
    (_, (legend,)), *notes = _notes(study, published, entries, deviations, searched)
    # The caption says what their titles end with.
    standings = [
        replace(block, title=block.title.removesuffix(_STANDING).strip()) for block in standing_blocks(entries)
    ]
    tables = [
        *_latex_tables(blocks(entries), f"{study.name}. {legend}"),
        *_latex_tables(standings, f"{study.name}, {_STANDING}."),
    ]

    comments = []
    for heading, lines in notes:
        comments += [f"% {heading}: {line}" for line in lines]
    return "\n".join([latex.PREAMBLE, *tables, *comments, ""])


def _latex_tables(arranged: Sequence[TableBlock], caption: str) -> Iterator[str]:
    """Yield a table for all blocks with the same columns."""
    by_headings: dict[tuple[tuple[str, str], ...], list[TableBlock]] = {}
    for block in arranged:
        by_headings.setdefault(tuple(block.headings), []).append(block)

    for headings, same_columns in by_headings.items():
        column_names = ["method", "", *(latex.escaped(" ".join(filter(None, heading))) for heading in headings)]
        rows = []
        for block in same_columns:
            texts = [list(map(latex.number, line)) for line in block.lines]
            rows.append((latex.escaped(block.title), texts))
        yield latex.table(column_names, rows, caption, words=2)


def _parts(block: TableBlock, console: Console) -> Iterator[Table]:
    """Yield the block as a table or, if it is wider than the console, as several tables with some columns each."""
    columns = [list(texts) for texts in zip(*(line[2:] for line in block.lines), strict=True)]
    whole = _table(block, range(len(columns)), [None] * len(columns))
    if width_of(console, whole) <= console.width:
        yield whole
        return

    # Each column is as wide as its longest word, so that no word is broken.
    widths = []
    for heading, texts in zip(block.headings, columns, strict=True):
        words = " ".join((*heading, *texts)).split()
        widths.append(max(len(word) for word in words))

    room = console.width - width_of(console, _table(block, [], []))
    selected: list[int] = []
    for i, width in enumerate(widths):
        used = sum(widths[column] + 2 for column in selected)
        if selected and used + width + 2 > room:
            yield _table(block, selected, widths)
            selected = []
        selected.append(i)
    yield _table(block, selected, widths)


def _table(block: TableBlock, columns: Sequence[int], widths: Sequence[int | None]) -> Table:
    """Return some columns of a block as a table; a width of None fits the texts."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("method", style="bold")
    table.add_column("")
    for i in columns:
        table.add_column("\n".join(filter(None, block.headings[i])), justify="right", width=widths[i])
    for i, (method, kind, *texts) in enumerate(block.lines):
        if method and i:
            table.add_section()
        shown_texts = [kind, *(texts[column] for column in columns)]
        table.add_row(Text(method), *(Text(text, _STYLES.get(kind, "")) for text in shown_texts))
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


_STANDING_LINES = ("rank", "95%", "to best", "P(better)")


def _standing_texts(standing: Standing) -> list[str]:
    """Return a text for each of the `_STANDING_LINES`."""
    first, last = standing.rank_interval
    low, high = standing.interval
    texts = [f"{standing.rank} ({first} to {last})", f"{low:.2f} to {high:.2f}"]
    if standing.is_best:
        return [*texts, EMPTY, EMPTY]
    behind_low, behind_high = map(_signed, standing.difference_interval)
    return [*texts, f"{_signed(standing.difference)} ({behind_low} to {behind_high})", f"{standing.chance:.1%}"]


def _measured(entry: TableEntry) -> str:
    if entry.never:
        return f"{entry.never} of {entry.never + len(entry.values)} never" + PENDING * bool(entry.missing)
    if entry.mean is None:
        return PENDING if entry.missing else EMPTY
    number = _number(entry.mean, entry.spread)
    return number + PENDING if entry.missing else number


def _number(value: float, spread: float | None) -> str:
    return f"{value:.2f}" if spread is None else f"{value:.2f}±{spread:.2f}"


def _gap(entry: TableEntry) -> str:
    if entry.gap is None:
        return EMPTY
    if entry.spread_gap is None:
        return _signed(entry.gap)
    return f"{_signed(entry.gap)} ({_signed(entry.spread_gap)})"


def _signed(value: float) -> str:
    # Adding 0.0 turns -0.0 into 0.0, so that -0.00 is never shown.
    return f"{round(value, 2) + 0.0:+.2f}"


def _standing_remarks(standings: Sequence[Standing]) -> list[str]:
    remarks = [
        f"Of {bootstrap.DRAWS:,} bootstrap draws of seeds and clients, the same for all methods of a column: the "
        "middle 95% of a method's mean, of its difference to the method with the best mean (to best), and of its rank. "
        "P(better) is the share of draws in which it is better than that method."
    ]
    seeds = min(standing.seeds for standing in standings)
    if seeds < ENOUGH_SEEDS:
        remarks.append(
            f"Over {counted(seeds, 'seed')}: a two-sided Wilcoxon test can give p < 0.05 from {ENOUGH_SEEDS} seeds on."
        )
    return remarks


def _notes(
    study: Study,
    published: PublishedTable | None,
    entries: Sequence[TableEntry],
    deviations: Sequence[str],
    searched: Sequence[str],
) -> list[tuple[str, list[str]]]:
    """Return the notes below the table, as headings with lines; the first one is the legend."""
    over = "the seeds"
    if any(entry.spread_over == "clients" for entry in entries):
        gaps = "; gap (gap of the ±)" if published else ""
        over = f"the clients, averaged over the seeds{gaps}"
    all_in_percent = all(entry.label.endswith("(%)") for entry in entries)
    shares = "In %" if all_in_percent else "Shares in %"
    legend = f"{shares}. ± is the standard deviation over {over}. {PENDING} marks unfinished cells."

    if any(entry.never for entry in entries):
        legend += " Never: so many seeds did not reach the target."

    notes = [("Numbers", [legend])]
    ranked = [entry.standing for entry in entries if entry.standing]
    if ranked:
        notes.append(("Against the best", _standing_remarks(ranked)))
    notes.append(("Search", [*searched]))
    if published:
        notes.append(("Published", [published.source, *published.notes]))
        notes.append(("Choices where the source leaves something open", study.choices))

    heading = "Deviations from the published protocol" if published else "Deviations"
    notes.append((heading, [*deviations] or ["None: everything was run as described."]))
    return [(heading, lines) for heading, lines in notes if lines]
