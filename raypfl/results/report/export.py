"""The results table of a report for papers and programs: as LaTeX, and as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Any

from raypfl.results import latex
from raypfl.results.compared import RunGroup, legend, shared_setting
from raypfl.results.numbers import seconds
from raypfl.results.paired import Difference, differences, remarks
from raypfl.results.report.tables import results
from raypfl.results.table import Column, columns, tests_of
from raypfl.results.units import Cell, capital


def as_csv(parts: Sequence[tuple[Sequence[RunGroup], str | None]]) -> str:
    """A row for each setting, method and test, with numbers as they are; a part is its groups and its baseline."""
    rows = [row for compared, baseline in parts for row in _rows(compared, baseline)]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(key for row in rows for key in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def as_latex(parts: Sequence[tuple[Sequence[RunGroup], str | None]]) -> str:
    """A table for each part."""
    return "\n".join([latex.PREAMBLE, *(_latex_table(*part) for part in parts)])


def _rows(compared: Sequence[RunGroup], baseline: str | None) -> list[dict[str, Any]]:
    shown = columns(compared)
    of_row = {(row.method, row.protocol, row.best): row for row in differences(compared, baseline)}
    rows = []
    for group in compared:
        for protocol, best in tests_of(compared):
            if protocol not in group.protocols or (best and not group.has_best):
                continue
            about = {"setting": _setting(compared), "method": group.label, "tested_on": protocol}
            about |= {"round": "best by validation" if best else "last", "metric": group.unit.label}
            numbers = _numbers(group, shown, protocol, best) | _costs(group)
            rows.append(about | numbers | _paired(of_row.get((group.label, protocol, best))))
    return rows


def _numbers(group: RunGroup, shown: Sequence[Column], protocol: str, best: bool) -> dict[str, Any]:
    """Mean and standard deviation over seeds of each column, ``""`` for what there is not."""
    numbers: dict[str, Any] = {"seeds": len(group.results)}
    for column in shown:
        name = column.heading.replace("\n", "_").replace(" ", "_")
        scores = group.scores(protocol, column.model, column.aggregate, best)
        numbers[name] = fmean(scores) if scores else ""
        numbers[f"{name}_std_over_seeds"] = stdev(scores) if len(scores) > 1 else ""
    return numbers


def _costs(group: RunGroup) -> dict[str, float]:
    """Means over seeds."""
    sent = [result.megabytes for result in group.results]
    return {
        "rounds": fmean(result.round for result in group.results),
        "megabytes_up": fmean(up for up, _ in sent),
        "megabytes_down": fmean(down for _, down in sent),
        "seconds": fmean(map(seconds, group.results)),
    }


def _paired(row: Difference | None) -> dict[str, Any]:
    values = {} if row is None else row.as_dict()
    names = ("against", "difference", "low", "high", "seeds_paired", "seeds_ahead", "draws_ahead")
    return {name: "" if values.get(name) is None else values[name] for name in names}


def _latex_table(compared: Sequence[RunGroup], baseline: str | None) -> str:
    headings, blocks = results(compared)
    rows = differences(compared, baseline)
    of_row = {(row.method, row.protocol, row.best): row for row in rows}
    titled = []
    for title, protocol, best, lines in blocks:
        references = {row.baseline for row in rows if (row.protocol, row.best) == (protocol, best)}
        against = "".join(f", against {label}" for label in references)
        cells = [
            [latex.escaped(label), *map(_cell, numbers), *_ahead(of_row.get((label, protocol, best)), bool(rows))]
            for _, label, numbers in lines
        ]
        titled.append((latex.escaped(f"{capital(title)}{against}"), cells))
    named = [latex.escaped(heading) for heading in headings]
    compared_in = ["difference [95\\% interval]", "ahead in"] if rows else []
    table = latex.table(["method", *named, *compared_in], titled, _caption(compared, bool(rows)))
    return table + "".join(f"% {line}\n" for line in remarks(rows, compared))


def _ahead(row: Difference | None, wanted: bool) -> list[str]:
    if not wanted:
        return []
    if row is None or row.mean is None:
        return ["--", "--"]
    difference = f"${row.text(row.mean)}$"
    if row.low is not None and row.high is not None:
        difference += f" [${row.text(row.low)}$, ${row.text(row.high)}$]"
    return [difference, f"{row.seeds_ahead}/{len(row.by_seed)}"]


def _cell(cell: Cell) -> str:
    mean = rf"\textbf{{{cell.mean}}}" if cell.best else latex.escaped(cell.mean)
    return rf"{mean} $\pm$ {cell.spread}" if cell.spread else mean


def _caption(compared: Sequence[RunGroup], is_paired: bool) -> str:
    unit = compared[0].unit
    lines = [f"{_setting(compared)}. {capital(unit.label)}, mean over clients."]
    lines += legend(compared)
    lines += ["Differences are paired by seed and client, with 95% bootstrap intervals."] if is_paired else []
    return " ".join(lines)


def _setting(compared: Sequence[RunGroup]) -> str:
    return shared_setting([result for group in compared for result in group.results])
