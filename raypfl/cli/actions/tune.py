"""`raypfl tune`: run a sweep or continue it, and show its trials."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from raypfl.cli.actions.json_text import json_text
from raypfl.cli.messages import printing
from raypfl.common.counting import counted, series
from raypfl.common.errors import RaypflError, Stopped
from raypfl.common.stopping import message_if_killed, signals_interrupt
from raypfl.engine.events import Event, RunStarted
from raypfl.federation.method import METHODS
from raypfl.integrations.tracking.entries import searched_text
from raypfl.integrations.tracking.listener import MLflowListener
from raypfl.integrations.tracking.run_ids import is_recorded
from raypfl.integrations.tuning.result import BEST, SweepResult, tune
from raypfl.integrations.tuning.sweep import Sweep, load
from raypfl.integrations.tuning.trial import Trial, TrialListener, finished_runs
from raypfl.results.display.console import warner
from raypfl.results.display.fitting import ProgressConsole, fit_table, output
from raypfl.results.display.outcome import nearby
from raypfl.runs.records import description
from raypfl.runs.replay import events_of
from raypfl.runs.result import RunResult
from raypfl.runs.resuming import notice_of_edited_code

MOST_ROWS = 20
"""Largest number of trials in a table."""


def carry_out(source: str, assignments: Sequence[str], quiet: bool, as_json: bool) -> None:
    """Run a sweep or continue it, and show its trials, best first.

    Raises
    ------
    ConfigError : before anything runs, if the sweep has a mistake.
    Stopped : on an interruption; the message says how to continue.
    RaypflError : if no trial has a value.
    """
    sweep = load(source, assignments)
    folder = sweep.folder
    progress = ProgressConsole()
    command = shlex.join(["raypfl", "tune", source, *assignments])
    to_continue = f"To continue: {command}"
    tracked = MLflowListener(
        sweep.name, tags={"sweep": sweep.name}, warn=warner(progress), kept_in=folder, about=_about(sweep)
    )

    for _, _, run in finished_runs(sweep, folder):
        notice = notice_of_edited_code(run, description(run))
        if notice:
            warner(progress)(f"{notice} For a sweep, set another name.")
            break

    with signals_interrupt(), message_if_killed(to_continue), tracked:
        children: dict[tuple[str, int], MLflowListener] = {}

        def hear(trial: str, seed: int, event: Event) -> None:
            # A start may have other settings than the one before, under PBT.
            if isinstance(event, RunStarted):
                tags = {"trial": trial, "sweep_seed": str(seed)}
                searched = searched_text(event.experiment, [space.key for space in sweep.spaces])
                children[trial, seed] = tracked.beside(tags | ({"settings": searched} if searched else {}))
            if (trial, seed) in children:
                children[trial, seed](event)

        try:
            outcome = _run_sweep(sweep, progress, quiet, hear)
        except KeyboardInterrupt:
            # A second signal, or one before or between two trials.
            raise Stopped(f"Stopped. {to_continue}") from None
        for trial, seed, run in finished_runs(sweep, folder):
            result = None if (trial, seed) in children else RunResult.load(run)
            # A run is not recorded if the sweep was killed before that.
            if result and not is_recorded(result.experiment, run):
                for event in events_of(result):
                    hear(trial, seed, event)
        for file in outcome.files:
            tracked.attach(file)
        tracked.describe(_as_markdown(outcome), outcome.best.defined if outcome.best else {})
        tracked.conclude(outcome.status)

    with printing(command):
        if as_json:
            print(json_text({"sweep": sweep.name, "folder": str(folder), "trials": outcome.rows()}))
        else:
            _print(outcome)

    if not outcome.is_complete:
        ended = sum(trial.has_ended for trial in outcome.trials)
        raise Stopped(f"Stopped. {ended} of {len(outcome.trials)} trials have ended. {to_continue}")
    if outcome.best is None:
        errors = dict.fromkeys(trial.error for trial in outcome.trials if trial.error)
        raise RaypflError("\n".join([f"No trial of the sweep has a value of {outcome.name}.", *errors]))


def _about(sweep: Sweep) -> str:
    """Return ``"ditto by method.lam and training.lr"``: the method, unless it is searched, and what is searched."""
    searched = series(sweep.search)
    if "method" in sweep.search:
        return searched
    return f"{METHODS.name_of(type(sweep.base.method))} by {searched}"


def _run_sweep(sweep: Sweep, progress: Console, quiet: bool, hear: TrialListener) -> SweepResult:
    if quiet:
        return tune(sweep, hear=hear)
    if not progress.is_terminal:
        return tune(sweep, hear=hear, show=_lines(progress))
    with Live(console=progress, refresh_per_second=4) as live:
        return tune(
            sweep,
            hear=hear,
            show=lambda outcome: live.update(_table(progress.width, outcome, _running_first(outcome))[0]),
        )


def _lines(progress: Console) -> Callable[[SweepResult], None]:
    """Return a function that prints a line for each trial as it ends, for where there is no terminal."""
    printed: set[str] = set()
    is_announced = False

    def show(outcome: SweepResult) -> None:
        nonlocal is_announced
        if not is_announced:
            is_announced = True
            announcement = "running; a line follows as each trial ends"
            if outcome.is_complete:
                announcement = "nothing is left to run"
                printed.update(trial.name for trial in outcome.trials)
            progress.print(Text(f"{outcome.sweep.name}: {announcement}"))
        for trial in outcome.trials:
            if trial.has_ended and trial.name not in printed:
                printed.add(trial.name)
                values = ", ".join(f"{name} {_number(outcome, trial, name)}" for name in trial.values)
                progress.print(Text(f"trial {trial.name}: {trial.status} after round {trial.round}  {values}"))

    return show


def _running_first(outcome: SweepResult) -> list[Trial]:
    return sorted(outcome.ranked, key=lambda trial: trial.status != "running")


def _table(width: int, outcome: SweepResult, trials: Sequence[Trial]) -> tuple[Table, list[str]]:
    """Return a table of at most `width` characters, and the settings that it leaves out for that."""
    shown = trials[:MOST_ROWS]
    rows = {row["trial"]: row for row in outcome.rows()}

    metrics = {}
    for name, unit in outcome.units.items():
        heading = _in_two_lines(name)
        if unit.sign:
            heading += " (%)"
        metrics[heading] = [_number(outcome, trial, name).removesuffix(" %") for trial in shown]
    settings = {_in_two_lines(key): [_short(rows[trial.name][key]) for trial in shown] for key in outcome.searched}

    columns = {
        "trial": [trial.name for trial in shown],
        "status": [trial.error or trial.status for trial in shown],
        "round": [str(trial.round) for trial in shown],
        **metrics,
        **settings,
    }
    table, left_out = fit_table(width, columns, [*reversed(settings)], right=["round", *metrics, *settings])
    table.title = f"{outcome.sweep.name}: {counted(len(outcome.trials), 'trial')}"
    table.title_justify = "left"
    return table, [heading.replace("\n", "") for heading in left_out]


def _as_markdown(outcome: SweepResult) -> str:
    """Return the trials as a table in Markdown, the best first, by the metrics that the sweep compares them with.

    A table of test data, as other comparisons have, would invite readers to choose by it.
    """
    headings = ["trial", "status", "round", *outcome.units, *outcome.searched]
    lines = [f"| {' | '.join(headings)} |", f"|{':--|' * len(headings)}"]
    for trial, row in zip(outcome.ranked, outcome.rows(), strict=True):
        metrics = [_number(outcome, trial, name) for name in outcome.units]
        settings = [_short(row[key]) for key in outcome.searched]
        lines.append(f"| {' | '.join([trial.name, trial.status, str(trial.round), *metrics, *settings])} |")
    return "\n".join(lines)


def _print(outcome: SweepResult) -> None:
    console = output()
    table, left_out = _table(console.width, outcome, outcome.ranked)
    console.print(table)

    if left_out:
        names = ", ".join(reversed(left_out))
        console.print(Text(f"A wider terminal has room for more columns: {names}.", "dim"), soft_wrap=True)
    if len(outcome.trials) > MOST_ROWS:
        console.print(Text(f"The {MOST_ROWS} best of {len(outcome.trials)} trials.", "dim"))
    if outcome.never_drawn:
        values = ", ".join(outcome.never_drawn)
        console.print(Text(f"Never drawn: {values}. More trials would try them.", "dim"), soft_wrap=True)

    for file in outcome.files:
        console.print(Text(str(nearby(file))), soft_wrap=True)
    if outcome.changes:
        console.print(Text("\n".join([f"{BEST}:", *outcome.changes]), "yellow"), soft_wrap=True)
    if outcome.best is not None:
        console.print(Text(f"Try next: raypfl report {nearby(outcome.folder)}"), soft_wrap=True)
        # Of a sweep that was stopped, another configuration may turn out to be the best.
        if outcome.is_complete:
            console.print(Text(f"          raypfl run {nearby(outcome.folder / BEST)}"), soft_wrap=True)


def _in_two_lines(name: str) -> str:
    """Break the name of a metric or setting into two lines, such as ``training.`` and ``lr``."""
    return re.sub(r"([./])(?=[^./]*$)", r"\1\n", name)


def _number(outcome: SweepResult, trial: Trial, name: str) -> str:
    """Return a metric of a trial in its unit, such as ``94.9 %``: ``–`` if undefined, empty if there is none."""
    unit = outcome.units[name]
    if name not in trial.values:
        return ""
    if name not in trial.defined:
        return "–"
    (value,) = unit.of([trial.values[name]])
    return f"{unit.text(value)}{unit.sign}"


def _short(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)
