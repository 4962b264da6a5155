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

from raypfl.analysis.base import Analysis, folder_of
from raypfl.common.user_code import where_defined, with_location
from raypfl.evaluation.masking import mask_of
from raypfl.results.compared import RunGroup, group_runs, labels, legend, lettered_settings, settings, shared_setting
from raypfl.results.display import paired
from raypfl.results.display.fitting import width_of
from raypfl.results.epsilons import sentence
from raypfl.results.numbers import prediction_traffic, seconds
from raypfl.results.paired import differences, remarks
from raypfl.results.table import Column, blocks, columns
from raypfl.results.units import Unit, capital
from raypfl.runs.result import RunResult

_BEST = "*: in the round that is best on the clients' validation data, of each seed."
_PREDICTION = "{}: evaluating a client's model takes another {:,.2f} kB up and {:,.2f} kB down."
_MASKED = {
    "zero": "/zero: with a logit of 0 for every class that a client's training data lack.",
    "exclude": "/exclude: predicting only classes that a client's training data have.",
}
_COSTS = ("MB\nup", "MB\ndown", "seconds")
_NOTE_WIDTH = 78


def table(results: Sequence[RunResult], without: Sequence[str] = (), fold: bool = False) -> Table:
    """A row for each method and protocol; the best of several methods is bold, and several seeds give mean ± std.

    Parameters
    ----------
    without : headings to leave out. fold : whether numbers may take several lines.
    """
    compared = group_runs(results)
    shown = [column for column in _columns(compared) if column.heading not in without]
    costs = [heading for heading in _COSTS if heading not in without]
    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    longest = max(len(word) for one in compared for word in one.label.split())
    drawn.add_column("method", min_width=longest, overflow="fold")
    drawn.add_column("tested on", no_wrap=not fold, overflow="fold")
    for heading in (*(column.heading for column in shown), *costs):
        drawn.add_column(heading, justify="right", no_wrap=not fold, overflow="fold")
    made = blocks(compared, shown)
    for i, group in enumerate(compared):
        name = Text(group.label, f"bold {group.colour}")
        spent = [Text(f"{_spent(group)[heading]:,.1f}") for heading in costs]
        for block in made:
            if i in block.rows:
                cells = [Text(str(cell), "bold" if cell.best else "") for cell in block.rows[i]]
                drawn.add_row(name, Text(f"{block.protocol}{'*' * block.best}"), *cells, *spent)
                name, spent = Text(), []
        drawn.add_section()
    return drawn


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
    """Print the tables and what analyses have found, then where things are and what to try next.

    Parameters
    ----------
    pictures : of the comparison, by their headings.
    tried : the recipe or file that was run, and the assignments that changed it, for the commands that are suggested;
        empty: suggest none.
    command : of raypfl, with which it was run.
    folder : of the run, or of the comparison.
    mlflow : how to look at the runs there; empty: they were not tracked.
    baseline : label of the method that others are compared with; None: the best one.
    """
    evaluated = [result for result in results if result.evaluations.num_rows]
    console.print()
    if evaluated:
        console.print(Text(shared_setting(evaluated), "dim"))
        _show_table(console, evaluated)
        _show_differences(console, evaluated, baseline)
        console.print()
    show_findings(console, results, [findings(result) for result in results])
    places = [(heading, str(nearby(path))) for heading, path in pictures.items()]
    for label, result in zip(labels([result.experiment for result in results]), results, strict=True):
        text = f"{nearby(result.run_dir)}  weights {result.weights_hash[:12]}"
        places.append((f"{label}, seed {result.experiment.seed}", text))
    places += [("MLflow", mlflow)] if mlflow else []
    _show_list(console, places, width := max(len(heading) for heading, _ in places))
    if tried:
        console.print()
        commands = _suggestions(results, tried, nearby(folder), command)
        _show_list(console, [("" if i else "Try next", command) for i, command in enumerate(commands)], width)


def findings(result: RunResult) -> list[str]:
    """What the analyses of a run say when it is over."""
    return [line for one in result.experiment.analyses for line in _said(one, result)]


def _said(analysis: Analysis, result: RunResult) -> list[str]:
    try:
        return analysis.summary(folder_of(result.run_dir, analysis), result.round)
    except Exception as error:  # a class of the user's own may raise anything
        return [f"{where_defined(analysis.summary)} failed: {type(error).__name__}: {with_location(error)}"]


def show_findings(console: Console, results: Sequence[RunResult], lines: Sequence[Sequence[str]]) -> None:
    """Print these lines of each run below its label."""
    for label, result, own in zip(labels([one.experiment for one in results]), results, lines, strict=True):
        if own:
            console.print(Text(f"{label}, seed {result.experiment.seed}", "bold"))
            console.print(Text("".join(f"  {line}\n" for line in own)), soft_wrap=True)


def as_json(results: Sequence[RunResult], pictures: Mapping[str, Path], baseline: str | None = None) -> dict[str, Any]:
    """The same for programs; ``picture`` is the one of results, if there is one, and others have their headings."""
    files = {heading.lower().replace(" ", "_"): str(path) for heading, path in pictures.items()}
    compared = group_runs([result for result in results if result.evaluations.num_rows])
    paired_rows = [row.as_dict() for row in differences(compared, baseline)]
    return {
        "picture": None,
        **files,
        "runs": [_run_as_json(result) for result in results],
        "differences": paired_rows,
    }


def nearby(path: Path) -> Path:
    """The path from the current folder, if it is inside."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _show_list(console: Console, lines: Sequence[tuple[str, str]], width: int) -> None:
    for heading, text in lines:
        console.print(Text.assemble((f"{heading:<{width}}  ", "dim"), text), soft_wrap=True)


def _show_table(console: Console, evaluated: Sequence[RunResult]) -> None:
    """The table, with the columns for which there is room, and what its numbers are."""
    compared = group_runs(evaluated)
    drawn, left_out = _fitting(console, evaluated, compared)
    unit = compared[0].unit
    lower = "" if unit.metric.higher_is_better else " (lower is better)"
    spread = [name.replace("\n", " ") for name in ("std", "worst\ndecile") if name not in left_out]
    notes = [
        f"{capital(unit.phrase)}{' in %' if unit.sign else ''}{lower}, mean over clients, of their personal models and "
        "of the global one, tested on a client's own data (local) or on everybody's (global)."
    ]
    if spread:
        notes[0] += f" Spread over clients ({', '.join(spread)}): of the personal models, if there are any."
    notes += _narrow(left_out)
    others = [Unit(compared[0].measures.of(c.aggregate)) for c in _others(compared) if c.heading not in left_out]
    if named := [f"{one.heading}: {one.phrase}{' in %' if one.sign else ''}" for one in others if one.metric.phrase]:
        notes.append(f"{'; '.join(named)}, of the models that the spread is of.")
    protocols = [name for one in compared for name in one.protocols]
    notes += [_MASKED[mask] for mask in dict.fromkeys(map(mask_of, protocols)) if mask]
    notes += [_PREDICTION.format(one.label, *sent) for one in compared if (sent := prediction_traffic(one))]
    notes += [f"{line}." for line in lettered_settings([result.experiment for result in evaluated])]
    notes += [text for one in compared if (text := sentence(one))]
    notes += legend(compared)
    notes += [_BEST] if any(one.has_best for one in compared) else []
    console.print(drawn)
    for note in notes:
        console.print(Text(note, "dim"), width=min(_NOTE_WIDTH, console.width))


def _show_differences(console: Console, evaluated: Sequence[RunResult], baseline: str | None) -> None:
    """The table of paired differences between methods, if there are several, and what its numbers are."""
    compared = group_runs(evaluated)
    rows = differences(compared, baseline)
    if not rows:
        return
    drawn, left_out = paired.table(rows, console.width)
    console.print(drawn)
    for note in [*_narrow(left_out), *remarks(rows, compared)]:
        console.print(Text(note, "dim"), width=min(_NOTE_WIDTH, console.width))


def _narrow(left_out: Sequence[str]) -> list[str]:
    """What to say if columns are left out."""
    names = ", ".join(heading.replace("\n", " ") for heading in left_out)
    return [f"A wider terminal has room for more columns: {names}."] if left_out else []


def _fitting(console: Console, evaluated: Sequence[RunResult], compared: Sequence[RunGroup]) -> tuple[Table, list[str]]:
    """The table that fits the console, and the headings left out; names and, last of all, numbers may be folded."""
    extra = {metric.name for metric in compared[0].measures.extra}
    others = [*reversed(_others(compared))]
    built_in, added = ([c.heading for c in others if (c.aggregate in extra) == wanted] for wanted in (False, True))
    dispensable = [*built_in, "std", "seconds", *added, "MB\nup", "MB\ndown", "worst\ndecile"]
    words = [one.label.split() for one in compared]
    folds = max(len(" ".join(label)) for label in words) - max(len(word) for label in words for word in label)
    for count in range(len(dispensable) + 1):
        drawn = table(evaluated, dispensable[:count])
        if width_of(console, drawn) - (folds if count else 0) <= console.width:
            return drawn, dispensable[:count]
    return table(evaluated, dispensable, fold=True), dispensable


def _columns(compared: Sequence[RunGroup]) -> list[Column]:
    return [column for column in columns(compared) if column.aggregate != "weighted"]


def _others(compared: Sequence[RunGroup]) -> list[Column]:
    """The columns of metrics other than the primary one."""
    return [column for column in columns(compared) if column.aggregate in compared[0].measures.metrics]


def _spent(group: RunGroup) -> dict[str, float]:
    """Means over the seeds."""
    up, down = (fmean(way) for way in zip(*(result.megabytes for result in group.results), strict=True))
    return dict(zip(_COSTS, (up, down, fmean(map(seconds, group.results))), strict=True))


def _suggestions(results: Sequence[RunResult], tried: Sequence[str], folder: Path, command: str) -> list[str]:
    """Commands that could come next, none of which repeats what was run."""
    experiment = results[-1].experiment
    changes = ["partition.alpha=0.1"] if settings(experiment).get("partition", {}).get("alpha", 0.0) > 0.1 else []
    changes += ["seeds=3"] if len({result.experiment.seed for result in results}) < 3 else []
    return [
        shlex.join(["raypfl", "report", str(folder)]),
        *([_again(command, tried, changes)] if changes else []),
        shlex.join(["raypfl", "resume", str(folder), f"rounds={2 * experiment.rounds}"]),
        "raypfl list methods",
    ]


def _again(command: str, tried: Sequence[str], changes: Sequence[str]) -> str:
    """The command that was given, with `changes`."""
    new = {change.partition("=")[0] for change in changes}
    return shlex.join(["raypfl", command, *(one for one in tried if one.partition("=")[0] not in new), *changes])


def _run_as_json(result: RunResult) -> dict[str, Any]:
    up, down = result.megabytes
    return {
        "experiment": result.experiment.to_dict(),
        "run_dir": str(result.run_dir),
        "status": result.status,
        "weights_hash": result.weights_hash,
        "best_round": result.best_round,
        "megabytes_up": up,
        "megabytes_down": down,
        "seconds": seconds(result),
        "summary": result.summary(),
        "summary_of_best_round": [] if result.best_round is None else result.summary(result.best_round),
    }
