"""The results table of a report for papers and programs: as LaTeX, and as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from raypfl.results.display import latex
from raypfl.results.numbers import has_simulated_time, positions, runs_together, seconds
from raypfl.results.pairing.differences import Difference, differences
from raypfl.results.pairing.remarks import remarks
from raypfl.results.report.parts import Part
from raypfl.results.report.tables import columns_note, result_tables
from raypfl.results.run_groups import RunGroup, methods_without_result, sentences_without_result
from raypfl.results.setting_text import setting_text
from raypfl.results.table import Column, legend, result_columns, tests_of
from raypfl.results.units import TableCell, capitalised, deviation


def as_csv(parts: Sequence[Part]) -> str:
    """Return a row for each setting, method and test, with unrounded numbers."""
    return csv_text([row for part in parts for row in _rows(part)])


def csv_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows as CSV, with a column for each key of any row; None, and what a row lacks, is an empty cell."""
    headings = list(dict.fromkeys(key for row in rows for key in row))

    text = io.StringIO()
    writer = csv.DictWriter(text, headings, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def as_latex(parts: Sequence[Part]) -> str:
    """Return a table for each part."""
    tables = []
    for number, part in enumerate(parts, start=1):
        label = "results" if len(parts) == 1 else f"results-{number}"
        tables.append(_latex_table(part, label))
    return "\n".join([latex.PREAMBLE, *tables])


def _rows(part: Part) -> list[dict[str, Any]]:
    groups = part.groups
    setting = setting_of(groups)
    columns = result_columns(groups)
    paired = {(row.method, row.protocol, row.best): row for row in differences(groups, part.reference)}

    rows = []
    for group in groups:
        for protocol, best in tests_of(groups):
            if not group.was_tested(protocol, best):
                continue
            row: dict[str, Any] = {
                "setting": setting,
                "method": group.label,
                "tested_on": protocol,
                "round": "best by validation" if best else "last",
                "metric": group.unit.label,
            }
            row |= _scores(group, columns, protocol, best)
            row |= _costs(group)
            row |= _difference(paired.get((group.label, protocol, best)))
            rows.append(row)
    for label, end in methods_without_result(part.results).items():
        rows.append({"setting": setting, "method": label, "tested_on": "", "round": end})
    return rows


def _scores(group: RunGroup, columns: Sequence[Column], protocol: str, best: bool) -> dict[str, Any]:
    """Mean and standard deviation over seeds of each column; ``""`` where there is none."""
    unfinished = sum(result.status != "finished" for result in group.results)
    numbers: dict[str, Any] = {"seeds": len(group.results), "unfinished": unfinished}
    for column in columns:
        name = column.heading.replace("\n", "_").replace(" ", "_")
        scores = group.scores(protocol, column.model, column.aggregate, best)
        numbers[name] = fmean(scores) if scores else ""
        numbers[f"{name}_std_over_seeds"] = deviation(scores) if len(scores) > 1 else ""
    return numbers


def _costs(group: RunGroup) -> dict[str, float]:
    """Means over seeds."""
    megabytes = [result.megabytes for result in group.results]
    costs = {
        "rounds": fmean(result.round for result in group.results),
        "megabytes_up": fmean(up for up, _ in megabytes),
        "megabytes_down": fmean(down for _, down in megabytes),
        "seconds": fmean(map(seconds, group.results)),
        "runs_together": runs_together(group),
    }
    if has_simulated_time(group):
        for axis in ("simulated_seconds", "kilojoules"):
            costs[axis] = fmean(float(positions(result, axis)[-1]) for result in group.results)
    return costs


def _difference(row: Difference | None) -> dict[str, Any]:
    names = ("against", "difference", "low", "high", "seeds_paired", "seeds_ahead", "draws_ahead")
    values = {} if row is None else row.as_dict()
    return {name: values.get(name) for name in names}


def _latex_table(part: Part, label: str) -> str:
    groups = part.groups
    headings, tables = result_tables(part)
    rows = differences(groups, part.reference)
    if rows and part.reference is None:
        # One baseline for the whole table: the method that is best on its first test data.
        rows = differences(groups, rows[0].baseline)
    paired = {(row.method, row.protocol, row.best): row for row in rows}

    parts = []
    for table in tables:
        lines = []
        for _, method, cells in table.lines:
            line = [latex.escaped(method), *map(_cell, cells)]
            if rows:
                line += _difference_cells(paired.get((method, table.protocol, table.best)))
            lines.append(line)
        parts.append((latex.escaped(capitalised(table.title)), lines))

    columns = ["method", *map(latex.escaped, headings)]
    if rows:
        columns += ["difference [95\\% interval]", "ahead in"]

    ends = []
    for method, end in methods_without_result(part.results).items():
        ends.append([latex.escaped(method), rf"\multicolumn{{{len(columns) - 1}}}{{l}}{{{end}}}"])
    if ends:
        parts.append(("Without a result", ends))

    text = latex.table(columns, parts, _caption(part, headings, rows[0].baseline if rows else ""), label)
    return text + "".join(f"% {line}\n" for line in remarks(rows, groups))


def _difference_cells(row: Difference | None) -> list[str]:
    if row is None or row.mean is None:
        return ["--", "--"]
    difference = latex.signed_number(row.text(row.mean))
    if row.low is not None and row.high is not None:
        low, high = (latex.signed_number(row.text(end)) for end in (row.low, row.high))
        difference += f" [{low}, {high}]"
    return [difference, f"{row.seeds_ahead}/{len(row.by_seed)}"]


def _cell(cell: TableCell) -> str:
    mean = latex.escaped(cell.mean)
    if cell.best:
        mean = rf"\textbf{{{cell.mean}}}"
    if not cell.spread:
        return mean
    return rf"{mean} $\pm$ {cell.spread}"


def _caption(part: Part, headings: Sequence[str], baseline: str) -> str:
    groups = part.groups
    sentences = [f"{setting_of(groups)}. {capitalised(groups[0].unit.label)}, mean over clients.", *part.choices]
    sentences.append(columns_note(groups[0].measures, headings))
    if not part.is_one_choice:
        sentences.append(part.bold)
    sentences += [*legend(groups), *sentences_without_result(part.results)]
    if baseline:
        sentences.append(f"Differences to {baseline} are paired by seed and client, with 95% bootstrap intervals.")
        sentences.append("Ahead in: the seeds in which a method is better than it.")
    return " ".join(filter(None, sentences))


def setting_of(groups: Sequence[RunGroup]) -> str:
    """Return data, partition and model of the groups of a part."""
    return setting_text([result for group in groups for result in group.results])
