"""The entries of a study's table, from its finished cells; as rows for Parquet and JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from raypfl.evaluation.run_metrics import PRIMARY_AGGREGATES, Measures
from raypfl.results.budgets import cost_to_target
from raypfl.results.numbers import Axis, evaluated_rows, positions, scores_of
from raypfl.results.ranking.standings import Standing, pairing, standings
from raypfl.results.units import Unit, deviation
from raypfl.runs.records import divergence
from raypfl.runs.result import RunResult
from raypfl.studies.cells import StudyCell
from raypfl.studies.description import PublishedNumber, Study
from raypfl.studies.parts import MetricColumn

_COST_LABELS: dict[Axis, str] = {
    "round": "rounds",
    "megabytes": "MB",
    "simulated_seconds": "simulated seconds",
    "kilojoules": "kJ",
}


@dataclass(frozen=True)
class TableEntry:
    """Entry of a study's table; shares are in percent.

    Attributes
    ----------
    method, down, across, metric : labels of the entry's row, block, group of columns and column.
    values : measured values, one per finished seed; empty if the method has no such model.
    within : standard deviation over clients for each of the `values`.
    missing : number of seeds that are not finished, and may still be.
    diverged : number of seeds that diverged, and have no value.
    never : number of finished seeds that never reached the target whose cost the `values` are.
    published : the number in the paper.
    spread_over : ``seeds`` or ``clients``, for the number after the ±.
    label : label of the values on an axis: ``accuracy (%)``.
    standing : how the method stands among those of its column; None: they cannot be paired.
    untrained : whether the values are of a global model of which a part was never trained; it is not ranked.
    """

    method: str
    down: str
    across: str
    metric: str
    values: tuple[float, ...] = ()
    within: tuple[float, ...] = ()
    missing: int = 0
    published: PublishedNumber | None = None
    spread_over: str = "seeds"
    label: str = "accuracy (%)"
    standing: Standing | None = None
    never: int = 0
    diverged: int = 0
    untrained: bool = False

    @property
    def mean(self) -> float | None:
        """Mean over the seeds; None if one never reached the target, since the others alone would look too good."""
        return fmean(self.values) if self.values and not self.never else None

    @property
    def over_seeds(self) -> float | None:
        """Sample standard deviation over the seeds; None for fewer than two, or if the mean is None."""
        return deviation(self.values) if len(self.values) > 1 and not self.never else None

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
        if self.mean is None or self.published is None:
            return None
        return self.mean - self.published.value

    @property
    def spread_gap(self) -> float | None:
        """Measured minus published spread, if it is over clients: only then is it a result."""
        published_spread = self.published.spread if self.published else None
        if self.spread_over != "clients" or self.spread is None or published_spread is None:
            return None
        return self.spread - published_spread


def table_entries(
    study: Study, reference: Study, cells: Sequence[StudyCell], results: Mapping[int, RunResult]
) -> list[TableEntry]:
    """Return the table's entries, row by row.

    Parameters
    ----------
    reference : the study with the published numbers.
    results : results of the finished cells, by index in `cells`.
    """
    entries: list[TableEntry] = []
    for position in study.positions:
        # None if all trials of the position's search failed.
        indices = [i for i, cell in enumerate(cells) if cell.position == position]
        finished = [results[i] for i in indices if i in results]

        # A finished run knows its metrics; a cell may leave the objective open.
        experiment = finished[0].experiment if finished else cells[indices[0] if indices else 0].experiment
        diverged = sum(divergence(cells[i].folder) is not None for i in indices if i not in results)
        missing = len(indices) - len(finished) - diverged
        for heading, metric in study.metrics.items():
            is_measured = metric.is_of(position[1])
            runs = finished if is_measured else []
            entry = TableEntry(
                *position,
                metric=heading,
                missing=missing if is_measured else 0,
                diverged=diverged if is_measured else 0,
                published=reference.quoted(*position, heading),
                spread_over=metric.spread,
                untrained=any(_is_untrained(result, metric) for result in runs),
            )
            if metric.target is None:
                entries.append(_with_means(entry, metric, runs, experiment.measures))
            else:
                entries.append(_with_costs(entry, metric, runs))

    for column in dict.fromkeys((entry.down, entry.across, entry.metric) for entry in entries):
        metric = study.metrics[column[2]]
        if metric.is_of(column[0]):
            entries = _with_standings(entries, column, metric, cells, results)

    downs = list(study.down or [""])
    methods = list(study.methods)
    return sorted(entries, key=lambda entry: (downs.index(entry.down), methods.index(entry.method)))


def _with_means(
    entry: TableEntry, metric: MetricColumn, finished: Sequence[RunResult], measures: Measures
) -> TableEntry:
    """Return the entry with means over clients, or with another aggregate."""
    rows_by_run = [_rows(result, metric) for result in finished]
    value = metric.value or measures.primary.name
    unit = _unit_of(value, measures)
    within = []
    if value in (measures.primary.name, *PRIMARY_AGGREGATES):
        within = _means(rows_by_run, "std")
    values = _means(rows_by_run, value)
    return replace(entry, values=tuple(unit.of(values)), within=tuple(unit.of(within)), label=unit.label)


def _unit_of(value: str, measures: Measures) -> Unit:
    """Return the unit of a column of the evaluations' summary."""
    return Unit(measures.metric_of(value) if value in measures.aggregates else measures.primary)


def _with_costs(entry: TableEntry, metric: MetricColumn, finished: Sequence[RunResult]) -> TableEntry:
    """Return the entry with what runs spent until their target."""
    assert metric.cost is not None and metric.target is not None
    values = []
    never = 0
    for result in finished:
        model = _model(result, metric)
        if not evaluated_rows(result, metric.protocol, model).num_rows:
            continue  # the method has no such model
        value = cost_to_target(result, metric.target, metric.cost, metric.protocol, model)
        if value is None:
            never += 1
        else:
            values.append(value)
    return replace(entry, values=tuple(values), never=never, label=_COST_LABELS[metric.cost])


def last_rounds(results: Sequence[RunResult], metric: MetricColumn, last: int) -> list[float]:
    """Return a metric's mean over the last evaluated rounds of each run, in percent if it is a share.

    Empty if the metric chooses its round otherwise, or if a run was evaluated in fewer rounds.
    """
    if metric.choose != "last" or metric.cost is not None or not results:
        return []
    metric = metric.model_copy(update={"last": last})
    if any(len(_rounds(result, metric)) < last for result in results):
        return []

    return measured(results, metric)


def measured(results: Sequence[RunResult], metric: MetricColumn) -> list[float]:
    """Return a metric for each run that has it, in percent if it is a share."""
    measures = results[0].experiment.measures
    value = metric.value or measures.primary.name
    return list(_unit_of(value, measures).of(_means([_rows(result, metric) for result in results], value)))


def _with_standings(
    entries: Sequence[TableEntry],
    column: tuple[str, str, str],
    metric: MetricColumn,
    cells: Sequence[StudyCell],
    results: Mapping[int, RunResult],
) -> list[TableEntry]:
    """Return the entries, those of a column with how their methods stand among each other."""
    down, across, _ = column
    runs: dict[str, list[RunResult]] = {}
    for i, result in results.items():
        if (cells[i].down, cells[i].across) == (down, across):
            runs.setdefault(cells[i].method, []).append(result)

    scores = {}
    higher_is_better = True
    for method, method_runs in runs.items():
        if _is_untrained(method_runs[0], metric):
            continue
        measures = method_runs[0].experiment.measures
        value = metric.value or measures.primary.name
        means = [name for name, other in measures.metrics.items() if other is measures.primary or not other.added]
        if metric.target is not None or value not in (*means, "weighted"):
            # Not a mean over clients, but a cost, a deviation, a decile or a sum.
            return list(entries)
        higher_is_better = measures.metric_of(value).higher_is_better

        by_seed = {}
        for result in method_runs:
            rounds = _rounds(result, metric)
            model = _model(result, metric)
            by_seed[result.experiment.seed] = scores_of(result, metric.protocol, model, value, rounds)
        if any(len(run.values) for run in by_seed.values()):
            scores[method] = by_seed

    paired = pairing({method: runs[method] for method in scores})
    by_method = standings(scores, paired, higher_is_better=higher_is_better)
    with_standings = []
    for entry in entries:
        if (entry.down, entry.across, entry.metric) == column:
            entry = replace(entry, standing=by_method.get(entry.method))
        with_standings.append(entry)
    return with_standings


def _rounds(result: RunResult, metric: MetricColumn) -> list[int]:
    """Return the evaluated rounds over which a metric is averaged."""
    evaluated = sorted(set(result.evaluations["round"].to_pylist()))
    if metric.cost is not None and metric.budget is not None:
        spent = positions(result, metric.cost)
        evaluated = [round for round in evaluated if spent[round] <= metric.budget]
    if metric.choose == "last":
        return evaluated[-(metric.last or result.experiment.evaluation.last) :]
    if metric.choose == "validation":
        return [] if result.best_round is None else [result.best_round]
    return _best_round(result, metric, evaluated)


def _best_round(result: RunResult, metric: MetricColumn, evaluated: Sequence[int]) -> list[int]:
    """Return the evaluated round in which a metric is best, the first of equal ones; none if it has no value."""
    measures = result.experiment.measures
    value = metric.value or measures.primary.name
    value_of_round = {}
    for round in evaluated:
        for row in _rows_of_round(result, metric, round):
            if value in row and not math.isnan(row[value]):
                value_of_round[round] = row[value]

    if not value_of_round:
        return []
    best = min if measures.lower_is_better(value) else max
    return [best(value_of_round, key=value_of_round.__getitem__)]


def _model(result: RunResult, metric: MetricColumn) -> str:
    """Return the model that a metric is of."""
    if metric.model != "deployed":
        return metric.model
    rows = result.evaluations.filter((pc.field("protocol") == metric.protocol) & (pc.field("model") == "personal"))
    return "personal" if rows.num_rows else "global"


def _is_untrained(result: RunResult, metric: MetricColumn) -> bool:
    """Return whether a metric is of a global model of which a part has its initial values."""
    model = _model(result, metric)
    is_partial = model == "global" and result.experiment.method.leaves_untrained()
    return is_partial and evaluated_rows(result, metric.protocol, model).num_rows > 0


def _rows(result: RunResult, metric: MetricColumn) -> list[dict[str, Any]]:
    """Return the aggregates that a metric reads, after each of its rounds."""
    rows = []
    for round in _rounds(result, metric):
        rows += _rows_of_round(result, metric, round)
    return rows


def _rows_of_round(result: RunResult, metric: MetricColumn, round: int) -> list[dict[str, Any]]:
    model = _model(result, metric)
    return [row for row in result.summary(round) if (row["protocol"], row["model"]) == (metric.protocol, model)]


def _means(rows_by_run: Sequence[Sequence[Mapping[str, Any]]], value: str) -> list[float]:
    """Return the mean of a value over rounds, for each run that has it."""
    means = []
    for rows in rows_by_run:
        column = [row[value] for row in rows if value in row]
        if column:
            means.append(fmean(column))
    return means


def entry_rows(entries: Sequence[TableEntry]) -> list[dict[str, Any]]:
    """Return a dict for each entry, as in Parquet and JSON; shares in percent, None for missing numbers."""
    rows: list[dict[str, Any]] = []
    for entry in entries:
        row: dict[str, Any] = {
            "method": entry.method,
            "down": entry.down,
            "across": entry.across,
            "metric": entry.metric,
            "measured": entry.mean,
            "std_over_seeds": entry.over_seeds,
            "std_over_clients": entry.over_clients,
            "seeds": len(entry.values),
            "missing_seeds": entry.missing,
            "diverged_seeds": entry.diverged,
            "never_seeds": entry.never,
            "published": entry.published.value if entry.published else None,
            "published_spread": entry.published.spread if entry.published else None,
            "gap": entry.gap,
        }
        rows.append(row | standing_columns(entry.standing))
    return rows


def standing_columns(standing: Standing | None) -> dict[str, Any]:
    """Return the columns of how a method stands; None where it is unknown."""
    if standing is None:
        names = ("low", "high", "to_best", "to_best_low", "to_best_high", "chance_better", "rank")
        return dict.fromkeys([*names, "rank_low", "rank_high"])
    return {
        "low": standing.interval[0],
        "high": standing.interval[1],
        "to_best": standing.difference,
        "to_best_low": standing.difference_interval[0],
        "to_best_high": standing.difference_interval[1],
        "chance_better": standing.chance,
        "rank": standing.rank,
        "rank_low": standing.rank_interval[0],
        "rank_high": standing.rank_interval[1],
    }


def entry_table(entries: Sequence[TableEntry]) -> pa.Table:
    """Return the `entry_rows` as a table."""
    rows = entry_rows(entries)
    kinds = {"method": "string", "down": "string", "across": "string", "metric": "string"}
    kinds |= dict.fromkeys(("seeds", "missing_seeds", "diverged_seeds", "never_seeds"), "int32")
    kinds |= dict.fromkeys(("rank", "rank_low", "rank_high"), "int32")
    return pa.Table.from_pylist(rows, pa.schema([(name, kinds.get(name, "float64")) for name in rows[0]]))


def cell_table(cells: Sequence[StudyCell], results: Mapping[int, RunResult]) -> pa.Table:
    """Return a row for each finished cell, protocol and model: the aggregates, and the run that measured them."""
    aggregates: dict[str, None] = {}
    for result in results.values():
        aggregates |= dict.fromkeys(result.experiment.measures.aggregates)

    schema = pa.schema(
        [
            *((name, "string") for name in ("method", "down", "across")),
            ("seed", "int64"),
            *((name, "string") for name in ("protocol", "model")),
            *((name, "float64") for name in aggregates or Measures().aggregates),
            *(("rounds", "int32"), ("run_dir", "string"), ("weights_hash", "string")),
        ]
    )

    rows = []
    for i, result in results.items():
        run: dict[str, Any] = dict(zip(("method", "down", "across"), cells[i].position, strict=True))
        run["seed"] = cells[i].experiment.seed
        run["rounds"] = result.round
        run["run_dir"] = str(result.run_dir)
        run["weights_hash"] = result.weights_hash
        for summary in result.summary():
            rows.append(run | {name: value for name, value in summary.items() if name in schema.names})
    return pa.Table.from_pylist(rows, schema)
