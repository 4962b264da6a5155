"""Where commands print, and tables that fit: cells fold between words, and columns without room are left out."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import IO

from rich import box
from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text

NARROW = 24
"""Characters to which a column with spaces may be folded, though a word of it is longer."""

_UNBOUNDED = 10_000  # columns of a terminal


class ProgressConsole(Console):
    """The standard error; once its reader has gone, what follows goes nowhere.

    rich would send the standard output nowhere instead, with the results, and exit.
    """

    def __init__(self, file: IO[str] | None = None):
        super().__init__(file=file, stderr=file is None)

    def on_broken_pipe(self) -> None:
        """Let what is printed from now on, and at the end of the process, go nowhere."""
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())


def output() -> Console:
    """Return the standard output, as wide as the terminal; a file or a pipe has room for everything."""
    console = Console()
    return console if console.is_terminal else Console(width=_UNBOUNDED)


def width_of(console: Console, table: Table) -> int:
    """Return the width that a table takes where there is room."""
    return console.measure(table, options=console.options.update(max_width=_UNBOUNDED)).maximum


def fit_table(
    width: int,
    columns: Mapping[str, Sequence[str]],
    dispensable: Sequence[str] = (),
    right: Sequence[str] = (),
    whole: Sequence[str] = (),
) -> tuple[Table, list[str]]:
    """Return a table at most `width` wide, if its columns can be made so narrow, and the headings left out.

    Parameters
    ----------
    columns : cells by heading.
    dispensable : headings that may be left out, in this order.
    right : headings of columns that are aligned on the right.
    whole : headings of columns whose cells are not folded, such as intervals.
    """
    for count in range(len(dispensable) + 1):
        left_out = dispensable[:count]
        shown = {heading: cells for heading, cells in columns.items() if heading not in left_out}
        widths = {heading: _longest([*heading.splitlines(), *cells]) for heading, cells in shown.items()}
        spare = {}
        for heading, cells in shown.items():
            spare[heading] = 0 if heading in whole else widths[heading] - _narrowest(heading, cells)
        excess = sum(widths.values()) + 2 * len(widths) - width
        if excess <= sum(spare.values()):
            break

    for _ in range(min(excess, sum(spare.values()))):
        widest = max(spare, key=spare.__getitem__)
        widths[widest] -= 1
        spare[widest] -= 1

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for heading, column_width in widths.items():
        justify: JustifyMethod = "right" if heading in right else "left"
        table.add_column(heading, width=column_width, justify=justify, overflow="fold")
    for row in zip(*shown.values(), strict=True):
        table.add_row(*map(Text, row))
    return table, list(left_out)


def _narrowest(heading: str, cells: Sequence[str]) -> int:
    """Return the width to which a column can be folded between words."""
    longest_word = _longest([word for cell in cells for word in cell.split()])
    if any(" " in cell for cell in cells):
        longest_word = min(longest_word, NARROW)
    return max(longest_word, _longest(heading.splitlines()))


def _longest(texts: Sequence[str]) -> int:
    return max(map(len, texts), default=0)
