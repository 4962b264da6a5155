"""The tables of a report: results, costs, messages, what methods logged, settings, runs."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from raypfl.experiment.assignments import flatten
from raypfl.results.compared import RunGroup, settings
from raypfl.results.numbers import Message, messages, metric_curves, seconds
from raypfl.results.paired import Difference
from raypfl.results.table import blocks, columns
from raypfl.results.units import Cell, over_seeds

_PROTOCOLS = {
    "local": "each client’s own test data",
    "val": "each client’s own validation data",
    "train": "each client’s own training data",
    "global": "all clients’ test data together",
    "pm_v": "all clients’ test data, only the client’s classes counting",
    "pm_l": "all clients’ test data, classes weighted as the client has them",
    "unseen": "the own test data of clients that were never trained",
}

_MASKED = {
    "": "",
    "zero": ", with the logits of classes that a client lacks set to zero",
    "exclude": ", with the classes that a client lacks excluded",
}


def protocol_name(protocol: str) -> str:
    """The test data of a protocol."""
    kind, _, rest = protocol.partition("/")
    if rest.startswith("corrupt/"):
        name, _, severity = rest.removeprefix("corrupt/").partition("/")
        strength = f"severity {severity}" if severity else "all severities"
        return f"all clients’ test data, corrupted: {name.replace('_', ' ')}, {strength}"
    if kind == "ood":
        return f"the pool {rest}"
    return _PROTOCOLS.get(kind, kind) + _MASKED[rest]


def test_name(protocol: str, best: bool) -> str:
    """The test data of a protocol and, if `best`, that the models are those of the round that validation data chose."""
    return protocol_name(protocol) + (", in the round that validation data chose" if best else "")


def as_yaml(value: Any) -> str:
    """A setting, as YAML has it."""
    if value is None or isinstance(value, bool):
        return {None: "none", True: "true", False: "false"}[value]
    return ", ".join(map(as_yaml, value)) or "none" if isinstance(value, list) else str(value)


def listed(names: Sequence[str]) -> str:
    """``a, b and c``."""
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


_CURVE_ROWS = 20
_LOGGED_ROWS = 20


Line = tuple[int, str, list[Cell]]
"""A group's row: its index, its label and its cells."""
Block = tuple[str, str, bool, list[Line]]
"""A title, its protocol, whether in the round that validation data chose, and lines."""
Setting = tuple[str, list[tuple[str, list[str]]]]
"""A setting, and each of its values with the labels of the runs that have it."""


@dataclass(frozen=True)
class Logged:
    """What the first seed's last round logged under a name: the first rows of a table, or an image as a URI.

    Attributes
    ----------
    index, label : of the group. more : rows that are left out.
    """

    index: int
    label: str
    name: str
    round: int
    headings: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    more: int = 0
    image: str = ""


def results(compared: Sequence[RunGroup]) -> tuple[list[str], list[Block]]:
    """Headings, and a block for each protocol; of columns, those in which anybody has a number."""
    shown = columns(compared)
    made = blocks(compared, shown)
    filled = [j for j in range(len(shown)) if any(row[j].mean != "–" for one in made for row in one.rows.values())]
    titled: list[Block] = []
    for block in made:
        lines = [(i, compared[i].label, [cells[j] for j in filled]) for i, cells in block.rows.items()]
        titled.append((test_name(block.protocol, block.best), block.protocol, block.best, lines))
    return [shown[j].heading.replace("\n", " ") for j in filled], titled


def costs(compared: Sequence[RunGroup]) -> list[Line]:
    """Rounds, megabytes up and down, seconds, seconds a round, seconds to start, over seeds."""
    lines = []
    for i, one in enumerate(compared):
        rounds = [result.round for result in one.results]
        up, down = zip(*(result.megabytes for result in one.results), strict=True)
        took = [seconds(result) for result in one.results]
        each = [spent / max(count, 1) for spent, count in zip(took, rounds, strict=True)]
        startup = [result.metadata["startup_seconds"] for result in one.results]
        numbers = ((rounds, 0 if len(set(rounds)) == 1 else 1), (up, 1), (down, 1), (took, 1), (each, 3), (startup, 1))
        # Equal costs of all seeds have no deviation that is worth its place.
        cells = [over_seeds(values if len(set(values)) > 1 else values[:1], digits) for values, digits in numbers]
        lines.append((i, one.label, cells))
    return lines


def paired(
    compared: Sequence[RunGroup], rows: Sequence[Difference]
) -> list[tuple[str, list[tuple[int, str, Difference]]]]:
    """For each test and baseline a title, and the differences with the index and label of their method."""
    index = {group.label: i for i, group in enumerate(compared)}
    titled: dict[str, list[tuple[int, str, Difference]]] = {}
    for row in rows:
        title = f"{test_name(row.protocol, row.best)}, against {row.baseline}"
        titled.setdefault(title, []).append((index[row.method], row.method, row))
    return list(titled.items())


def curve_values(compared: Sequence[RunGroup], protocol: str) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """Headings, and the values of the curves in about twenty rounds."""
    found = {
        f"{compared[i].label}, {model}": dict(zip(curve.x.astype(int).tolist(), curve.mean.tolist(), strict=True))
        for (i, model), curve in metric_curves(compared, protocol).items()
    }
    rounds = sorted(set().union(*found.values()))
    digits = compared[0].unit.digits(value for one in found.values() for value in one.values())
    chosen = dict.fromkeys([*rounds[:: max(len(rounds) // _CURVE_ROWS, 1)], *rounds[-1:]])
    rows = [(number, [f"{c[number]:.{digits}f}" if number in c else "–" for c in found.values()]) for number in chosen]
    return list(found), rows


def ledger(compared: Sequence[RunGroup]) -> list[tuple[int, str, list[tuple[Message, float]]]]:
    """For each group its messages, each with its share of the megabytes of the group that sends most."""
    found = [messages(one) for one in compared]
    most = max((sum(message.megabytes for message in one) for one in found), default=0) or 1
    return [
        (i, one.label, [(message, message.megabytes / most) for message in sent])
        for i, (one, sent) in enumerate(zip(compared, found, strict=True))
    ]


def logged(compared: Sequence[RunGroup]) -> tuple[list[Logged], list[Logged]]:
    """Each method's tables, and its images."""
    tables = [
        _excerpt(i, one.label, name, table)
        for i, one in enumerate(compared)
        for name, table in one.results[0].analysis.items()
    ]
    last = {(i, row["name"]): row for i, one in enumerate(compared) for row in one.results[0].images.to_pylist()}
    images = [
        Logged(i, compared[i].label, name, row["round"], image=as_uri(Path(row["file"])))
        for (i, name), row in last.items()
    ]
    return tables, images


def differences(compared: Sequence[RunGroup]) -> tuple[list[Setting], list[tuple[str, str]]]:
    """Settings in which runs differ, other than method and seed, and those that all runs share.

    An option that only some methods have, and that is at its default, is no difference.
    """
    runs = [(one.label, flatten(settings(result.experiment))) for one in compared for result in one.results]
    methods: list[Any] = [one.results[0].experiment.method for one in compared]
    defaults = {f"method.{field.name}": field.default for method in methods for field in fields(method)}
    differing, shared = _compare(runs, ("method.name", "seed"))
    usual = {key: text for key, [(text, _), *more] in differing if not more and text == as_yaml(defaults.get(key))}
    return [one for one in differing if one[0] not in usual], shared + list(usual.items())


def environment(compared: Sequence[RunGroup]) -> tuple[list[Setting], list[tuple[str, str]]]:
    """Device, executor, versions and so on: those in which runs differ, and those that all runs share."""
    return _compare(
        [(one.label, flatten(result.metadata)) for one in compared for result in one.results],
        ("data", "startup_seconds"),
    )


def _excerpt(i: int, label: str, name: str, table: pa.Table) -> Logged:
    last = pc.max(table["round"]).as_py()
    rows = table.filter(pc.field("round") == last).drop_columns(["round"])
    shown = [
        [f"{value:.4g}" if isinstance(value, float) else str(value) for value in row.values()]
        for row in rows.slice(0, _LOGGED_ROWS).to_pylist()
    ]
    return Logged(i, label, name, last, rows.column_names, shown, rows.num_rows - len(shown))


def as_uri(file: Path) -> str:
    """A PNG file as text that an ``img`` element takes."""
    return f"data:image/png;base64,{base64.b64encode(file.read_bytes()).decode()}"


def _compare(
    runs: Sequence[tuple[str, Mapping[str, Any]]], hidden: Sequence[str]
) -> tuple[list[Setting], list[tuple[str, str]]]:
    differing: list[Setting] = []
    shared: list[tuple[str, str]] = []
    for key in dict.fromkeys(key for _, values in runs for key in values if key not in hidden):
        holders: dict[str, list[str]] = {}
        for label, values in runs:
            holders.setdefault(as_yaml(values[key]) if key in values else "", []).append(label)
        if len(holders) == 1:
            shared.append((key, next(iter(holders))))
        else:
            kept = [(value, _counted(labels, runs)) for value, labels in holders.items() if value]
            differing.append((key, kept))
    return differing, shared


def _counted(labels: Sequence[str], runs: Sequence[tuple[str, Any]]) -> list[str]:
    """Labels once each, with the number of runs where it is not all of that label."""
    every = [label for label, _ in runs]
    counts = {label: (labels.count(label), every.count(label)) for label in labels}
    return [label if some == all_ else f"{label} ({some} of {all_} runs)" for label, (some, all_) in counts.items()]
