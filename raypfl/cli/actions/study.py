"""`raypfl study`: plan the cells, run the unfinished ones, show the table."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow.csv import write_csv
from rich.console import Console
from rich.text import Text

from raypfl.cli.actions.json_text import json_text
from raypfl.cli.actions.work import failure, once_mended
from raypfl.cli.messages import printing
from raypfl.common.counting import counted
from raypfl.common.errors import ConfigError, Diverged, RaypflError, Refused, Stopped
from raypfl.common.files import draft, write
from raypfl.common.stopping import message_if_killed, signals_interrupt
from raypfl.engine.events import Event
from raypfl.integrations.tracking.entries import searched_text
from raypfl.integrations.tracking.listener import MLflowListener
from raypfl.results.colours import colour
from raypfl.results.display.console import view, warner
from raypfl.results.display.fitting import ProgressConsole, output
from raypfl.results.display.outcome import nearby
from raypfl.results.display.run_line import RunLine
from raypfl.runs.records import SEARCH, STUDY_CELLS, TRIALS, divergence, is_finished
from raypfl.runs.result import RunResult
from raypfl.runs.several.worker import FINISHED, STOPPED, RunOutcome
from raypfl.studies.cells import Position, StudyCell, choices_with_values, label_of_seeds, plan, select
from raypfl.studies.description import Study, load
from raypfl.studies.deviations import deviations, size_settings
from raypfl.studies.record import RanStudy, keep, record_of, refuse_to_lose
from raypfl.studies.running import ended, other_rounds, run
from raypfl.studies.scaffold import scaffold
from raypfl.studies.search.choice import SearchOutcome, judge, write_trials
from raypfl.studies.search.trials import SearchTrial, planned_trials, with_search
from raypfl.studies.table import formats
from raypfl.studies.table.entries import TableEntry, cell_table, entry_rows, entry_table, table_entries
from raypfl.studies.table.layout import StudyTable, arrange
from raypfl.studies.table.picture import draw

FILES = ("table.md", "table.tex", "table.csv", "table.parquet", STUDY_CELLS, "table.png")


def new_study(files: Sequence[str], assignments: Sequence[str]) -> None:
    """Write a study's file, and say how to run it.

    Raises
    ------
    ConfigError : if no file is named, it exists, or the study would be wrong.
    """
    if not files or "=" in files[0]:
        raise ConfigError("Name the file of the new study, as in: raypfl study new mine.yaml methods=[fedavg,ditto]")
    cells = scaffold(Path(files[0]), assignments)
    print(f"{files[0]} has {counted(cells, 'run')}. To run it: {shlex.join(['raypfl', 'study', files[0]])}")


def run_study(
    source: str,
    only: Sequence[str],
    assignments: Sequence[str],
    quiet: bool,
    as_json: bool,
    record_file: Path | None = None,
) -> None:
    """Run the unfinished cells of a study, then show the table, even if the study is stopped or some cells fail.

    If the study has a search, its trials run before, and the cells have the settings that these chose.

    Parameters
    ----------
    source : name or file of the study.
    only : labels that select cells, see :func:`raypfl.studies.cells.select`.
    assignments : ``dotted.key=value``, including rounds and seeds.
    quiet : show no progress.
    as_json : print the entries as JSON.
    record_file : where the study's record is kept; None: nowhere.

    Raises
    ------
    ConfigError : before anything runs, if the study, a label or an assignment is wrong.
    Stopped : on an interruption; the message says how to continue.
    RaypflError : if cells failed.
    """
    study, reference = load(source)
    study, changes = with_search(study, assignments)
    study = select(study, only)
    cells = plan(study, changes)
    trials = planned_trials(study, cells)
    if record_file:
        refuse_to_lose(record_file, cells)

    published = _published(reference, changes)
    # Refuses a choice that names an unknown setting before anything runs.
    choices_with_values(study, cells)
    first_cells = [cell for trial in trials for cell in trial.cells] or cells
    unfinished = [cell for cell in first_cells if not is_finished(cell.folder)]
    _refuse_missing_data(unfinished)

    folder = Path(cells[0].experiment.output).absolute() / study.name
    command = ["raypfl", "study", source, *assignments]
    if only:
        command += ["--only", ",".join(only)]
    to_continue = f"To continue: {shlex.join(command)}"
    progress = ProgressConsole()
    if unfinished and (numbers := other_rounds(unfinished[0])):
        warner(progress)(
            f"There are runs with rounds={' and '.join(map(str, numbers))}, which are not continued: with "
            f"rounds={unfinished[0].experiment.rounds}, each cell is another run, from the beginning."
        )
    tracking = MLflowListener(study.name, tags={"study": study.name}, warn=warner(progress), kept_in=folder)

    with signals_interrupt(), message_if_killed(to_continue), tracking as tracked:
        described = cells
        searched = None
        if trials:
            searched = _search(study, trials, tracked, progress, quiet, to_continue)
            write_trials(folder, searched)
            tracked.attach(folder / TRIALS)
            described = [cell for cell in cells if cell.position in searched.best]
            cells = searched.configured(described)

        study = study.model_copy(update={"choices": choices_with_values(study, cells)})
        outcomes = _run(study, cells, tracked, progress, quiet)

        results = {}
        for i, outcome in enumerate(outcomes):
            if outcome.status == FINISHED:
                results[i] = RunResult.load(cells[i].folder)

        if results:
            ran = RanStudy(study, reference, published, described, cells, results, searched)
            _report(ran, folder, command, record_file, tracked, as_json)
        _raise_for(outcomes, cells, to_continue, searched)


def _report(
    ran: RanStudy,
    folder: Path,
    command: Sequence[str],
    record_file: Path | None,
    tracked: MLflowListener,
    as_json: bool,
) -> None:
    """Write the study's table and record, and show the table."""
    study = ran.study
    measured = table_entries(study, ran.reference, ran.cells, ran.results)
    departures = deviations(ran.reference, study, ran.described, ran.published, ran.results, ran.diverged)
    notes = ran.searched.sentences() if ran.searched else []
    study_table = arrange(study, ran.reference.published, measured, departures, notes)
    page = formats.markdown(study_table)
    _write(folder, study.name, page, measured, cell_table(ran.cells, ran.results))
    write(folder / "table.tex", formats.as_latex(study_table))

    if ran.searched is None:
        # They are of an earlier command, when the study had a search, and a report would show them beside this table.
        for name in (SEARCH, TRIALS):
            (folder / name).unlink(missing_ok=True)

    if record_file:
        smaller = size_settings(ran.described, ran.published)
        keep(record_file, record_of(ran, command, measured, departures, smaller))

    tracked.describe(page)
    for name in FILES:
        tracked.attach(folder / name)

    with printing(shlex.join(command)):
        if as_json:
            table: dict[str, Any] = {"entries": entry_rows(measured), "deviations": departures}
            if ran.searched:
                table["trials"] = ran.searched.rows()
            print(json_text({"study": study.name, "folder": str(folder), **table}))
        else:
            _show(study_table, folder, has_trials=ran.searched is not None)


def _published(reference: Study, assignments: Sequence[str]) -> list[StudyCell]:
    """Return the cells as published, with those assignments alone without which there are none."""
    try:
        return plan(reference)
    except ConfigError:
        # The study may need an assignment, such as a data set's folder; any other one is a deviation.
        needed = list(assignments)
        for assignment in assignments:
            fewer = [other for other in needed if other != assignment]
            with suppress(ConfigError):
                plan(reference, fewer)
                needed = fewer
        return plan(reference, needed)


def _refuse_missing_data(cells: Sequence[StudyCell]) -> None:
    """Raise a ConfigError, with a sentence for each data set that cannot be read, before any cell runs."""
    cells_by_data: dict[str, list[StudyCell]] = {}
    for cell in cells:
        cells_by_data.setdefault(str(cell.experiment.data), []).append(cell)

    cells_by_problem: dict[str, list[StudyCell]] = {}
    for same_data in cells_by_data.values():
        experiment = same_data[0].experiment
        try:
            experiment.load_data()
        except Refused as error:
            cells_by_problem.setdefault(str(error), []).extend(same_data)

    if cells_by_problem:
        lines = []
        for problem, affected in cells_by_problem.items():
            lines.append(f"{_counted(affected, cells)} cannot run. {problem}")
        hint = "datasets.NAME=FOLDER says where a data set lies, and --only chooses what has data."
        raise ConfigError("\n".join([*lines, hint]))


def _counted(affected: Sequence[StudyCell], cells: Sequence[StudyCell]) -> str:
    count = f"{len(affected)} of {len(cells)} cells"
    blocks = ", ".join(dict.fromkeys(cell.down for cell in affected if cell.down))
    return f"{count} ({blocks})" if blocks else count


def _search(
    study: Study,
    trials: Sequence[SearchTrial],
    tracked: MLflowListener,
    progress: Console,
    quiet: bool,
    to_continue: str,
) -> SearchOutcome:
    """Run the unfinished trials, and choose the best of each row.

    Raises
    ------
    Stopped : on an interruption.
    RaypflError : if a trial was refused, which no other settings would change.
    """
    cells = [cell for trial in trials for cell in trial.cells]
    outcomes = _run(study, cells, tracked, progress, quiet)
    if any(outcome.status == STOPPED or isinstance(outcome.error, Refused) for outcome in outcomes):
        _raise_for(outcomes, cells, to_continue)
    return judge(study, trials, outcomes)


def _run(
    study: Study, cells: Sequence[StudyCell], tracked: MLflowListener, progress: Console, quiet: bool
) -> list[RunOutcome]:
    methods = list(dict.fromkeys(cell.method for cell in cells))
    lines = [RunLine(cell.label, cell.experiment.rounds, colour(methods.index(cell.method))) for cell in cells]
    for line, cell in zip(lines, cells, strict=True):
        if is_finished(cell.folder):
            line.status = FINISHED
            line.round = line.rounds
        elif divergence(cell.folder):
            line.status = "diverged"

    trackers = []
    for cell in cells:
        spaces = study.search.spaces(cell.method) if study.search else []
        searched = searched_text(cell.experiment, [space.key for space in spaces])
        trackers.append(tracked.beside({"cell": cell.label} | ({"settings": searched} if searched else {})))
    try:
        with view(progress, lines, quiet) as shown:
            listeners = [shown.listener(i) for i in range(len(cells))]

            def listen(cell: int, event: Event) -> None:
                listeners[cell](event)
                trackers[cell](event)

            return run(cells, listen)
    except KeyboardInterrupt:
        # A Ctrl-C between two cells, or a second one.
        return [ended(cell) or RunOutcome(STOPPED) for cell in cells]


def _write(folder: Path, name: str, page: str, measured: Sequence[TableEntry], cells: pa.Table) -> None:
    """Write the tables and the figure."""
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / "table.md", page)
    for file, table in (("table", entry_table(measured)), ("cells", cells)):
        with draft(folder / f"{file}.parquet") as path:
            pq.write_table(table, path)
    with draft(folder / "table.csv") as path:
        write_csv(entry_table(measured), path)
    draw(measured, name, folder / "table.png")


def _show(study_table: StudyTable, folder: Path, has_trials: bool) -> None:
    """Print the table, and which files there are."""
    console = output()
    formats.show(console, study_table)
    console.print()
    for name in [*FILES, TRIALS] if has_trials else FILES:
        console.print(Text(str(nearby(folder / name))), soft_wrap=True)


def _raise_for(
    outcomes: Sequence[RunOutcome],
    cells: Sequence[StudyCell],
    to_continue: str,
    searched: SearchOutcome | None = None,
) -> None:
    """Raise an error if cells failed or were stopped, or a row has no trial with a score."""
    alike: dict[tuple[Position, int | None, str], list[tuple[StudyCell, RaypflError]]] = {}
    for cell, outcome in zip(cells, outcomes, strict=True):
        if outcome.error:
            alike.setdefault((cell.position, cell.trial, str(outcome.error)), []).append((cell, outcome.error))
    failed = []
    for pairs in alike.values():
        seeds = [cell for cell, _ in pairs]
        failed.append(failure(label_of_seeds(seeds), [cell.folder for cell in seeds], pairs[0][1]))
    if searched:
        failed += searched.rows_without_choice()

    finished = sum(outcome.status == FINISHED for outcome in outcomes)
    kind = "trials' runs" if cells and cells[0].trial is not None else "cells"
    summary = f"{finished} of {len(outcomes)} {kind} are finished."
    unfinished = [outcome for outcome in outcomes if outcome.status != FINISHED]
    if any(not isinstance(outcome.error, Diverged) for outcome in unfinished):
        must_be_mended = all(outcome.error for outcome in unfinished)
        summary += f" {once_mended(to_continue) if must_be_mended else to_continue}"
    if failed:
        raise RaypflError("\n".join([*failed, summary]))
    if finished < len(outcomes):
        raise Stopped(f"Stopped. {summary}")
