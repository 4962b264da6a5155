"""What `raypfl tune` does: runs what is left of a sweep, and shows what it found."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from raypfl.common.errors import RaypflError, Stopped
from raypfl.common.stopping import interrupting, message_if_killed
from raypfl.display.console import warner
from raypfl.display.outcome import nearby, width_of
from raypfl.runs.result import Result, events_of
from raypfl.server.events import Event
from raypfl.tracking.connection import is_recorded
from raypfl.tracking.listener import MLflowListener
from raypfl.tuning.outcome import BEST, Outcome, tune
from raypfl.tuning.search import Hear
from raypfl.tuning.sweep import Sweep, load
from raypfl.tuning.trial import Trial, finished_runs

MOST_LINES = 20
"""Trials that a table shows."""


def carry_out(source: str, assignments: Sequence[str], quiet: bool, as_json: bool) -> None:
    """Run a sweep, or continue one, and show its trials, the best first.

    Raises
    ------
    ConfigError : before anything runs, if something in the sweep is wrong.
    Stopped : if it was interrupted; the text says how to continue.
    RaypflError : if no trial has a value.
    """
    sweep = load(source, assignments)
    folder = sweep.folder
    progress = Console(stderr=True)
    again = shlex.join(["raypfl", "tune", source, *assignments])
    tracked = MLflowListener(sweep.name, tags={"sweep": sweep.name}, warn=warner(progress), kept_in=folder)
    with interrupting(), message_if_killed(f"To continue: {again}"), tracked:
        children: dict[tuple[str, int], MLflowListener] = {}

        def hear(trial: str, seed: int, event: Event) -> None:
            tags = {"trial": trial, "sweep_seed": str(seed)}
            children.setdefault((trial, seed), tracked.beside(tags))(event)

        outcome = _searched(sweep, progress, quiet, hear)
        for trial, seed, run in finished_runs(sweep, folder):
            result = None if (trial, seed) in children else Result.load(run)
            if result and not is_recorded(result.experiment, run):  # the sweep was killed before that was done
                for event in events_of(result):
                    hear(trial, seed, event)
        for file in outcome.files:
            tracked.attach(file)
    if as_json:
        print(json.dumps({"sweep": sweep.name, "folder": str(folder), "trials": outcome.rows()}, indent=2))
    else:
        _print(outcome)
    if not outcome.is_complete:
        done = sum(trial.has_ended for trial in outcome.trials)
        raise Stopped(f"Stopped. {done} of {len(outcome.trials)} trials have ended. To continue: {again}")
    if outcome.best is None:
        errors = dict.fromkeys(trial.error for trial in outcome.trials if trial.error)
        raise RaypflError("\n".join(["No trial of the sweep was evaluated.", *errors]))


def _searched(sweep: Sweep, progress: Console, quiet: bool, hear: Hear) -> Outcome:
    if quiet or not progress.is_terminal:
        return tune(sweep, hear=hear, show=_lines(progress, quiet))
    with Live(console=progress, refresh_per_second=4) as live:
        return tune(sweep, hear=hear, show=lambda outcome: live.update(_table(outcome, _running_first(outcome))))


def _lines(progress: Console, quiet: bool) -> Callable[[Outcome], None]:
    told: set[str] = set()

    def show(outcome: Outcome) -> None:
        for trial in outcome.trials:
            if trial.has_ended and trial.name not in told and not quiet:
                told.add(trial.name)
                values = ", ".join(f"{name} {_number(outcome, trial, name)}" for name in trial.values)
                progress.print(Text(f"trial {trial.name}: {trial.status} after round {trial.round}  {values}"))

    return show


def _running_first(outcome: Outcome) -> list[Trial]:
    return sorted(outcome.ranked, key=lambda trial: trial.status != "running")


def _table(outcome: Outcome, trials: Sequence[Trial]) -> Table:
    units, rows = outcome.units, {row["trial"]: row for row in outcome.rows()}
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title_justify="left")
    table.title = f"{outcome.sweep.name}: {len(outcome.trials)} trials"
    for heading in ("trial", "", "round"):
        table.add_column(heading)
    for heading in (*(f"{name}{' (%)' if unit.sign else ''}" for name, unit in units.items()), *outcome.searched):
        table.add_column(heading, justify="right", overflow="fold")
    for trial in trials[:MOST_LINES]:
        settings = [_short(rows[trial.name][key]) for key in outcome.searched]
        numbers = [_number(outcome, trial, name).removesuffix(" %") for name in units]
        table.add_row(trial.name, trial.error or trial.status, str(trial.round), *numbers, *settings)
    return table


def _print(outcome: Outcome) -> None:
    console = Console()
    table = _table(outcome, outcome.ranked)
    console.print(table, width=console.width if console.is_terminal else width_of(console, table))
    if len(outcome.trials) > MOST_LINES:
        console.print(Text(f"The {MOST_LINES} best of {len(outcome.trials)} trials.", "dim"))
    if missing := outcome.never_drawn:
        console.print(Text(f"Never drawn: {', '.join(missing)}. More trials would try them.", "dim"), soft_wrap=True)
    for file in outcome.files:
        console.print(Text(str(nearby(file))), soft_wrap=True)
    if outcome.best is not None:
        console.print(Text(f"Try next: raypfl report {nearby(outcome.folder)}"), soft_wrap=True)
        console.print(Text(f"          raypfl run {nearby(outcome.folder / BEST)}"), soft_wrap=True)


def _number(outcome: Outcome, trial: Trial, name: str) -> str:
    """A metric of a trial in its unit, such as ``94.9 %``; nothing before its first evaluation."""
    unit = outcome.units[name]
    return f"{unit.text(*unit.of([trial.values[name]]))}{unit.sign}" if name in trial.values else ""


def _short(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
