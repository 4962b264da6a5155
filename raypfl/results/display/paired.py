"""The table of paired differences on a terminal, and the comparison that Python prints."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from raypfl.common.errors import ConfigError
from raypfl.results.compared import RunGroup, group_runs
from raypfl.results.display.fitting import fitting
from raypfl.results.paired import HEADINGS, Difference, differences, remarks
from raypfl.runs.result import RunResult

_PAGE = 100  # characters of what Python prints and a notebook shows


@dataclass(frozen=True, repr=False)
class Differences:
    """Paired differences between methods: prints as a table, and iterates over the rows.

    Attributes
    ----------
    rows : one for each protocol and method, see :class:`raypfl.results.paired.Difference`.
    notes : what to know about them, in sentences.
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
        console = Console(record=True, file=io.StringIO(), width=_PAGE)
        drawn, _ = table(self.rows, _PAGE)
        console.print(drawn)
        for note in self.notes:
            console.print(Text(note))
        return console


def compare(results: Sequence[RunResult], baseline: str | None = None) -> Differences:
    """How far methods are apart: paired differences of the primary metric, with intervals.

    Parameters
    ----------
    results : of runs on the same data, evaluated at least once; those that differ in their seed alone are one method's.
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
    compared = _compared(results)
    rows = differences(compared, baseline)
    return Differences(tuple(rows), tuple(remarks(rows, compared)))


def _compared(results: Sequence[RunResult]) -> list[RunGroup]:
    """The runs by method, if there are at least two with an evaluation; a ConfigError otherwise."""
    compared = group_runs([result for result in results if result.evaluations.num_rows])
    if len(compared) < 2:
        raise ConfigError(
            "There is nothing to compare: give results of at least two methods, or of one with two settings, that were "
            "evaluated. Runs that differ in their seed alone are one method's."
        )
    return compared


def table(rows: Sequence[Difference], width: int) -> tuple[Table, list[str]]:
    """A row for each difference, folded to a width, and the headings left out."""
    cells = list(zip(*(row.cells for row in rows), strict=True))
    tests = [f"{row.protocol}{'*' * row.best}" for row in rows]
    columns: dict[str, Sequence[str]] = {
        "tested\non": ["" if i and tests[i - 1] == test else test for i, test in enumerate(tests)],
        "method": [row.method for row in rows],
        "against": [row.baseline for row in rows],
        **dict(zip(HEADINGS, cells, strict=True)),
    }
    return fitting(width, columns, dispensable=HEADINGS[:1:-1], right=HEADINGS)
