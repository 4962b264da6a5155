"""The tables of a report: results, costs, messages, settings, runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from raypfl.config.assignments import flatten
from raypfl.evaluation.measures import Measures
from raypfl.report.labels import plain, protocol_in_words
from raypfl.results.contenders import Contender, settings
from raypfl.results.numbers import MODELS, Message, judged, messages, seconds
from raypfl.results.units import Unit, over_seeds
from raypfl.runs import Result

_ROWS = 20


@dataclass(frozen=True)
class _Column:
    """An aggregate of one of a contender's models, or of the one that clients would use."""

    heading: str
    aggregate: str
    model: str = ""
    spread: bool = False

    def values(self, contender: Contender, protocol: str, best: bool) -> list[float]:
        """One number a seed, in the metric's unit."""
        if self.aggregate not in contender.measures.aggregates:
            return []
        if self.spread:
            scores = contender.spread(protocol, self.aggregate, best)
        else:
            scores = contender.scores(protocol, self.model or contender.deployed(protocol), self.aggregate, best)
        return Unit(contender.measures.of(self.aggregate)).of(scores)


@dataclass(frozen=True)
class Cell:
    """A number as it is printed: its mean over the seeds, their standard deviation, and whether it is the best."""

    mean: str
    spread: str = ""
    best: bool = False


@dataclass(frozen=True)
class Line:
    """A contender's row."""

    index: int
    label: str
    cells: list[Cell]


@dataclass(frozen=True)
class Block:
    """The results of one protocol."""

    title: str
    lines: list[Line]


@dataclass(frozen=True)
class Setting:
    """A setting, and each of its values with the labels of the runs that have it."""

    key: str
    values: list[tuple[str, list[str]]]


def results(compared: Sequence[Contender]) -> tuple[list[str], list[Block]]:
    """Headings, and a block for each protocol in the last round and, where validation chose one, in the best round."""
    protocols = list(dict.fromkeys(name for one in compared for name in one.protocols))
    tests = [name for name in protocols if name != "val"]
    wanted = [(name, False) for name in tests]
    wanted += [(name, True) for name in tests if any(one.has_best for one in compared)]
    wanted += [(name, False) for name in protocols if name not in tests]
    columns = _columns(compared[0].measures)
    values = {
        (protocol, best, i): {column: column.values(one, protocol, best) for column in columns}
        for protocol, best in wanted
        for i, one in enumerate(compared)
        if protocol in one.protocols and (one.has_best or not best)
    }
    shown = [column for column in columns if any(row[column] for row in values.values())]
    blocks = []
    for protocol, best in wanted:
        rows = {i: values[protocol, best, i] for i in range(len(compared)) if (protocol, best, i) in values}
        title = protocol_in_words(protocol) + (", in the round that validation data chose" if best else "")
        blocks.append(Block(title, _lines(compared, rows, shown)))
    return [column.heading for column in shown], blocks


def _columns(measures: Measures) -> list[_Column]:
    primary = measures.primary.name
    return [
        _Column("personal", primary, "personal"),
        _Column("global", primary, "global"),
        _Column("std", "std", spread=True),
        _Column("worst decile", "worst_decile", spread=True),
        _Column("by samples", "weighted", spread=True),
        *(_Column(Unit(metric).heading, metric.name) for metric in measures.others if metric.shown),
    ]


def costs(compared: Sequence[Contender]) -> list[Line]:
    """Rounds, megabytes up and down, seconds, seconds a round, over seeds."""
    return [Line(i, one.label, [_spent(*cost) for cost in _costs(one)]) for i, one in enumerate(compared)]


def course(compared: Sequence[Contender], protocol: str) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """Headings, and the values that curves have, in about twenty rounds."""
    found = {
        f"{one.label}, {model}": dict(zip(curve.x.astype(int).tolist(), curve.mean.tolist(), strict=True))
        for one in compared
        for model in MODELS
        if (curve := judged(one, protocol, model))
    }
    rounds = sorted(set().union(*found.values()))
    digits = compared[0].unit.digits(value for one in found.values() for value in one.values())
    chosen = dict.fromkeys([*rounds[:: max(len(rounds) // _ROWS, 1)], *rounds[-1:]])
    rows = [(number, [f"{c[number]:.{digits}f}" if number in c else "–" for c in found.values()]) for number in chosen]
    return list(found), rows


def ledger(compared: Sequence[Contender]) -> list[tuple[int, str, list[tuple[Message, float]]]]:
    """For each contender its messages, each with its share of the megabytes of the contender that sends most."""
    found = [messages(one) for one in compared]
    most = max((sum(message.megabytes for message in one) for one in found), default=0) or 1
    return [
        (i, one.label, [(message, message.megabytes / most) for message in sent])
        for i, (one, sent) in enumerate(zip(compared, found, strict=True))
    ]


def differences(compared: Sequence[Contender]) -> tuple[list[Setting], list[tuple[str, str]]]:
    """Settings in which runs differ, beside method and seed, and those that all runs share."""
    runs = _named(compared)
    return _settled([(label, flatten(settings(result.experiment))) for label, result in runs], ("method.name", "seed"))


def environment(compared: Sequence[Contender]) -> tuple[list[Setting], list[tuple[str, str]]]:
    """What the runs found out as they began: where that differs, and what they share."""
    return _settled([(label, flatten(result.metadata)) for label, result in _named(compared)], ("data",))


def _lines(
    compared: Sequence[Contender], rows: Mapping[int, Mapping[_Column, list[float]]], shown: Sequence[_Column]
) -> list[Line]:
    measures = compared[0].measures
    told = {column: [row[column] for row in rows.values() if row[column]] for column in shown}
    digits = {
        column: Unit(measures.of(column.aggregate)).digits(value for some in told[column] for value in some)
        for column in shown
    }
    best = {column: _best(told[column], digits[column], measures.lower_is_better(column.aggregate)) for column in shown}
    return [
        Line(i, compared[i].label, [_cell(row[column], digits[column], best[column]) for column in shown])
        for i, row in rows.items()
    ]


def _best(rivals: Sequence[list[float]], digits: int, lower: bool) -> str | None:
    """The best mean as it is printed, so that equals all count; None: there is nothing to win."""
    if len(rivals) < 2:
        return None
    return f"{(min if lower else max)(map(fmean, rivals)):.{digits}f}"


def _cell(values: Sequence[float], digits: int = 1, best: str | None = None) -> Cell:
    mean, _, spread = over_seeds(values, digits).partition("±")
    return Cell(f"{fmean(values):,.{digits}f}" if values else mean, spread, bool(values) and mean == best)


def _spent(values: Sequence[float], digits: int) -> Cell:
    cell = _cell(values, digits)
    return Cell(cell.mean) if len(set(values)) == 1 else cell


def _costs(contender: Contender) -> list[tuple[list[float], int]]:
    runs = contender.results
    up, down = zip(*(result.megabytes for result in runs), strict=True)
    took = [seconds(result) for result in runs]
    each = [spent / max(result.round, 1) for spent, result in zip(took, runs, strict=True)]
    rounds = [float(result.round) for result in runs]
    return [(rounds, 0 if len(set(rounds)) == 1 else 1), (list(up), 1), (list(down), 1), (took, 1), (each, 3)]


def _named(compared: Sequence[Contender]) -> list[tuple[str, Result]]:
    """Runs with their contender's label, and the seed where there are several."""
    return [(one.label, result) for one in compared for result in one.results]


def _settled(
    runs: Sequence[tuple[str, Mapping[str, Any]]], hidden: Sequence[str]
) -> tuple[list[Setting], list[tuple[str, str]]]:
    differing: list[Setting] = []
    shared: list[tuple[str, str]] = []
    for key in dict.fromkeys(key for _, values in runs for key in values if key not in hidden):
        holders: dict[str, list[str]] = {}
        for label, values in runs:
            holders.setdefault(plain(values[key]) if key in values else "", []).append(label)
        if len(holders) == 1:
            shared.append((key, next(iter(holders))))
        else:
            kept = [(value, _counted(labels, runs)) for value, labels in holders.items() if value]
            differing.append(Setting(key, kept))
    return differing, shared


def _counted(labels: Sequence[str], runs: Sequence[tuple[str, Any]]) -> list[str]:
    """Labels once each, with the number of runs where it is not all of that label."""
    every = [label for label, _ in runs]
    counts = {label: (labels.count(label), every.count(label)) for label in labels}
    return [label if some == all_ else f"{label} ({some} of {all_} runs)" for label, (some, all_) in counts.items()]
