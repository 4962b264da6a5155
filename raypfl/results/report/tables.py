"""The tables of a report: results, costs, messages, what methods logged, settings, runs."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import fmean
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from raypfl.common.counting import series
from raypfl.evaluation.run_metrics import Measures
from raypfl.experiment.assignments import flatten
from raypfl.results.numbers import MessageCost, messages, metric_curves, runs_together, seconds
from raypfl.results.pairing.differences import Difference
from raypfl.results.report.parts import Part
from raypfl.results.run_groups import RunGroup
from raypfl.results.setting_text import applicable_settings, component_text, options_at_default
from raypfl.results.table import result_columns, result_rows
from raypfl.results.units import TableCell, Unit, capitalised, megabyte_digits, number_text, over_seeds

_MOST_ROUNDS = 20  # in the table of the curves' values
_MOST_LOGGED_ROWS = 20

_PROTOCOLS = {
    "local": "each client’s own test data",
    "val": "each client’s own validation data",
    "train": "each client’s own training data",
    "global": "all clients’ test data together",
    "pm_v": "all clients’ test data, only the client’s classes counting",
    "pm_l": "all clients’ test data, classes weighted as the client has them",
    "unseen": "the own test data of clients that were never trained",
    "backdoor": "each client’s own test data with the attack’s trigger",
}

_MASKS = {
    "": "",
    "zero": ", with the logits of classes that a client lacks set to zero",
    "exclude": ", with the classes that a client lacks excluded",
}


Line = tuple[int, str, list[TableCell]]
"""A group's row: its index, its label and its cells."""
SettingValues = tuple[str, list[tuple[str, list[str]]]]
"""A setting, and each of its values with the labels of the runs that have it."""


@dataclass(frozen=True)
class ProtocolTable:
    """The part of the results table on one protocol.

    Attributes
    ----------
    best : whether the models are from the round that validation data chose.
    """

    title: str
    protocol: str
    best: bool
    lines: list[Line]


@dataclass(frozen=True)
class LoggedExcerpt:
    """What a seed logged last under a name: the first rows of a table, or an image as a URI.

    Attributes
    ----------
    index, label : index and label of the group.
    more : the number of rows that are left out.
    """

    index: int
    label: str
    seed: int
    name: str
    round: int
    headings: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    more: int = 0
    image: str = ""


def protocol_name(protocol: str) -> str:
    """Return the test data of a protocol in words."""
    kind, _, rest = protocol.partition("/")
    if rest.startswith("corrupt/"):
        name, _, severity = rest.removeprefix("corrupt/").partition("/")
        strength = f"severity {severity}" if severity else "all severities"
        return f"all clients’ test data, corrupted: {name.replace('_', ' ')}, {strength}"
    if kind == "ood":
        return f"the pool {rest}"
    return _PROTOCOLS.get(kind, kind) + _MASKS[rest]


def test_name(protocol: str, best: bool) -> str:
    """Return the test data of a protocol in words, with whether validation data chose the round of the models."""
    if best:
        return f"{protocol_name(protocol)}, in the round that validation data chose"
    return protocol_name(protocol)


def as_yaml(value: Any) -> str:
    """Return a setting as YAML has it."""
    if value is None:
        return "none"
    if value == "":
        return '""'
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return ", ".join(map(as_yaml, value)) or "none"
    if isinstance(value, Mapping):
        return component_text(value)
    return str(value)


def result_tables(part: Part) -> tuple[list[str], list[ProtocolTable]]:
    """Return headings, and a table for each protocol; columns without any number are left out."""
    groups = part.groups
    columns = result_columns(groups)
    results = result_rows(groups, columns, part.candidates)

    rows = [cells for protocol in results for cells in protocol.rows.values()]
    filled = []
    for j in range(len(columns)):
        if any(cells[j].mean != "–" for cells in rows):
            filled.append(j)

    tables = []
    for protocol in results:
        lines = []
        for i, cells in protocol.rows.items():
            lines.append((i, groups[i].label, [cells[j] for j in filled]))
        title = test_name(protocol.protocol, protocol.best)
        tables.append(ProtocolTable(title, protocol.protocol, protocol.best, lines))
    return [columns[j].heading.replace("\n", " ") for j in filled], tables


def columns_note(measures: Measures, headings: Sequence[str]) -> str:
    """Return sentences on those columns of results that are neither of the personal nor of the global models alone."""
    spread = [name for name in ("std", "worst decile") if name in headings]
    subjects = ["they"] if spread else []
    for metric in measures.secondary:
        unit = Unit(metric)
        if metric.phrase and unit.heading in headings:
            subjects.append(f"the {unit.phrase.removeprefix('the ')} ({unit.heading})")
    if "by samples" in headings:
        subjects.append("the mean by samples")

    sentences = []
    if spread:
        sentences.append(f"{capitalised(series(spread))} {'is' if len(spread) == 1 else 'are'} over clients.")
    if subjects:
        models = "of the personal models where a method makes them, else of the global one"
        is_one = len(subjects) == 1 and not spread
        sentences.append(f"{capitalised(series(subjects))} {'is' if is_one else 'are'} {models}.")
    return " ".join(sentences)


def costs(groups: Sequence[RunGroup]) -> list[Line]:
    """Return rounds, megabytes up and down, seconds, seconds a round and seconds to start, over seeds.

    Runs that advanced together share what was trained at once, so their seconds have no deviation.
    """
    megabytes = [result.megabytes for group in groups for result in group.results]
    up_digits, down_digits = map(megabyte_digits, zip(*megabytes, strict=True))
    lines = []
    for i, group in enumerate(groups):
        rounds = [result.round for result in group.results]
        up, down = zip(*(result.megabytes for result in group.results), strict=True)
        duration = [seconds(result) for result in group.results]
        a_round = [spent / max(count, 1) for spent, count in zip(duration, rounds, strict=True)]
        startup = [result.metadata["startup_seconds"] for result in group.results]

        # A mean of different numbers of rounds is no whole number.
        round_digits = 0
        if len(set(rounds)) > 1:
            round_digits = 1

        costs_of_seeds = [(rounds, round_digits), (up, up_digits), (down, down_digits)]
        if runs_together(group) > 1:
            duration = [fmean(duration)]
            a_round = [fmean(a_round)]
        columns = [*costs_of_seeds, (duration, 1), (a_round, 3), (startup, 1)]
        cells = []
        for values, digits in columns:
            # If all seeds cost the same, a deviation of 0 is not worth its place.
            if len(set(values)) == 1:
                cells.append(over_seeds(values[:1], digits))
            else:
                cells.append(over_seeds(values, digits))
        lines.append((i, group.label, cells))
    return lines


def difference_tables(
    groups: Sequence[RunGroup], rows: Sequence[Difference]
) -> list[tuple[str, list[tuple[int, str, Difference]]]]:
    """Return a title for each test and baseline, and the differences with the index and label of their method."""
    index = {group.label: i for i, group in enumerate(groups)}
    by_title: dict[str, list[tuple[int, str, Difference]]] = {}
    for row in rows:
        title = f"{test_name(row.protocol, row.best)}, against {row.baseline}"
        by_title.setdefault(title, []).append((index[row.method], row.method, row))
    return list(by_title.items())


def curve_values(groups: Sequence[RunGroup], protocol: str) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """Return headings, and the values of the curves in about twenty rounds."""
    curves: dict[str, dict[int, float]] = {}
    for (i, model), curve in metric_curves(groups, protocol).items():
        points = zip(curve.x.astype(int).tolist(), curve.mean.tolist(), strict=True)
        curves[f"{groups[i].label}, {model}"] = dict(points)

    rounds = sorted(set().union(*curves.values()))
    chosen = dict.fromkeys([*rounds[:: max(len(rounds) // _MOST_ROUNDS, 1)], *rounds[-1:]])
    digits = groups[0].unit.digits(value for curve in curves.values() for value in curve.values())

    rows = []
    for round in chosen:
        values = []
        for by_round in curves.values():
            if round in by_round:
                values.append(number_text(by_round[round], digits))
            else:
                values.append("–")
        rows.append((round, values))
    return list(curves), rows


def ledger(groups: Sequence[RunGroup]) -> list[tuple[int, str, list[tuple[MessageCost, float]]]]:
    """Return each group's messages, each with its size as a share of the traffic of the group that sends most."""
    by_group = [messages(group) for group in groups]
    most = 0.0
    for group_messages in by_group:
        most = max(most, sum(message.megabytes for message in group_messages))

    lines = []
    for i, (group, group_messages) in enumerate(zip(groups, by_group, strict=True)):
        shares = [(message, message.megabytes / (most or 1)) for message in group_messages]
        lines.append((i, group.label, shares))
    return lines


def logged(groups: Sequence[RunGroup]) -> tuple[list[LoggedExcerpt], list[LoggedExcerpt]]:
    """Return the tables and the images of each method's first seed that logged any."""
    tables = []
    images = []
    for i, group in enumerate(groups):
        results = [result for result in group.results if result.analysis or result.images.num_rows]
        for result in results[:1]:
            seed = result.experiment.seed
            for name, table in result.analysis.items():
                tables.append(_excerpt(i, group.label, seed, name, table))

            last_images = {row["name"]: row for row in result.images.to_pylist()}
            for name, row in last_images.items():
                images.append(LoggedExcerpt(i, group.label, seed, name, row["round"], image=as_uri(Path(row["file"]))))
    return tables, images


def compare_settings(
    groups: Sequence[RunGroup],
) -> tuple[list[SettingValues], list[tuple[str, str]], list[SettingValues]]:
    """Return settings in which runs differ, other than method, seed and folder, and those that all runs share.

    The third list is of options that only some methods or networks have, all at their default, which do not count as
    differences.
    """
    runs = []
    defaults: dict[str, Any] = {}
    for group in groups:
        for result in group.results:
            settings = flatten(applicable_settings(result.experiment))
            runs.append((group.label, settings))
            for name in options_at_default(result.experiment.model):
                defaults[f"model.{name}"] = settings.get(f"model.{name}")
        method: Any = group.results[0].experiment.method
        defaults |= {f"method.{field.name}": field.default for field in fields(method)}

    differing, shared = _compare(runs, ("method.name", "seed", "output"))
    different = []
    at_default = []
    for key, values in differing:
        text, _ = values[0]
        if len(values) == 1 and text == as_yaml(defaults.get(key)):
            at_default.append((key, values))
        else:
            different.append((key, values))
    return different, shared, at_default


def compare_environments(groups: Sequence[RunGroup]) -> tuple[list[SettingValues], list[tuple[str, str]]]:
    """Return device, executor, versions and so on: those in which runs differ, and those that all runs share."""
    runs = [(group.label, flatten(result.metadata)) for group in groups for result in group.results]
    return _compare(runs, ("data", "startup_seconds"))


def _excerpt(index: int, label: str, seed: int, name: str, table: pa.Table) -> LoggedExcerpt:
    last_round = pc.max(table["round"]).as_py()
    rows = table.filter(pc.field("round") == last_round).drop_columns(["round"])

    lines = []
    for row in rows.slice(0, _MOST_LOGGED_ROWS).to_pylist():
        lines.append([_logged_text(value) for value in row.values()])
    return LoggedExcerpt(index, label, seed, name, last_round, rows.column_names, lines, rows.num_rows - len(lines))


def _logged_text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)


def as_uri(file: Path) -> str:
    """Return a PNG file as text for the ``src`` of an ``img`` element."""
    return f"data:image/png;base64,{base64.b64encode(file.read_bytes()).decode()}"


def _compare(
    runs: Sequence[tuple[str, Mapping[str, Any]]], hidden: Sequence[str]
) -> tuple[list[SettingValues], list[tuple[str, str]]]:
    """The values in which runs differ, and those that all share; each run is its label and its values."""
    differing: list[SettingValues] = []
    shared: list[tuple[str, str]] = []
    for key in dict.fromkeys(key for _, values in runs for key in values):
        if key in hidden:
            continue

        labels_by_value: dict[str, list[str]] = {}
        having = [(label, values[key]) for label, values in runs if key in values]
        for label, value in having:
            labels_by_value.setdefault(as_yaml(value), []).append(label)

        if len(labels_by_value) == 1 and len(having) == len(runs):
            shared.append((key, next(iter(labels_by_value))))
            continue
        by_value = [(value, _with_counts(labels, runs)) for value, labels in labels_by_value.items()]
        differing.append((key, by_value))
    return differing, shared


def _with_counts(labels: Sequence[str], runs: Sequence[tuple[str, Any]]) -> list[str]:
    """Each label once; if not all of its runs are meant, with their number."""
    labels_of_runs = [label for label, _ in runs]
    texts = []
    for label in dict.fromkeys(labels):
        count = labels.count(label)
        total = labels_of_runs.count(label)
        if count == total:
            texts.append(label)
        else:
            texts.append(f"{label} ({count} of {total} runs)")
    return texts
