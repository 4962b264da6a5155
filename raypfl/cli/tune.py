"""What `raypfl tune` does: runs what is left of a sweep, and shows what it found."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from raypfl.common.errors import RaypflError, Stopped
from raypfl.common.stopping import interrupting, message_if_killed
from raypfl.engine.events import Event
from raypfl.integrations.tracking.connection import is_recorded
from raypfl.integrations.tracking.listener import MLflowListener
from raypfl.integrations.tuning.result import BEST, SweepResult, tune
from raypfl.integrations.tuning.search import TrialListener
from raypfl.integrations.tuning.sweep import Sweep, load
from raypfl.integrations.tuning.trial import Trial, finished_runs
from raypfl.results.display.console import warner
from raypfl.results.display.fitting import fit_table, output
from raypfl.results.display.outcome import nearby
from raypfl.runs.result import RunResult, events_of

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
            result = None if (trial, seed) in children else RunResult.load(run)
            if result and not is_recorded(result.experiment, run):  # the sweep was killed before that was done
                for event in events_of(result):
                    hear(trial, seed, event)
        for file in outcome.files:
            tracked.attach(file)
        tracked.conclude(outcome.status)
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


def _searched(sweep: Sweep, progress: Console, quiet: bool, hear: TrialListener) -> SweepResult:
    if quiet or not progress.is_terminal:
        return tune(sweep, hear=hear, show=_lines(progress, quiet))
    with Live(console=progress, refresh_per_second=4) as live:
        return tune(
            sweep,
            hear=hear,
            show=lambda outcome: live.update(_table(progress.width, outcome, _running_first(outcome))[0]),
        )


def _lines(progress: Console, quiet: bool) -> Callable[[SweepResult], None]:
    told: set[str] = set()

    def show(outcome: SweepResult) -> None:
        for trial in outcome.trials:
            if trial.has_ended and trial.name not in told and not quiet:
                told.add(trial.name)
                values = ", ".join(f"{name} {_number(outcome, trial, name)}" for name in trial.values)
                progress.print(Text(f"trial {trial.name}: {trial.status} after round {trial.round}  {values}"))

    return show


def _running_first(outcome: SweepResult) -> list[Trial]:
    return sorted(outcome.ranked, key=lambda trial: trial.status != "running")


def _table(width: int, outcome: SweepResult, trials: Sequence[Trial]) -> tuple[Table, list[str]]:
    """At most that wide, and the settings that are left out for that."""
    shown, rows = trials[:MOST_LINES], {row["trial"]: row for row in outcome.rows()}
    metrics = {
        f"{_broken(name)}{' (%)' if unit.sign else ''}": [
            _number(outcome, trial, name).removesuffix(" %") for trial in shown
        ]
        for name, unit in outcome.units.items()
    }
    settings = {_broken(key): [_short(rows[trial.name][key]) for trial in shown] for key in outcome.searched}
    columns = {
        "trial": [trial.name for trial in shown],
        "": [trial.error or trial.status for trial in shown],
        "round": [str(trial.round) for trial in shown],
        **metrics,
        **settings,
    }
    table, left_out = fit_table(width, columns, [*reversed(settings)], right=["round", *metrics, *settings])
    table.title, table.title_justify = f"{outcome.sweep.name}: {len(outcome.trials)} trials", "left"
    return table, [heading.replace("\n", "") for heading in left_out]


def _print(outcome: SweepResult) -> None:
    console = output()
    table, left_out = _table(console.width, outcome, outcome.ranked)
    console.print(table)
    if left_out:
        names = ", ".join(reversed(left_out))
        console.print(Text(f"A wider terminal has room for more columns: {names}.", "dim"), soft_wrap=True)
    if len(outcome.trials) > MOST_LINES:
        console.print(Text(f"The {MOST_LINES} best of {len(outcome.trials)} trials.", "dim"))
    if missing := outcome.never_drawn:
        console.print(Text(f"Never drawn: {', '.join(missing)}. More trials would try them.", "dim"), soft_wrap=True)
    for file in outcome.files:
        console.print(Text(str(nearby(file))), soft_wrap=True)
    if changes := outcome.changes:
        console.print(Text("\n".join([f"{BEST}:", *changes]), "yellow"), soft_wrap=True)
    if outcome.best is not None:
        console.print(Text(f"Try next: raypfl report {nearby(outcome.folder)}"), soft_wrap=True)
        console.print(Text(f"          raypfl run {nearby(outcome.folder / BEST)}"), soft_wrap=True)


def _broken(name: str) -> str:
    """The name of a metric or setting in two lines, such as ``training.`` and ``lr``."""
    return re.sub(r"([./])(?=[^./]*$)", r"\1\n", name)


def _number(outcome: SweepResult, trial: Trial, name: str) -> str:
    """A metric of a trial in its unit, such as ``94.9 %``; nothing before its first evaluation."""
    unit = outcome.units[name]
    return f"{unit.text(*unit.of([trial.values[name]]))}{unit.sign}" if name in trial.values else ""


def _short(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
