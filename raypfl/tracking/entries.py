"""What of a run goes into MLflow, in MLflow's words: names, tags, parameters, metrics, descriptions."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raypfl.config.assignments import flatten
from raypfl.results.contenders import contenders, setting, settings
from raypfl.server.events import Evaluated, RoundFinished, RunStarted

if TYPE_CHECKING:
    import pyarrow as pa

    from raypfl.config import Experiment
    from raypfl.runs import Result

LONGEST_VALUE = 5000
_MOST_ROWS = 10_000  # of a table that a browser is to show
Point = tuple[str, float, int]
"""Name, value and step of a metric."""


def name_of(experiment: Experiment) -> str:
    """What a run is called: its method, those of the options that are not the method's defaults, and its seed."""
    method: Any = experiment.method
    options = experiment.to_dict()["method"]
    defaults = {field.name: field.default for field in fields(method)}
    told = [f"{key}={value}" for key, value in options.items() if key != "name" and value != defaults[key]]
    return " ".join([options["name"].rpartition(":")[2], *told, f"s{experiment.seed}"])


def tags_of(started: RunStarted) -> dict[str, str]:
    """By which runs are searched for."""
    experiment = settings(started.experiment)
    return {
        "kind": "run",
        "name": experiment["name"],
        **{part: experiment[part]["name"] for part in ("method", "data", "partition", "model") if part in experiment},
        "seed": str(experiment["seed"]),
        "run_dir": started.run_dir,
        **flat(started.metadata, "metadata."),
    }


def params_of(experiment: Experiment) -> dict[str, str]:
    """All settings."""
    return {key: without_password(value) for key, value in flat(settings(experiment)).items()}


def description_of(started: RunStarted, run_id: str, uri: str) -> str:
    """What is read beside a run: what it is, and how one gets at its models."""
    return (
        f"{setting(started.experiment, started.metadata)}\n\n"
        "Its models, as networks that take images as they are stored:\n\n"
        "```python\n"
        "import raypfl\n\n"
        f'models = raypfl.trained_models("{run_id}", uri="{without_password(uri)}")\n'
        "models.personal_model(0), models.global_model()\n"
        "```\n"
    )


def comparison_of(results: Sequence[Result]) -> str:
    """What is read beside a comparison: the primary metric that its runs ended with, mean ± deviation over seeds."""
    compared = contenders(results)
    unit = compared[0].unit
    sign = unit.sign or f" {unit.heading}"
    headings = ("method", "tested on", *(f"{name}{sign}" for name in ("personal", "global", "worst decile")))
    lines = [setting(results[0].experiment, results[0].metadata), "", f"| {' | '.join(headings)} |"]
    lines.append("|:--|:--|--:|--:|--:|")
    for one in compared:
        for protocol in one.protocols:
            worst = one.scores(protocol, one.deployed(protocol), "worst_decile")
            means = [one.scores(protocol, model, unit.metric.name) for model in ("personal", "global")]
            cells = [unit.over_seeds(values) for values in (*means, worst)]
            lines.append(" | ".join(["", one.label, protocol, *cells, ""]).strip())
    return "\n".join(lines)


def shortened(note: str) -> str:
    """A description by whole lines, no longer than MLflow takes."""
    if len(note) <= LONGEST_VALUE:
        return note
    return note[:LONGEST_VALUE].rpartition("\n")[0] + "\n…"


def round_points(event: RoundFinished) -> Iterator[Point]:
    """A round's metrics."""
    for key, value in vars(event).items():
        if key not in ("round", "logged"):
            yield key, value, event.round
    for key, value in event.logged.values.items():
        yield f"method/{key}", value, event.round


def evaluation_points(event: Evaluated) -> Iterator[Point]:
    """An evaluation's metrics: ``accuracy/local/personal`` and so on."""
    for row in event.summary:
        for key, value in row.items():
            if key not in ("protocol", "model"):
                yield f"{key}/{row['protocol']}/{row['model']}", value, event.round


def table_of(table: pa.Table) -> dict[str, Any]:
    """A table's last rows as MLflow shows them; in its words, split."""
    last = table.slice(max(table.num_rows - _MOST_ROWS, 0)).to_pydict().values()
    rows = [[None if value != value else value for value in row] for row in zip(*last, strict=True)]
    return {"columns": table.column_names, "data": rows}


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested dicts as dotted keys and texts, which MLflow takes up to a length."""
    return {key: str(value)[:LONGEST_VALUE] for key, value in flatten(values, prefix).items()}


def database(uri: str) -> Path | None:
    """The file of a database that a process opens itself; None: a server does that."""
    file = re.match(r"sqlite(?:\+\w+)?:///([^?]+)", uri)
    return Path(file[1]) if file else None


def without_password(uri: str) -> str:
    """A URI without what stands before an @ in it."""
    return re.sub(r"//[^/@\s]*@", "//", uri)


def first_line(error: BaseException) -> str:
    """Of an error's text, as a sentence without passwords."""
    line = without_password(str(error).partition("\n")[0].strip()) or type(error).__name__
    return line if line.endswith(".") else line + "."
