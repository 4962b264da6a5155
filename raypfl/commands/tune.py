"""What `raypfl tune` does: runs what is left of a sweep, and shows what it found."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from raypfl.common.errors import RaypflError, Stopped
from raypfl.common.stopping import interrupting, message_if_killed
from raypfl.results.console import warner
from raypfl.results.outcome import nearby
from raypfl.runs import Result
from raypfl.runs.replay import events_of
from raypfl.server.events import Event
from raypfl.tracking.connection import is_recorded
from raypfl.tracking.listener import MLflowListener
from raypfl.tuning.outcome import BEST, Outcome, tune
from raypfl.tuning.search import Hear
from raypfl.tuning.spaces import shown
from raypfl.tuning.sweep import Sweep, load
from raypfl.tuning.trial import Show, Trial, finished_runs, metric_names

MOST_LINES = 12
"""Trials that are shown while a sweep runs."""


def carry_out(source: str, assignments: Sequence[str], quiet: bool, as_json: bool) -> None:
    """Run a sweep, or go on with one, and show its trials, the best first.

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
        _tell(outcome)
    if not outcome.is_complete:
        done = sum(trial.status in ("finished", "stopped", "failed") for trial in outcome.trials)
        raise Stopped(f"Stopped. {done} of {len(outcome.trials)} trials have ended. To continue: {again}")
    if outcome.best is None:
        errors = dict.fromkeys(trial.error for trial in outcome.trials if trial.error)
        raise RaypflError("\n".join(["No trial of the sweep came to an evaluation.", *errors]))


def _searched(sweep: Sweep, progress: Console, quiet: bool, hear: Hear) -> Outcome:
    if quiet or not progress.is_terminal:
        return tune(sweep, hear=hear, show=_lines(progress, quiet))
    with Live(console=progress, refresh_per_second=4) as live:
        return tune(sweep, hear=hear, show=lambda trials: live.update(_in_progress(sweep, trials)))


def _lines(progress: Console, quiet: bool) -> Show:
    told: set[str] = set()

    def show(trials: Sequence[Trial]) -> None:
        for trial in trials:
            if trial.status in ("finished", "failed") and trial.name not in told and not quiet:
                told.add(trial.name)
                values = ", ".join(f"{name} {value:.4g}" for name, value in trial.values.items())
                progress.print(Text(f"trial {trial.name}: {trial.status} after round {trial.round}  {values}"))

    return show


def _in_progress(sweep: Sweep, trials: Sequence[Trial]) -> Table:
    names, spaces = metric_names(sweep), sweep.spaces
    table = Table(
        box=box.SIMPLE_HEAD, pad_edge=False, title=f"{sweep.name}: {len(trials)} trials", title_justify="left"
    )
    for heading in ("trial", "", "round", *names, "settings"):
        table.add_column(heading)
    active = [trial for trial in trials if trial.status == "running"]
    rest = [trial for trial in reversed(trials) if trial.status != "running"]
    for trial in [*active, *rest][:MOST_LINES]:
        settings = ", ".join(f"{key}={_short(value)}" for key, value in shown(spaces, trial.drawn).items())
        values = [f"{trial.values[name]:.4g}" if name in trial.values else "" for name in names]
        table.add_row(trial.name, trial.status, str(trial.round), *values, settings)
    return table


def _tell(outcome: Outcome) -> None:
    console = Console()
    table = Table(
        box=box.SIMPLE_HEAD, pad_edge=False, title=f"{outcome.sweep.name}: the best first", title_justify="left"
    )
    names = metric_names(outcome.sweep)
    for heading in ("trial", "round", *names, *outcome.columns(), ""):
        table.add_column(heading, justify="right" if heading else "left", overflow="fold")
    for row in outcome.rows()[:20]:
        values = [_short(row[name]) for name in (*names, *outcome.columns())]
        table.add_row(row["trial"], str(row["round"]), *values, row["error"] or row["status"])
    console.print(table)
    for file in outcome.files:
        console.print(Text(str(nearby(file))), soft_wrap=True)
    if outcome.best is not None:
        console.print(Text(f"Try next: raypfl run {nearby(outcome.folder / BEST)}"), soft_wrap=True)


def _short(value: object) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
