"""The entries of a study's table, from its finished cells; as rows for Parquet and JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

import pyarrow as pa

from raypfl.evaluation.measures import OF_PRIMARY, Measures
from raypfl.results.units import Unit
from raypfl.runs.result import RunResult
from raypfl.studies.cells import StudyCell
from raypfl.studies.description import MetricColumn, PublishedNumber, Study


@dataclass(frozen=True)
class TableEntry:
    """One entry of the table; shares in percent.

    Attributes
    ----------
    method, down, across, metric : labels.
    values : one for each finished seed; empty if the method has no such model.
    within : standard deviation over clients, of each of the `values`.
    missing : number of seeds that are not finished.
    published : the number in the paper.
    spread_over : ``seeds`` or ``clients``.
    label : what the values are, as on an axis: ``accuracy (%)``.
    """

    method: str
    down: str
    across: str
    metric: str
    values: tuple[float, ...]
    within: tuple[float, ...]
    missing: int
    published: PublishedNumber | None
    spread_over: str
    label: str = "accuracy (%)"

    @property
    def mean(self) -> float | None:
        """Over the seeds."""
        return fmean(self.values) if self.values else None

    @property
    def over_seeds(self) -> float | None:
        """Sample standard deviation of the values; None for less than two."""
        return stdev(self.values) if len(self.values) > 1 else None

    @property
    def over_clients(self) -> float | None:
        """Standard deviation over clients, averaged over the seeds."""
        return fmean(self.within) if self.within else None

    @property
    def spread(self) -> float | None:
        """The number after the ±."""
        return self.over_clients if self.spread_over == "clients" else self.over_seeds

    @property
    def gap(self) -> float | None:
        """Measured minus published."""
        return None if self.mean is None or self.published is None else self.mean - self.published.value

    @property
    def spread_gap(self) -> float | None:
        """The gap of the spread, if that is over clients: then it is a result of its own."""
        theirs = self.published.spread if self.published else None
        if self.spread_over != "clients" or self.spread is None or theirs is None:
            return None
        return self.spread - theirs


def table_entries(
    study: Study, reference: Study, cells: Sequence[StudyCell], results: Mapping[int, RunResult]
) -> list[TableEntry]:
    """The table's entries, row by row.

    Parameters
    ----------
    reference : the study with the published numbers.
    results : of the finished cells, by their index in `cells`.
    """
    found = []
    for position in dict.fromkeys(cell.position for cell in cells):
        numbers = [i for i, cell in enumerate(cells) if cell.position == position]
        finished = [results[i] for i in numbers if i in results]
        # Before a run has begun, it may not be known what will be learned.
        measures = (finished[0] if finished else cells[numbers[0]]).experiment.measures
        for heading, metric in study.metrics.items():
            tested = [_rows(result, metric) for result in finished]
            value = metric.value or measures.primary.name
            unit = Unit(measures.metric_of(value) if value in measures.aggregates else measures.primary)
            of_primary = value in (measures.primary.name, *OF_PRIMARY)
            found.append(
                TableEntry(
                    *position,
                    metric=heading,
                    values=tuple(unit.of(_means(tested, value))),
                    within=tuple(unit.of(_means(tested, "std") if of_primary else ())),
                    missing=len(numbers) - len(finished),
                    published=reference.quoted(*position, heading),
                    spread_over=metric.spread,
                    label=unit.label,
                )
            )
    downs, methods = list(study.down or [""]), list(study.methods)
    return sorted(found, key=lambda one: (downs.index(one.down), methods.index(one.method)))


def _rows(result: RunResult, metric: MetricColumn) -> list[dict[str, Any]]:
    """What a metric reads: the aggregates after each of its last rounds."""
    rounds = sorted(set(result.evaluations["round"].to_pylist()))[-metric.last :]
    wanted = (metric.protocol, metric.model)
    return [row for round in rounds for row in result.summary(round) if (row["protocol"], row["model"]) == wanted]


def _means(tested: Sequence[Sequence[Mapping[str, Any]]], value: str) -> list[float]:
    """The mean over rounds of a value, for each run that has it."""
    columns = ([row[value] for row in rows if value in row] for rows in tested)
    return [fmean(column) for column in columns if column]


def entry_rows(found: Sequence[TableEntry]) -> list[dict[str, Any]]:
    """A dict for each entry, as in Parquet and JSON; shares in percent, None for what there is not."""
    return [
        {
            "method": one.method,
            "down": one.down,
            "across": one.across,
            "metric": one.metric,
            "measured": one.mean,
            "std_over_seeds": one.over_seeds,
            "std_over_clients": one.over_clients,
            "seeds": len(one.values),
            "missing_seeds": one.missing,
            "published": one.published.value if one.published else None,
            "published_spread": one.published.spread if one.published else None,
            "gap": one.gap,
        }
        for one in found
    ]


def entry_table(found: Sequence[TableEntry]) -> pa.Table:
    """`entry_rows` as a table."""
    rows = entry_rows(found)
    kinds = {"method": "string", "down": "string", "across": "string", "metric": "string"}
    kinds |= {"seeds": "int32", "missing_seeds": "int32"}
    return pa.Table.from_pylist(rows, pa.schema([(name, kinds.get(name, "float64")) for name in rows[0]]))


def cell_table(cells: Sequence[StudyCell], results: Mapping[int, RunResult]) -> pa.Table:
    """A row for each protocol and model of each finished cell: its aggregates, and the run that measured them."""
    found = dict.fromkeys(name for result in results.values() for name in result.experiment.measures.aggregates)
    schema = pa.schema(
        [
            *((name, "string") for name in ("method", "down", "across")),
            ("seed", "int64"),
            *((name, "string") for name in ("protocol", "model")),
            *((name, "float64") for name in found or Measures().aggregates),
            *(("rounds", "int32"), ("run_dir", "string"), ("weights_hash", "string")),
        ]
    )
    rows = []
    for i, result in results.items():
        about: dict[str, Any] = dict(zip(("method", "down", "across"), cells[i].position, strict=True))
        about |= {"seed": cells[i].experiment.seed, "rounds": result.round, "run_dir": str(result.run_dir)}
        about["weights_hash"] = result.weights_hash
        rows += [about | {k: v for k, v in row.items() if k in schema.names} for row in result.summary()]
    return pa.Table.from_pylist(rows, schema)
