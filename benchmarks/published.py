"""Published tables beside measured ones: the page of all records of studies.

``python -m benchmarks.published`` writes ``docs/results.md`` from ``benchmarks/results/published/*.json``, which
``raypfl study NAME --record FILE`` writes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median, stdev
from textwrap import fill
from typing import Any

from benchmarks import searches
from benchmarks.orders import FEWEST_METHODS, Measured, correlations, order
from raypfl.common.counting import counted
from raypfl.common.files import write
from raypfl.results.table import untrained_sentence

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "benchmarks/results/published"
PAGE = ROOT / "docs/results.md"

NEAR = 3.0
"""Percentage points; a measured mean as near as this to the published one counts as reproduced."""

FEWEST_SEEDS = 3
"""With fewer, a rank is shown without an interval."""

FAIR_ROUND = "chosen by validation"
OTHER_ROUNDS = ("best round", "last round")
"""Columns that differ in the round alone. Where a table has the first, only that one is ranked: test data chose the
best round, and the last round's ranks say nearly the same."""

HEAD = """\
# Published tables, measured

{verdict}

The tables below have every published cell that was measured. `python -m benchmarks.published` writes this page from the
[records](../benchmarks/README.md) in `benchmarks/results/published`, which
[`raypfl study NAME --record FILE`](studies.md#files) writes.

- Numbers are in %: measured, and in brackets published. ± is the standard deviation over seeds, or over clients where
  the published one is. A measured number without ± is from one seed; it shows how far a run got, and cannot rank
  methods.
- **Reproduced** is a cell whose means are at most {near:g} points apart, or whose intervals (mean ± standard deviation
  over seeds) overlap.
- Runs that are **smaller** than published (rounds, samples, network, batches) are not judged: their levels cannot be
  compared.
- **Rank correlation** is Spearman's ρ and Kendall's τ of published and measured means over the methods of a column,
  for columns of {fewest} methods or more.
- Where a published table was measured twice, in different sizes or with other settings, a further table shows whether
  the order of the methods is the same. The commands of both say what differs.
- Where settings were [searched](studies.md#equal-searches), further tables have the chosen settings, and compare the
  order of the methods with the order under fixed settings and as many rounds.
- Where there are several seeds, a second table has each method's rank, 95 % interval, paired difference from the best
  method and probability of being better, from [a bootstrap of seeds and clients](studies.md#the-table), and the mean
  CPU time of a seed. Below {fewest_seeds} seeds, ranks have no interval. Of columns that differ only in the round, the
  one whose round validation data chose is ranked; the records rank all.

| table | seeds | cells | reproduced | ρ, median of the columns | τ |
|---|---|---|---|---|---|
"""


@dataclass(frozen=True)
class Cell:
    """A published number and the measured ones beside it.

    Attributes
    ----------
    values : a number for each seed.
    over_clients : standard deviation over clients, a number for each seed; empty: the ± is over seeds.
    published, spread : the published number, and the one after its ±; None: there is none.
    standing : how the method stands among those of its column, by name; None: there is one seed, or one method.
    """

    method: str
    down: str
    across: str
    metric: str
    values: tuple[float, ...]
    over_clients: tuple[float, ...]
    published: float | None
    spread: float | None
    standing: Mapping[str, float] | None

    @classmethod
    def of(cls, entry: dict[str, Any]) -> Cell:
        """Read an entry of a record."""
        labels = (entry[key] for key in ("method", "down", "across", "metric"))
        values = (tuple(entry.get(key, ())) for key in ("values", "over_clients"))
        return cls(*labels, *values, entry.get("published"), entry.get("published_spread"), entry.get("standing"))

    @property
    def mean(self) -> float:
        return fmean(self.values)

    @property
    def measured_spread(self) -> float | None:
        """What is shown after the ±."""
        if self.over_clients:
            return fmean(self.over_clients)
        return stdev(self.values) if len(self.values) > 1 else None

    @property
    def gap(self) -> float:
        """Measured less published."""
        assert self.published is not None
        return self.mean - self.published

    @property
    def is_reproduced(self) -> bool:
        """Whether the means are near, or the intervals over seeds overlap."""
        reach = 0.0
        if not self.over_clients:
            reach = (self.measured_spread or 0.0) + (self.spread or 0.0)
        return abs(self.gap) <= max(NEAR, reach)

    @property
    def column(self) -> tuple[str, str, str]:
        return self.down, self.across, self.metric

    @property
    def name(self) -> str:
        """The method and, where there are several, the column."""
        return " ".join(filter(None, (self.method, self.across, self.metric)))

    def __str__(self) -> str:
        text = _number(self.mean, self.measured_spread)
        return text if self.published is None else f"{text} ({_number(self.published, self.spread)})"


@dataclass(frozen=True)
class Record:
    """A record of a study and its cells, by file."""

    file: Path
    values: dict[str, Any]

    @property
    def title(self) -> str:
        return str(self.values["title"] or self.values["study"])

    @property
    def cells(self) -> list[Cell]:
        return [Cell.of(entry) for entry in self.values["entries"]]

    @property
    def pairs(self) -> list[Cell]:
        """The cells that have a published number."""
        return [cell for cell in self.cells if cell.published is not None]

    @property
    def is_smaller(self) -> bool:
        return bool(self.values["smaller"])

    @property
    def rounds(self) -> set[int]:
        """How many rounds its runs had."""
        return {run["rounds"] for run in self.values["runs"]}

    @property
    def is_searched(self) -> bool:
        return "search" in self.values

    def columns(self) -> dict[tuple[str, str, str], dict[str, tuple[float, ...]]]:
        """Return the values of each method by column."""
        columns: dict[tuple[str, str, str], dict[str, tuple[float, ...]]] = {}
        for cell in self.cells:
            columns.setdefault(cell.column, {})[cell.method] = cell.values
        return columns

    @property
    def far_off(self) -> list[Cell]:
        """Cells that are not reproduced, though the runs are of the published size."""
        return [] if self.is_smaller else [cell for cell in self.pairs if not cell.is_reproduced]

    def seconds_of_a_seed(self, cell: Cell) -> str:
        """Return the mean CPU seconds of the runs behind a cell."""
        position = (cell.method, cell.down, cell.across)
        seconds = []
        for run in self.values["runs"]:
            if (run["method"], run["down"], run["across"]) == position:
                seconds.append(run["cpu_seconds"])
        return f"{fmean(seconds):.0f}" if seconds and None not in seconds else "–"

    def correlations(self) -> dict[tuple[str, str, str], tuple[float, float]]:
        """Return Spearman's and Kendall's rank correlation for each column of enough methods."""
        by_column: dict[tuple[str, str, str], list[Cell]] = {}
        for cell in self.pairs:
            by_column.setdefault(cell.column, []).append(cell)

        by_enough_methods = {}
        for column, cells in by_column.items():
            if len(cells) >= FEWEST_METHODS:
                published = [cell.published for cell in cells if cell.published is not None]
                measured = [cell.mean for cell in cells]
                # Undefined if all numbers of a side are equal.
                if len(set(published)) > 1 and len(set(measured)) > 1:
                    by_enough_methods[column] = correlations(published, measured)
        return by_enough_methods


def records(folder: Path = RECORDS) -> list[Record]:
    """Read all records, by the names of their files; those without a published table or a search are left out."""
    read = [Record(file, json.loads(file.read_text())) for file in sorted(folder.glob("*.json"))]
    return [record for record in read if record.pairs or record.is_searched]


def page(all_records: Sequence[Record]) -> str:
    """Return the page."""
    text = HEAD.format(verdict=_verdict(all_records), near=NEAR, fewest=FEWEST_METHODS, fewest_seeds=FEWEST_SEEDS)
    text += "".join(f"{_summary(record)}\n" for record in all_records)
    for record in all_records:
        text += "\n" + "\n".join(_section(record, all_records)).rstrip("\n") + "\n"
    return text


def _verdict(all_records: Sequence[Record]) -> str:
    """Ask the page's question, and answer it in three sentences."""
    measured = [record for record in all_records if record.pairs]
    judged = [record for record in measured if not record.is_smaller]
    cells = [cell for record in judged for cell in record.pairs]
    reproduced = sum(cell.is_reproduced for cell in cells)
    of_one_seed = sum(len(cell.values) == 1 for cell in cells)
    smaller = [record for record in measured if record.is_smaller]
    seeds = "all with one seed" if of_one_seed == len(cells) else f"{of_one_seed} of them with one seed"
    text = (
        f"In the published size, {counted(len(cells), 'cell')} in {len(judged)} of the tables below were measured, "
        f"{seeds}; {reproduced} are reproduced. The other {counted(len(smaller), 'table')} with published numbers are "
        "of smaller runs, whose levels cannot be compared."
    )
    medians = [median(rho for rho, _ in columns.values()) for record in smaller if (columns := record.correlations())]
    if medians:
        text += (
            f" How well these agree with the published order of methods varies: ρ, the median of a table's columns, is "
            f"{min(medians):.2f} to {max(medians):.2f}."
        )
    return fill(f"How close do raypfl's results come to published tables? {text}", 119, break_on_hyphens=False)


def _summary(record: Record) -> str:
    pairs = record.pairs
    seeds = sorted({len(cell.values) for cell in pairs or record.cells})
    if not pairs:
        return f"| {record.title} | {' or '.join(map(str, seeds))} | – | not published | – | – |"
    reproduced = "smaller runs" if record.is_smaller else f"{len(pairs) - len(record.far_off)} of {len(pairs)}"
    columns = list(record.correlations().values())
    ranks = [f"{median(column[i] for column in columns):.2f}" if columns else "–" for i in (0, 1)]
    return f"| {record.title} | {' or '.join(map(str, seeds))} | {len(pairs)} | {reproduced} | {' | '.join(ranks)} |"


def _section(record: Record, all_records: Sequence[Record]) -> Iterator[str]:
    values = record.values
    name = record.file.name
    yield f"## {record.title}\n"
    link = f"[`{name}`](../{RECORDS.relative_to(ROOT)}/{name})"
    origin = f"{values['published'] or 'No published table'}. Record: {link}{_cost(values['runs'])}."
    yield f"{origin}\n\n```\n{values['command']}\n```\n"
    yield from _tables(record)

    if record.is_searched:
        yield from searches.chosen(values["search"], values["trials"])
        for other in all_records:
            if not other.is_searched and other.rounds == record.rounds:
                origin = f"Fixed settings are those of {other.title}"
                yield from _orders(record, other, ("fixed", "searched"), origin)

    if record.pairs:
        yield f"{_judgement(record)}\n"
        for other in all_records[: all_records.index(record)]:
            if other.values["published"] == values["published"]:
                origin = f"The first column is that of {other.title}"
                yield from _orders(record, other, _distinct(other.title, record.title), origin)

    for heading, lines in (("Deviations", _deviations(record)), ("Remarks", values["reasons"])):
        if lines:
            yield f"{heading}:\n"
            yield "".join(f"- {line}\n" for line in lines).rstrip("\n")
            yield ""


def _orders(record: Record, other: Record, labels: tuple[str, str], origin: str) -> Iterator[str]:
    """Yield the order of the methods beside that of another record, for each ranked column that both have."""
    columns = record.columns()
    shared = {column: values for column, values in other.columns().items() if column in columns}
    ranked = _ranked(metric for _, _, metric in shared)
    for column, values in shared.items():
        if column[-1] in ranked:
            first = Measured(labels[0], values)
            second = Measured(labels[1], columns[column])
            yield from order(column[-1], first, second, origin)


def _distinct(first: str, second: str) -> tuple[str, str]:
    """Return two titles without the parts, between commas, that both begin with."""
    parts = first.split(", ")
    other_parts = second.split(", ")
    while len(parts) > 1 and len(other_parts) > 1 and parts[0] == other_parts[0]:
        del parts[0], other_parts[0]
    return ", ".join(parts), ", ".join(other_parts)


def _deviations(record: Record) -> list[str]:
    """Say in a line how much of the published table was run, and in another which methods it does not have."""
    lines = [line for line in record.values["deviations"] if not line.endswith(": not in the published table.")]
    published = {cell.method for cell in record.pairs}
    others = dict.fromkeys(cell.method for cell in record.cells if cell.method not in published)
    if published and others:
        lines.append(f"Without a published number: {', '.join(others)}.")
    parts = [line.removeprefix("Only ").partition(";")[0] for line in lines if line.startswith("Only ")]
    about_protocol = [line for line in lines if not line.startswith("Only ")]
    return [f"Only {', '.join(parts)}.", *about_protocol] if parts else about_protocol


def _judgement(record: Record) -> str:
    """Say how many cells are reproduced, or why that is not judged."""
    if record.is_smaller:
        return f"Not judged: the runs are smaller than published ({', '.join(record.values['smaller'])})."
    text = f"{len(record.pairs) - len(record.far_off)} of {len(record.pairs)} cells are reproduced."
    if record.far_off:
        text += f" Not: {', '.join(f'{cell.name} ({cell.gap:+.1f})' for cell in record.far_off)}."
    return text


def _tables(record: Record) -> Iterator[str]:
    """Yield a table for each block and group of columns."""
    correlations = record.correlations()
    for down, across in dict.fromkeys((cell.down, cell.across) for cell in record.cells):
        cells = [cell for cell in record.cells if (cell.down, cell.across) == (down, across)]
        methods = list(dict.fromkeys(cell.method for cell in cells))

        # In the order of a method that has all of them.
        by_method = [[cell.metric for cell in cells if cell.method == method] for method in methods]
        metrics = list(dict.fromkeys(metric for names in sorted(by_method, key=len, reverse=True) for metric in names))
        corner = " · ".join(filter(None, (down, across)))
        lines = [f"| {corner} | {' | '.join(metrics)} |", "|---" * (len(metrics) + 1) + "|"]

        for method in methods:
            by_metric = {cell.metric: str(cell) for cell in cells if cell.method == method}
            lines.append(f"| {method} | {' | '.join(by_metric.get(metric, '–') for metric in metrics)} |")

        ranks = [correlations.get((down, across, metric)) for metric in metrics]
        if any(ranks):
            texts = [f"ρ {rank[0]:.2f}, τ {rank[1]:.2f}" if rank else "–" for rank in ranks]
            lines.append(f"| rank correlation | {' | '.join(texts)} |")
        yield "\n".join(lines) + "\n"

        for metric in _ranked(metrics):
            yield from _standings(record, [cell for cell in cells if cell.metric == metric])


def _ranked(metrics: Iterable[str]) -> list[str]:
    """Leave out columns that rank the same methods by another round."""
    names = list(dict.fromkeys(metrics))
    return [name for name in names if FAIR_ROUND not in names or name not in OTHER_ROUNDS]


def _standings(record: Record, cells: Sequence[Cell]) -> Iterator[str]:
    """Yield a table of how the methods of a column stand, from the best one on."""
    ranked = [cell for cell in cells if cell.standing]
    if not ranked:
        return
    lines = [f"| {cells[0].metric} | rank | 95 % | to the best | P(better) | CPU s |", "|---|---|---|---|---|---|"]
    for cell in sorted(ranked, key=lambda cell: cell.standing["rank"] if cell.standing else 0):
        standing = cell.standing
        assert standing is not None
        to_best = chance = "–"
        if standing["rank"] > 1:
            interval = f"{standing['to_best_low']:+.1f} to {standing['to_best_high']:+.1f}"
            to_best = f"{standing['to_best']:+.1f} ({interval})"
            chance = f"{100 * standing['chance_better']:.0f} %"

        ranks = f"{standing['rank']}"
        if len(cell.values) >= FEWEST_SEEDS:
            ranks += f" ({standing['rank_low']} to {standing['rank_high']})"
        interval = f"{standing['low']:.1f} to {standing['high']:.1f}"
        columns = (cell.method, ranks, interval, to_best, chance, record.seconds_of_a_seed(cell))
        lines.append(f"| {' | '.join(columns)} |")
    yield "\n".join(lines) + "\n"

    # A study ranks no global model of which a part was never trained.
    unranked = [cell.method for cell in cells if not cell.standing]
    if unranked:
        yield f"{untrained_sentence(unranked)} It is not ranked.\n"


def _cost(runs: Sequence[dict[str, Any]]) -> str:
    """Say how many runs there were, and their CPU time if all of it is known."""
    if not runs:
        return ", made from a table; hashes and CPU time of its runs were not kept"
    seconds = [run["cpu_seconds"] for run in runs]
    if None in seconds:
        return f", {counted(len(runs), 'run')}"
    return f", {counted(len(runs), 'run')}, {sum(seconds) / 3600:.1f} CPU hours"


def _number(value: float, spread: float | None) -> str:
    return f"{value:.1f}" if spread is None else f"{value:.1f} ± {spread:.1f}"


if __name__ == "__main__":
    write(PAGE, page(records()))
