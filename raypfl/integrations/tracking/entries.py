"""What a run becomes in MLflow: names, tags, parameters, metrics, descriptions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from math import isinf
from statistics import fmean
from typing import Any

import pyarrow as pa

from raypfl.engine.events import Evaluated, RoundFinished, RunStarted
from raypfl.evaluation.run_metrics import PRIMARY_AGGREGATES, is_tested_once
from raypfl.experiment import Experiment
from raypfl.experiment.assignments import flatten
from raypfl.integrations.tracking.connection import without_password
from raypfl.results.pairing.differences import HEADINGS, differences
from raypfl.results.pairing.remarks import remarks
from raypfl.results.run_groups import RunGroup, group_runs, sentences_without_result
from raypfl.results.setting_text import applicable_settings, setting_text
from raypfl.results.table import legend, result_columns, result_rows
from raypfl.results.units import Unit
from raypfl.runs.result import RunResult

LONGEST_VALUE = 5000
"""Characters of a tag, a parameter or a description."""

_LONGEST_NAME = 250
"""Characters of a run's name."""

_INVALID_IN_METRIC_NAMES = re.compile(r"[^\w\-. /:]")

_MOST_ROWS = 10_000
"""Rows of a table that a browser shows."""

Point = tuple[str, float, int]
"""Name, value and step of a metric."""


def run_name(experiment: Experiment, score: str = "", settings: str = "") -> str:
    """Return the name of a run: its method, its score, the options that are not at their defaults, and the seed.

    `settings` : texts such as ``method.lam=0.3``, which come at the end; options among them are not repeated.
    """
    method: Any = experiment.method
    options = experiment.to_dict()["method"]
    defaults = {field.name: field.default for field in fields(method)}
    changed = []
    for key, value in options.items():
        if key != "name" and value != defaults[key] and f" method.{key}=" not in f" {settings}":
            changed.append(f"{key}={value}")

    method_name = options["name"].rpartition(":")[2]
    return " ".join(filter(None, [method_name, score, *changed, f"s{experiment.seed}", settings]))


def searched_text(experiment: Experiment, keys: Iterable[str]) -> str:
    """Return ``"method.lam=0.3 training.lr=0.05"``: the values of searched settings, those at their defaults, too."""
    values = flatten(experiment.to_dict())
    by_key = {key: values.get(key, values.get(f"{key}.name")) for key in sorted({*keys} - {"method", "seed"})}
    return " ".join(f"{key}={value}" for key, value in by_key.items() if value is not None)


def run_score(experiment: Experiment, summary: Sequence[Mapping[str, Any]]) -> str:
    """Return the primary metric in an evaluation's summary, for the model that clients use: ``"96.9 %"``.

    Empty if it is undefined for all clients.
    """
    metric = experiment.measures.primary
    rows = [row for row in summary if row["protocol"] == summary[0]["protocol"]]
    row = next((row for row in rows if row["model"] == "personal"), rows[0])
    if metric.name not in row:
        return ""
    unit = Unit(metric)
    return _score(unit, unit.factor * row[metric.name])


def comparison_scores(results: Sequence[RunResult]) -> str:
    """Return the final scores of a comparison's methods, the best first: ``"ditto 96.9 %, fedavg 96.5 %"``.

    All are on one protocol, the first of those on which the most methods have scores; the other methods are left out.
    """
    groups = group_runs(results)
    unit = groups[0].unit
    means_by_protocol: dict[str, dict[str, float]] = {}
    for group in groups:
        for protocol in group.protocols:
            means = means_by_protocol.setdefault(protocol, {})
            scores = group.scores(protocol)
            if scores:
                means[group.label] = fmean(scores)

    means = max(means_by_protocol.values(), key=len)
    ranked = sorted(means, key=lambda label: unit.order(means[label]))
    return ", ".join(f"{label} {_score(unit, means[label])}" for label in ranked)


def _score(unit: Unit, value: float) -> str:
    return f"{unit.text(value)}{unit.sign or f' {unit.phrase}'}"


def run_tags(started: RunStarted) -> dict[str, str]:
    """Return the tags by which one can search for a run."""
    experiment = applicable_settings(started.experiment)
    parts = [part for part in ("method", "data", "partition", "model") if part in experiment]
    return {
        "kind": "run",
        "name": experiment["name"],
        **{part: experiment[part]["name"] for part in parts},
        "seed": str(experiment["seed"]),
        "run_dir": started.run_dir,
        **_texts(started.metadata, "metadata."),
    }


def run_params(experiment: Experiment) -> dict[str, str]:
    """Return all settings as texts, without passwords."""
    return {key: without_password(value) for key, value in _texts(applicable_settings(experiment)).items()}


def run_description(started: RunStarted, run_id: str, uri: str) -> str:
    """Return the description of a run: its setting, and how to load its models."""
    setting = setting_text([started])
    method = started.experiment.method
    if not started.experiment.tracking.models_mb:
        return f"{setting}\n"

    if method.has("personal_model"):
        loading = [
            "import raypfl\n",
            f'models = raypfl.trained_models("{run_id}", uri="{without_password(uri)}")',
            "models.personal_model(0)",
        ]
        if method.has("global_model"):
            loading.append("models.global_model()")
    else:
        loading = [
            "import mlflow.pytorch\n",
            f'mlflow.set_tracking_uri("{without_password(uri)}")',
            f'mlflow.pytorch.load_model("runs:/{run_id}/global_model")',
        ]
    code = "\n".join(loading)
    return f"{setting}\n\nIts models, as networks that take inputs as they are stored:\n\n```python\n{code}\n```\n"


def comparison_description(results: Sequence[RunResult], baseline: str | None = None) -> str:
    """Return the description of a comparison, as Markdown.

    It has a table of the final primary metric, mean ± deviation over seeds, and one of the paired differences to the
    baseline or, without one, to the best method.
    """
    groups = group_runs(results)
    unit = groups[0].unit
    shown_columns = [column for column in result_columns(groups) if column.aggregate in ("", "worst_decile")]
    last_round = [block for block in result_rows(groups, shown_columns) if not block.best]

    sign = unit.sign or f" {unit.heading}"
    headings = " | ".join(f"{column.heading}{sign}".replace("\n", " ") for column in shown_columns)
    lines = [setting_text(results), "", f"| method | tested on | {headings} |"]
    lines.append(f"|:--|:--|{'--:|' * len(shown_columns)}")
    for i, group in enumerate(groups):
        for block in last_round:
            if i in block.rows:
                lines.append(_table_line([group.label, block.protocol, *map(str, block.rows[i])]))

    notes = [*legend(groups), *sentences_without_result(results)]
    if notes:
        lines += ["", " ".join(notes)]
    return "\n".join([*lines, *_paired_lines(groups, baseline)])


def _paired_lines(groups: Sequence[RunGroup], baseline: str | None) -> list[str]:
    rows = [row for row in differences(groups, baseline) if not row.best]
    if not rows:
        return []

    headings = ["tested on", "method", "against", *(heading.replace("\n", " ") for heading in HEADINGS)]
    alignments = [":--"] * 3 + ["--:"] * len(HEADINGS)
    cells = [[row.protocol, row.method, row.baseline, *row.cells] for row in rows]
    table = [_table_line(line) for line in [headings, alignments, *cells]]
    return ["", *table, "", " ".join(remarks(rows, groups))]


def _table_line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def comparison_metrics(results: Sequence[RunResult], baseline: str | None = None) -> dict[str, float]:
    """Return the paired differences as metrics of a comparison's run: ``difference/local/ditto`` and so on.

    They are in the scale of the metrics of its runs: an accuracy is a share.
    """
    metrics: dict[str, float | None] = {}
    for row in differences(group_runs(results), baseline):
        suffix = f"{row.protocol}{'*' * row.best}/{row.method}"
        values = {"difference": row.mean, "difference_low": row.low, "difference_high": row.high}
        for name, value in values.items():
            metrics[f"{name}/{suffix}"] = None if value is None else value / row.unit.factor
        if row.by_seed:
            metrics[f"seeds_ahead/{suffix}"] = row.seeds_ahead
            metrics[f"draws_ahead/{suffix}"] = row.draws_ahead

    return {_INVALID_IN_METRIC_NAMES.sub("_", key): float(value) for key, value in metrics.items() if value is not None}


def short_name(name: str) -> str:
    """Return a run's name, cut to the length that MLflow takes."""
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 1]}…"


def shortened(description: str) -> str:
    """Return the first lines of a description, as many as MLflow takes."""
    if len(description) <= LONGEST_VALUE:
        return description
    return description[:LONGEST_VALUE].rpartition("\n")[0] + "\n…"


def round_points(event: RoundFinished) -> Iterator[Point]:
    """Yield a round's metrics."""
    for key, value in vars(event).items():
        if key not in ("round", "logged", "simulated"):
            yield key, value, event.round
    if event.simulated is not None:
        for key, value in vars(event.simulated).items():
            yield f"simulated/{key}", value, event.round
    for key, value in event.logged.values.items():
        yield f"method/{key}", value, event.round


def evaluation_points(event: Evaluated) -> Iterator[Point]:
    """Yield an evaluation's metrics: ``accuracy/local/personal`` and so on."""
    for row in event.summary:
        left_out = {"protocol", "model"}
        if is_tested_once(row["protocol"], row["model"]):
            left_out.update(PRIMARY_AGGREGATES)
        for key, value in row.items():
            # MLflow would show an infinite loss, of a class that is excluded, as 1.8e308.
            if key not in left_out and not isinf(value):
                yield f"{key}/{row['protocol']}/{row['model']}", value, event.round


def table_of(table: pa.Table) -> dict[str, Any]:
    """Return a table's last rows, in the format of the tables that MLflow shows."""
    last_rows = table.slice(max(table.num_rows - _MOST_ROWS, 0)).to_pydict().values()
    rows = []
    for row in zip(*last_rows, strict=True):
        rows.append([None if value != value else value for value in row])  # JSON has no NaN
    return {"columns": table.column_names, "data": rows}


def _texts(values: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Return nested dicts as dotted keys and texts, cut to the length that MLflow takes."""
    return {key: str(value)[:LONGEST_VALUE] for key, value in flatten(values, prefix).items()}
