"""A comparison of methods as Python prints it: the table of paired differences."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from raypfl.common.errors import ConfigError
from raypfl.results.display.fitting import fit_table
from raypfl.results.pairing.differences import HEADINGS, Difference, differences, find_baseline
from raypfl.results.pairing.remarks import remarks
from raypfl.results.run_groups import (
    compared,
    group_runs,
    refuse_no_results,
    sentences_without_result,
    without_repetitions,
)
from raypfl.runs.result import RunResult

_WIDTH = 100  # characters of what Python prints and a notebook shows


@dataclass(frozen=True, repr=False)
class Differences:
    """Paired differences between methods: prints as a table, and iterates over the rows.

    Attributes
    ----------
    rows : one for each protocol and method, see :class:`raypfl.results.pairing.differences.Difference`.
    notes : sentences on how to read them.
    """

    rows: tuple[Difference, ...]
    notes: tuple[str, ...]

    def __iter__(self) -> Iterator[Difference]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        return self._printed().export_text().rstrip()

    def _repr_html_(self) -> str:
        return self._printed().export_html(inline_styles=True, code_format="<pre>{code}</pre>")

    def _printed(self) -> Console:
        console = Console(record=True, file=io.StringIO(), width=_WIDTH)
        table, _ = difference_table(self.rows, _WIDTH)
        console.print(table)
        for note in self.notes:
            console.print(Text(note))
        return console


def compare(results: Sequence[RunResult], baseline: str | None = None) -> Differences:
    """Compare methods by paired differences of the primary metric, with intervals.

    Parameters
    ----------
    results : runs on the same data, evaluated at least once; those that differ in their seed alone are one method's.
        Runs that diverged or failed have no result: they are named, and compared with nothing. Of several runs of one
        experiment and seed, the one that ended last counts.
    baseline : the method, by its label, that the others are compared with; None: the best one of each protocol.

    Raises
    ------
    ConfigError : if there is nothing to compare, or no such baseline.

    Examples
    --------
    ::

        results = [
            raypfl.run(experiment.override([f"method={method}", f"seed={seed}"]))
            for method in ("fedavg", "ditto") for seed in range(3)
        ]
        raypfl.compare(results, baseline="fedavg")
    """
    refuse_no_results(results, "raypfl.compare")
    unrepeated, repetitions = without_repetitions(results)
    comparable = compared(unrepeated)
    groups = group_runs(comparable)
    if len(groups) < 2:
        raise ConfigError(
            "There is nothing to compare: give results of at least two methods, or of one with two settings, that were "
            "evaluated. Runs that differ only in their seeds count as one."
        )
    rows = differences(groups, find_baseline(comparable, baseline) if baseline else None)
    if not rows:
        raise ConfigError(
            f"There is nothing to compare: no two methods have a value of {groups[0].unit.phrase} on the same test."
        )
    notes = (*remarks(rows, groups), *sentences_without_result(comparable), *repetitions)
    return Differences(tuple(rows), notes)


def difference_table(rows: Sequence[Difference], width: int) -> tuple[Table, list[str]]:
    """Return a table with a row for each difference, folded to a width, and the headings left out."""
    # Of neighbouring rows on the same test, only the first one names it.
    tests = []
    previous = ""
    for row in rows:
        test = row.protocol
        if row.best:
            test += "*"
        if test == previous:
            tests.append("")
        else:
            tests.append(test)
        previous = test

    cells = zip(*(row.cells for row in rows), strict=True)
    columns: dict[str, Sequence[str]] = {
        "tested\non": tests,
        "method": [row.method for row in rows],
        "against": [row.baseline for row in rows],
        **dict(zip(HEADINGS, cells, strict=True)),
    }
    return fit_table(width, columns, dispensable=HEADINGS[:1:-1], right=HEADINGS, whole=HEADINGS)
