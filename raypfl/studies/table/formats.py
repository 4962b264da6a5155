"""A study's table as text: on the terminal, in Markdown and in LaTeX."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from raypfl.results.display import latex
from raypfl.results.display.fitting import width_of
from raypfl.studies.table.layout import AGAINST_THE_BEST, StudyTable, TableBlock

_STYLES = {"here": "bold", "published": "dim", "gap": "cyan", "rank": "bold"}


def show(console: Console, table: StudyTable) -> None:
    """Print the table and its notes."""
    for block in table.titled_blocks:
        console.print()
        if block.title:
            console.print(Text(block.title, "bold"))
        for part in _parts(block, console):
            console.print(part)

    for heading, lines in table.notes:
        is_warning = heading.startswith("Deviations")
        console.print(Text(heading, "bold yellow" if is_warning else "dim"))
        for line in lines:
            console.print(Padding(Text(line, "" if is_warning else "dim"), (0, 0, 0, 2), expand=False))


def markdown(table: StudyTable) -> str:
    """Return the table and its notes as Markdown."""
    parts = [f"# {table.name}"]
    for block in table.titled_blocks:
        if block.title:
            parts.append(f"## {block.title}")
        headings = [*[""] * block.words, *(" ".join(filter(None, heading)) for heading in block.headings)]
        rows = [headings, [*["---"] * block.words, *["---:"] * len(block.headings)], *block.lines]
        parts.append("\n".join(f"| {' | '.join(row)} |" for row in rows))

    for heading, lines in table.notes:
        parts.append("\n".join([f"**{heading}**", "", *(f"- {line}" for line in lines)]))
    return "\n\n".join(parts) + "\n"


def as_latex(table: StudyTable) -> str:
    """Return the table as LaTeX, one for all blocks with the same columns, and its notes as comments."""
    (_, (legend,)), *notes = table.notes
    tables = [
        *_latex_tables(table.results, f"{table.name}. {legend}", table.name),
        *_latex_tables(table.standings, f"{table.name}, {AGAINST_THE_BEST}.", f"{table.name} {AGAINST_THE_BEST}"),
    ]

    comments = []
    for heading, lines in notes:
        for line in lines:
            # Such as an error with its traceback, which has several lines of its own.
            comments.append(f"% {heading}: {line}".replace("\n", "\n% "))
    return "\n".join([latex.PREAMBLE, *tables, *comments, ""])


def _latex_tables(arranged: Sequence[TableBlock], caption: str, label: str) -> Iterator[str]:
    """Yield a table for all blocks with the same columns."""
    by_headings: dict[tuple[tuple[str, str], ...], list[TableBlock]] = {}
    for block in arranged:
        by_headings.setdefault(tuple(block.headings), []).append(block)

    for number, (headings, same_columns) in enumerate(by_headings.items(), start=1):
        words = same_columns[0].words
        names_of_words = ["method", ""][:words]
        column_names = [*names_of_words, *(latex.escaped(" ".join(filter(None, heading))) for heading in headings)]
        rows = []
        for block in same_columns:
            texts = [list(map(latex.number, line)) for line in block.lines]
            rows.append((latex.escaped(block.title), texts))
        unique_label = label if len(by_headings) == 1 else f"{label} {number}"
        yield latex.table(column_names, rows, caption, unique_label, words)


def _parts(block: TableBlock, console: Console) -> Iterator[Table]:
    """Yield the block as a table or, if it is wider than the console, as several tables with some columns each."""
    columns = [list(texts) for texts in zip(*(line[block.words :] for line in block.lines), strict=True)]
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
    if block.words > 1:
        table.add_column("")
    for i in columns:
        table.add_column("\n".join(filter(None, block.headings[i])), justify="right", width=widths[i])
    for i, line in enumerate(block.lines):
        if line[0] and i and block.words > 1:
            table.add_section()
        style = _STYLES.get(line[1], "") if block.words > 1 else ""
        shown_texts = [*line[1 : block.words], *(line[block.words + column] for column in columns)]
        table.add_row(Text(line[0]), *(Text(text, style) for text in shown_texts))
    return table
