"""From finished cells to the entries of a study's table, and to Parquet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

import pyarrow as pa

from raypfl.evaluation.measures import OF_PRIMARY, Measures
from raypfl.results.units import Unit
from raypfl.runs import Result
from raypfl.studies.cells import Cell
from raypfl.studies.description import Quoted, Study


@dataclass(frozen=True)
class Entry:
    """What stands in one place of the table; shares in percent.

    Attributes
    ----------
    method, down, across, metric : labels.
    values : one for each seed whose cell is finished; empty where the method has no such model.
    within : the standard deviation over clients of each.
    missing : seeds whose cell is not finished.
    published : what the source has there.
    spread_over : ``seeds`` or ``clients``.
    label : what the values are, as of an axis: ``accuracy (%)``.
    """

    method: str
    down: str
    across: str
    metric: str
    values: tuple[float, ...]
    within: tuple[float, ...]
    missing: int
    published: Quoted | None
    spread_over: str
    label: str = "accuracy (%)"

    @property
    def mean(self) -> float | None:
        """Over the seeds."""
        return fmean(self.values) if self.values else None

    @property
    def over_seeds(self) -> float | None:
        """The values' sample standard deviation; None for less than two."""
        return stdev(self.values) if len(self.values) > 1 else None

    @property
    def spread(self) -> float | None:
        """What stands behind the ±."""
        if self.spread_over == "clients":
            return fmean(self.within) if self.within else None
        return self.over_seeds

    @property
    def gap(self) -> float | None:
        """Measured minus published."""
        return None if self.mean is None or self.published is None else self.mean - self.published.value

    @property
    def spread_gap(self) -> float | None:
        """The same of a spread over clients, which is a result of its own."""
        if self.spread_over != "clients" or self.published is None or self.published.spread is None:
            return None
        return None if self.spread is None else self.spread - self.published.spread


def entries(study: Study, reference: Study, cells: Sequence[Cell], results: Mapping[int, Result]) -> list[Entry]:
    """The table's entries, row by row.

    Parameters
    ----------
    reference : the study whose published numbers are shown.
    results : of the cells that are finished, by their place in `cells`.
    """
    found = []
    for place in dict.fromkeys(cell.place for cell in cells):
        numbers = [i for i, cell in enumerate(cells) if cell.place == place]
        finished = [results[i] for i in numbers if i in results]
        summaries = [result.summary() for result in finished]
        # Where nothing is finished yet, it may not be known what will be learned.
        measures = (finished[0] if finished else cells[numbers[0]]).experiment.measures
        for heading, metric in study.metrics.items():
            rows = [row for one in summaries if (row := _row(one, metric.protocol, metric.model))]
            value = metric.value or measures.primary.name
            unit = Unit(measures.of(value) if value in measures.aggregates else measures.primary)
            of_primary = value in (measures.primary.name, *OF_PRIMARY)
            found.append(
                Entry(
                    *place,
                    metric=heading,
                    values=tuple(unit.of(row[value] for row in rows if value in row)),
                    within=tuple(unit.of(row["std"] for row in rows if of_primary and "std" in row)),
                    missing=len(numbers) - len(summaries),
                    published=reference.quoted(*place, heading),
                    spread_over=metric.spread,
                    label=unit.label,
                )
            )
    return sorted(found, key=lambda one: (list(study.down or [""]).index(one.down), _order(study.methods, one.method)))


def as_rows(found: Sequence[Entry]) -> list[dict[str, Any]]:
    """A dict for each entry, as it stands in Parquet and JSON; shares in percent, None where there are none."""
    return [
        {
            "method": one.method,
            "down": one.down,
            "across": one.across,
            "metric": one.metric,
            "measured": one.mean,
            "std_over_seeds": one.over_seeds,
            "std_over_clients": fmean(one.within) if one.within else None,
            "seeds": len(one.values),
            "missing_seeds": one.missing,
            "published": one.published.value if one.published else None,
            "published_spread": one.published.spread if one.published else None,
            "gap": one.gap,
        }
        for one in found
    ]


def entry_table(found: Sequence[Entry]) -> pa.Table:
    """`as_rows` as a table."""
    texts = [(name, pa.string()) for name in ("method", "down", "across", "metric")]
    numbers = [(name, pa.float64()) for name in ("measured", "std_over_seeds", "std_over_clients")]
    counts = [(name, pa.int32()) for name in ("seeds", "missing_seeds")]
    numbers_of_source = [(name, pa.float64()) for name in ("published", "published_spread", "gap")]
    return pa.Table.from_pylist(as_rows(found), pa.schema([*texts, *numbers, *counts, *numbers_of_source]))


def cell_table(cells: Sequence[Cell], results: Mapping[int, Result]) -> pa.Table:
    """A row for each aggregate of each finished cell: what was measured, and which run measured it."""
    schema = [(name, pa.string()) for name in ("method", "down", "across")]
    schema += [("seed", pa.int64()), ("protocol", pa.string()), ("model", pa.string())]
    found = dict.fromkeys(name for result in results.values() for name in result.experiment.measures.aggregates)
    schema += [(name, pa.float64()) for name in found or Measures().aggregates]
    schema += [("rounds", pa.int32()), ("run_dir", pa.string()), ("weights_hash", pa.string())]
    rows = []
    for i, result in results.items():
        cell = cells[i]
        about = {"method": cell.method, "down": cell.down, "across": cell.across, "seed": cell.experiment.seed}
        about |= {"rounds": result.round, "run_dir": str(result.run_dir), "weights_hash": result.weights_hash}
        rows += [about | {k: v for k, v in row.items() if k in dict(schema)} for row in result.summary()]
    return pa.Table.from_pylist(rows, pa.schema(schema))


def _row(summary: list[dict[str, Any]], protocol: str, model: str) -> dict[str, Any] | None:
    return next((row for row in summary if (row["protocol"], row["model"]) == (protocol, model)), None)


def _order(labels: Mapping[str, Any], label: str) -> int:
    return list(labels).index(label)
