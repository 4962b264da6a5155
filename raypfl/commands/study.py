"""What `raypfl study` does: plans the cells, runs those that are left, and tells what came of them."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from rich.text import Text

from raypfl.common.errors import RaypflError, Stopped
from raypfl.common.files import draft, write
from raypfl.common.last_words import last_words
from raypfl.common.stopping import interrupting
from raypfl.results.console import view, warner
from raypfl.results.contenders import colour
from raypfl.results.outcome import nearby
from raypfl.results.progress import RunLine
from raypfl.runs import Result
from raypfl.runs.result import is_finished
from raypfl.server.events import Event
from raypfl.studies import layout
from raypfl.studies.cells import Cell, choose, plan
from raypfl.studies.description import Study, load
from raypfl.studies.deviations import deviations
from raypfl.studies.measured import Entry, as_rows, cell_table, entries, entry_table
from raypfl.studies.picture import draw
from raypfl.studies.running import run
from raypfl.studies.workers import FAILED, FINISHED, STOPPED, Outcome
from raypfl.tracking.listener import MLflowListener

FILES = ("table.md", "table.parquet", "cells.parquet", "table.png")


@dataclass(frozen=True)
class Order:
    """What a person asked for.

    Attributes
    ----------
    source : a study's name or file. only : words for :func:`raypfl.studies.cells.choose`.
    assignments : ``dotted.key=value``, rounds and seeds among them.
    """

    source: str
    only: Sequence[str]
    assignments: Sequence[str]

    @property
    def command(self) -> str:
        """With which one asks for it, again."""
        only = ["--only", ",".join(self.only)] if self.only else []
        return shlex.join(["raypfl", "study", self.source, *self.assignments, *only])


def carry_out(order: Order, quiet: bool, as_json: bool) -> None:
    """Run what is left of a study and tell what there is, also if it is stopped or some of it fails.

    Raises
    ------
    ConfigError : before anything runs, if something in the order or in the study is wrong.
    Stopped : if it was interrupted; the text tells how to go on.
    RaypflError : if cells failed.
    """
    study, reference = load(order.source)
    choice = choose(study, order.only)
    published = plan(reference, choose(reference))  # before the changes: what is wrong with it, is so in the file
    cells = plan(study, choice, order.assignments)
    folder = Path(cells[0].experiment.output).absolute() / study.name
    progress = Console(stderr=True)
    tracking = MLflowListener(study.name, tags={"study": study.name}, warn=warner(progress), kept_in=folder)
    with interrupting(), last_words(f"To go on: {order.command}"), tracking as tracked:
        outcomes = _run(cells, tracked, progress, quiet)
        results = {i: Result.load(cells[i].folder) for i, one in enumerate(outcomes) if one.status == FINISHED}
        if results:
            found = entries(study, reference, cells, results)
            departures = deviations(reference, choice, cells, published, results)
            page = layout.markdown(study, reference.published, found, departures)
            _keep(folder, study.name, page, found, cell_table(cells, results))
            tracked.describe(page)
            for name in FILES:
                tracked.attach(folder / name)
            if as_json:
                told = {"study": study.name, "folder": str(folder), "entries": as_rows(found), "deviations": departures}
                print(json.dumps(told, indent=2))
            else:
                _tell(study, reference, found, departures, folder)
        _raise_for(outcomes, cells, order)


def _run(cells: Sequence[Cell], tracked: MLflowListener, progress: Console, quiet: bool) -> list[Outcome]:
    lines = _run_lines(cells)
    trackers = [tracked.beside({"cell": cell.label}) for cell in cells]
    try:
        with view(progress, lines, quiet) as shown:
            listeners = [shown.listener(i) for i in range(len(cells))]

            def hear(cell: int, event: Event) -> None:
                listeners[cell](event)
                trackers[cell](event)

            return run(cells, hear)
    except KeyboardInterrupt:  # between two cells, or a second time
        return [Outcome(FINISHED if is_finished(cell.folder) else STOPPED) for cell in cells]


def _run_lines(cells: Sequence[Cell]) -> list[RunLine]:
    methods = list(dict.fromkeys(cell.method for cell in cells))
    lines = [RunLine(cell.label, cell.experiment.rounds, colour(methods.index(cell.method))) for cell in cells]
    for line, cell in zip(lines, cells, strict=True):
        if is_finished(cell.folder):
            line.status, line.round = FINISHED, line.rounds
    return lines


def _keep(folder: Path, name: str, page: str, found: Sequence[Entry], runs: pa.Table) -> None:
    """Write the tables and the figure."""
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / "table.md", page)
    for name, table in (("table", entry_table(found)), ("cells", runs)):
        with draft(folder / f"{name}.parquet") as file:
            pq.write_table(table, file)
    draw(found, name, folder / "table.png")


def _tell(study: Study, reference: Study, found: Sequence[Entry], departures: Sequence[str], folder: Path) -> None:
    console = Console()
    layout.show(console, study, reference.published, found, departures)
    console.print()
    for name in FILES:
        console.print(Text(str(nearby(folder / name))), soft_wrap=True)


def _raise_for(outcomes: Sequence[Outcome], cells: Sequence[Cell], order: Order) -> None:
    failed = [f"{cells[i].label}: {one.error}" for i, one in enumerate(outcomes) if one.status == FAILED]
    open_cells = sum(one.status != FINISHED for one in outcomes)
    go_on = f"{len(outcomes) - open_cells} of {len(outcomes)} cells are finished. To go on: {order.command}"
    if failed:
        raise RaypflError("\n".join([*failed, go_on]))
    if open_cells:
        raise Stopped(f"Stopped. {go_on}")
