"""What a command prints when its runs are over: a table, where everything is, and what to try next."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from raypfl.analysis.base import analysis_folder
from raypfl.common.packaged_yaml import is_file_name
from raypfl.common.user_code import where_defined, with_location
from raypfl.data.datasets.readers.tabular.table import Table as TableReader
from raypfl.evaluation.masking import mask_of
from raypfl.methods import METHODS
from raypfl.results.display.compare import difference_table
from raypfl.results.display.epsilons import privacy_sentence
from raypfl.results.display.fitting import width_of
from raypfl.results.display.notices import run_notices
from raypfl.results.display.plan import duration, energy
from raypfl.results.numbers import has_simulated_time, positions, prediction_traffic, seconds
from raypfl.results.pairing.differences import best_group, differences
from raypfl.results.pairing.remarks import remarks
from raypfl.results.run_groups import (
    RunGroup,
    compared,
    group_runs,
    labelled,
    methods_without_result,
    seeds_together,
    sentences_without_result,
)
from raypfl.results.setting_text import applicable_settings, setting_text
from raypfl.results.table import Column, legend, result_columns, result_rows, shared_seconds, tests_of
from raypfl.results.units import TableCell, Unit, capitalised, megabyte_digits
from raypfl.runs.result import RunResult

_BEST_NOTE = "*: in the round of each seed that was best on the clients' validation data."
_SECONDS_NOTE = "Seconds: number of rounds x median round, without evaluation."
_PREDICTION_NOTE = "{}: evaluating a client's model takes another {:,.2f} kB up and {:,.2f} kB down, on average."
_MASK_NOTES = {
    "zero": "/zero: with a logit of 0 for every class that a client's training data lack.",
    "exclude": "/exclude: predicting only classes that a client's training data have.",
}
_MEGABYTES = ("MB\nup", "MB\ndown")
_COSTS = (*_MEGABYTES, "seconds")
_NOTE_WIDTH = 78
_PLACE_WIDTH = 48  # characters; a longer label shifts only its own line


def table(results: Sequence[RunResult], without: Sequence[str] = (), fold: bool = False) -> Table:
    """Return a row for each method and protocol; the best of several methods is bold, several seeds give mean ± std.

    A method of which every run diverged or failed has a row that says so.

    Parameters
    ----------
    without : headings to leave out.
    fold : whether numbers may take several lines.
    """
    groups = group_runs(results)
    columns = []
    for column in result_columns(groups):
        if column.aggregate != "weighted" and column.heading not in without:
            columns.append(column)
    costs = [heading for heading in _COSTS if heading not in without]

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("method", min_width=_longest_word(groups), overflow="fold")
    table.add_column("tested on", no_wrap=not fold, overflow="fold")
    for heading in [*[column.heading for column in columns], *costs]:
        table.add_column(heading, justify="right", no_wrap=not fold, overflow="fold")

    mean_costs = [_mean_costs(group) for group in groups]
    digits = {heading: megabyte_digits(spent[heading] for spent in mean_costs) for heading in _MEGABYTES}

    protocols = result_rows(groups, columns)
    for i, group in enumerate(groups):
        # A group's name and costs stand in its first row only.
        name = Text(group.label, f"bold {group.colour}")
        cost_texts = [Text(f"{mean_costs[i][heading]:,.{digits.get(heading, 1)}f}") for heading in costs]
        for protocol in protocols:
            if i not in protocol.rows:
                continue
            tested_on = protocol.protocol
            if protocol.best:
                tested_on += "*"  # explained by _BEST_NOTE
            table.add_row(name, Text(tested_on), *map(_cell, protocol.rows[i]), *cost_texts)
            name = Text()
            cost_texts = []
        table.add_section()
    for label, end in methods_without_result(results).items():
        table.add_row(Text(label, "bold"), end.replace(", ", "\n").replace(" after round ", "\nafter "))
    return table


def _cell(cell: TableCell) -> Text:
    style = ""
    if cell.best:
        style = "bold"
    return Text(str(cell), style)


def _longest_word(groups: Sequence[RunGroup]) -> int:
    """Return the number of characters of the longest word in a label, which a column must not break."""
    return max(len(word) for group in groups for word in group.label.split())


def show(
    console: Console,
    results: Sequence[RunResult],
    pictures: Mapping[str, Path],
    tried: Sequence[str],
    folder: Path,
    mlflow: str = "",
    command: str = "run",
    baseline: str | None = None,
) -> None:
    """Print the tables and the findings of analyses, then where everything is and what to try next.

    Parameters
    ----------
    pictures : pictures of the comparison, by their headings.
    tried : the recipe or file that was run, and the assignments that changed it, for the commands that are suggested;
        empty: suggest none.
    command : the raypfl command with which it was run.
    folder : the run's or the comparison's.
    mlflow : how to look at the runs there; empty: they were not tracked.
    baseline : label of the method that others are compared with; None: the best one.
    """
    evaluated = compared(results)
    console.print()
    _show_notices(console, results)
    if evaluated:
        console.print(Text(setting_text(evaluated), "dim"))
        _show_table(console, evaluated)
        _show_differences(console, evaluated, baseline)
        console.print()
    show_findings(console, results, [findings(result) for result in results])

    places = [(heading, str(nearby(path))) for heading, path in pictures.items()]
    for label, result in labelled(results):
        text = f"{nearby(result.run_dir)}  weights {result.weights_hash[:12]}"
        places.append((f"{label}, seed {result.experiment.seed}", text))
    if mlflow:
        places.append(("MLflow", mlflow))
    width = min(max(len(heading) for heading, _ in places), _PLACE_WIDTH)
    _show_list(console, places, width)

    if tried:
        console.print()
        first, *further = _suggestions(results, tried, nearby(folder), command)
        _show_list(console, [("Try next", first), *(("", suggestion) for suggestion in further)], width)


def _show_notices(console: Console, results: Sequence[RunResult]) -> None:
    """Print what must be known of each run before its numbers are believed."""
    notices = []
    for label, result in labelled(results):
        notices += [(label, result, notice) for notice in run_notices(result)]
    for runs, notice in seeds_together(notices):
        console.print(Text(f"{runs}: {notice}", "bold yellow"))


def findings(result: RunResult) -> list[str]:
    """Return what the analyses of a run say when it is over."""
    lines = []
    for analysis in result.experiment.analyses:
        try:
            lines += analysis.summary(analysis_folder(result.run_dir, analysis), result.round)
        except Exception as error:  # a class of the user's own may raise anything
            lines.append(f"{where_defined(analysis.summary)} failed: {type(error).__name__}: {with_location(error)}")
    return lines


def show_findings(console: Console, results: Sequence[RunResult], lines: Sequence[Sequence[str]]) -> None:
    """Print these lines of each run below its label."""
    for (label, result), run_lines in zip(labelled(results), lines, strict=True):
        if run_lines:
            console.print(Text(f"{label}, seed {result.experiment.seed}", "bold"))
            console.print(Text("".join(f"  {line}\n" for line in run_lines)), soft_wrap=True)


def as_json(results: Sequence[RunResult], pictures: Mapping[str, Path], baseline: str | None = None) -> dict[str, Any]:
    """Return the same for programs; ``picture`` is that of the results or None, and other pictures are by heading."""
    files = {}
    for heading, path in pictures.items():
        files[heading.lower().replace(" ", "_")] = str(path)
    groups = group_runs(compared(results))
    return {
        "picture": None,
        **files,
        "runs": [_run_as_json(result) for result in results],
        "differences": [row.as_dict() for row in differences(groups, baseline)],
    }


def nearby(path: Path) -> Path:
    """Return the path from the current folder, if it is inside."""
    if path.is_relative_to(Path.cwd()):
        return path.relative_to(Path.cwd())
    return path


def _show_list(console: Console, lines: Sequence[tuple[str, str]], width: int) -> None:
    for heading, text in lines:
        console.print(Text.assemble((f"{heading:<{width}}  ", "dim"), text), soft_wrap=True)


def _show_table(console: Console, evaluated: Sequence[RunResult]) -> None:
    """Print the table, with the columns for which there is room, and what its numbers mean."""
    groups = group_runs(evaluated)
    fitting_table, left_out = _fit_table(console, evaluated, groups)
    console.print(fitting_table)
    for note in [*_table_notes(groups, left_out), *sentences_without_result(evaluated)]:
        console.print(Text(note, "dim"), width=min(_NOTE_WIDTH, console.width))


def _table_notes(groups: Sequence[RunGroup], left_out: Sequence[str]) -> list[str]:
    """Sentences for below the table, from which the columns `left_out` are missing."""
    notes = [_scores_note(groups[0].unit, left_out), *_left_out_note(left_out)]

    metrics = []
    for column in _metric_columns(groups):
        unit = Unit(groups[0].measures.metric_of(column.aggregate))
        if column.heading not in left_out and unit.metric.phrase:
            metrics.append(f"{unit.heading}: {_phrase(unit)}")
    if metrics:
        notes.append(f"{'; '.join(metrics)}, of the same models as the spread.")

    if "seconds" not in left_out:
        notes += [_SECONDS_NOTE, *shared_seconds(groups)]

    masks = dict.fromkeys(mask_of(protocol) for group in groups for protocol in group.protocols)
    for mask in masks:
        if mask:
            notes.append(_MASK_NOTES[mask])

    for group in groups:
        traffic = prediction_traffic(group)
        if traffic is not None:
            notes.append(_PREDICTION_NOTE.format(group.label, *traffic))

    notes += [_simulated_note(group) for group in groups if has_simulated_time(group)]
    notes += filter(None, map(privacy_sentence, groups))
    notes += legend(groups)
    if any(group.has_best for group in groups):
        notes.append(_BEST_NOTE)
    return notes


def _scores_note(unit: Unit, left_out: Sequence[str]) -> str:
    """Return what the scores are, and their spread."""
    metric_text = capitalised(_phrase(unit))
    if not unit.metric.higher_is_better:
        metric_text += " (lower is better)"
    note = (
        f"{metric_text}, mean over clients, of their personal models and of the global one, tested on a client's own "
        "data (local) or on everybody's (global)."
    )

    spread = [_one_line(heading) for heading in ("std", "worst\ndecile") if heading not in left_out]
    if spread:
        note += f" Spread over clients ({', '.join(spread)}): of the personal models, if there are any."
    return note


def _simulated_note(group: RunGroup) -> str:
    """Return what a method took on the clients' devices, mean over seeds."""
    seconds_taken = fmean(positions(result, "simulated_seconds")[-1] for result in group.results)
    kilojoules = fmean(positions(result, "kilojoules")[-1] for result in group.results)
    return f"{group.label} on the clients' devices, simulated: {duration(seconds_taken)}, {energy(1e3 * kilojoules)}."


def _phrase(unit: Unit) -> str:
    """Return ``"accuracy in %"``."""
    if unit.sign:
        return f"{unit.phrase} in %"
    return unit.phrase


def _one_line(heading: str) -> str:
    return heading.replace("\n", " ")


def _show_differences(console: Console, evaluated: Sequence[RunResult], baseline: str | None) -> None:
    """Print the table of paired differences between methods, if there are several, and what its numbers mean."""
    groups = group_runs(evaluated)
    rows = differences(groups, baseline)
    notes = remarks(rows, groups)
    if rows:
        fitting_table, left_out = difference_table(rows, console.width)
        console.print(fitting_table)
        notes = [*_left_out_note(left_out), *notes]
    for note in notes:
        console.print(Text(note, "dim"), width=min(_NOTE_WIDTH, console.width))


def _left_out_note(left_out: Sequence[str]) -> list[str]:
    """Return a sentence on the columns that are left out, if any are."""
    if not left_out:
        return []
    return [f"A wider terminal has room for more columns: {', '.join(map(_one_line, left_out))}."]


def _fit_table(console: Console, evaluated: Sequence[RunResult], groups: Sequence[RunGroup]) -> tuple[Table, list[str]]:
    """Return the table that fits the console, and the headings left out; names and, at last, numbers may be folded."""
    extra = {metric.name for metric in groups[0].measures.extra}
    built_in = []
    added = []
    for column in reversed(_metric_columns(groups)):
        if column.aggregate in extra:
            added.append(column.heading)
        else:
            built_in.append(column.heading)
    dispensable = [*built_in, "std", "seconds", *added, "MB\nup", "MB\ndown", "worst\ndecile"]

    longest_label = max(len(" ".join(group.label.split())) for group in groups)
    saved_by_folding = longest_label - _longest_word(groups)
    for count in range(len(dispensable) + 1):
        candidate = table(evaluated, dispensable[:count])
        width = width_of(console, candidate)
        # Names are folded once a column is left out, not before.
        if count:
            width -= saved_by_folding
        if width <= console.width:
            return candidate, dispensable[:count]
    return table(evaluated, dispensable, fold=True), dispensable


def _metric_columns(groups: Sequence[RunGroup]) -> list[Column]:
    """Return the columns of metrics other than the primary one."""
    return [column for column in result_columns(groups) if column.aggregate in groups[0].measures.metrics]


def _mean_costs(group: RunGroup) -> dict[str, float]:
    """Costs by their headings, means over the seeds."""
    megabytes_up, megabytes_down = zip(*(result.megabytes for result in group.results), strict=True)
    costs = (fmean(megabytes_up), fmean(megabytes_down), fmean(map(seconds, group.results)))
    return dict(zip(_COSTS, costs, strict=True))


def _suggestions(results: Sequence[RunResult], tried: Sequence[str], folder: Path, command: str) -> list[str]:
    """Commands to try next, none of which repeats what was run."""
    experiment = results[-1].experiment
    partition = applicable_settings(experiment).get("partition", {})

    changes = []
    keys_set = {word.partition("=")[0] for word in tried}
    is_users_partition = is_file_name(tried[0]) or keys_set & {"partition", "partition.alpha"}
    if partition.get("alpha", 0.0) > 0.1 and not is_users_partition:
        changes.append("partition.alpha=0.1")
    if len({result.experiment.seed for result in results}) < 3:
        changes.append("seeds=3")

    suggestions = [shlex.join(["raypfl", "report", str(folder)])]
    if changes:
        suggestions.append(_changed_command(command, tried, changes))
    # Where methods have rounds of their own, one number for all would end a fair comparison.
    if len({result.experiment.rounds for result in results}) == 1:
        suggestions.append(shlex.join(["raypfl", "resume", str(folder), f"rounds={2 * experiment.rounds}"]))

    best = _best_of(compared(results))
    if isinstance(experiment.data.reader, TableReader):
        run_dir = str(nearby((best or results[-1]).run_dir))
        suggestions.append(f"{shlex.join(['raypfl', 'predict', run_dir])} NEW_ROWS.csv")
    name = [] if best is None else [METHODS.name_of(type(best.experiment.method))]
    suggestions.append(shlex.join(["raypfl", "list", "methods", *name]))
    return suggestions


def _best_of(results: Sequence[RunResult]) -> RunResult | None:
    """Return the first run of the method that is best in the first test; None if there are not several."""
    groups = group_runs(results)
    best = best_group(groups, *tests_of(groups)[0]) if groups else None
    return None if best is None else best.results[0]


def _changed_command(command: str, tried: Sequence[str], changes: Sequence[str]) -> str:
    """Return the command that was given, with `changes`."""
    changed_keys = {change.partition("=")[0] for change in changes}
    words = [word for word in tried if word.partition("=")[0] not in changed_keys]
    return shlex.join(["raypfl", command, *words, *changes])


def _simulated(result: RunResult) -> dict[str, float]:
    """Time and energy of the clients' devices; empty if time was not simulated."""
    if "simulated_time" not in result.rounds.column_names:
        return {}
    return {
        "simulated_seconds": float(positions(result, "simulated_seconds")[-1]),
        "joules": 1e3 * float(positions(result, "kilojoules")[-1]),
    }


def _run_as_json(result: RunResult) -> dict[str, Any]:
    megabytes_up, megabytes_down = result.megabytes
    return {
        "experiment": result.experiment.to_dict(),
        "run_dir": str(result.run_dir),
        "status": result.status,
        "weights_hash": result.weights_hash,
        "best_round": result.best_round,
        "megabytes_up": megabytes_up,
        "megabytes_down": megabytes_down,
        "seconds": seconds(result),
        **_simulated(result),
        "notices": run_notices(result),
        "findings": findings(result),
        "summary": result.summary(),
        "summary_of_best_round": [] if result.best_round is None else result.summary(result.best_round),
    }
