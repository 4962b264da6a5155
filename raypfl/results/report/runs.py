"""Which runs a report is about."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from raypfl.common.errors import ConfigError, RaypflError
from raypfl.experiment.assignments import flatten
from raypfl.experiment.identity import deciding_settings
from raypfl.results.report.searches.folders import best_runs
from raypfl.results.run_groups import refuse_untested
from raypfl.runs.folders import ComparisonFolder
from raypfl.runs.records import (
    COMPARISON,
    DESCRIPTION,
    STUDY_CELLS,
    SWEEP,
    ended_at_once,
    has_failed,
    recorded_end,
    refuse_missing,
)
from raypfl.runs.result import RunResult
from raypfl.runs.several.sweeps import is_sweep

_DAMAGED = (OSError, ValueError, LookupError, TypeError, pa.ArrowException)
"""What reading files with other content than expected raises."""

STUDY_TABLE = "table.parquet"
"""The file in a study's folder with the entries of its table."""


def find_runs(paths: Sequence[str | Path]) -> tuple[list[RunResult], list[str]]:
    """Return the runs to report on, and sentences on those that are left out or began as another run.

    Each path is the folder of a run, a comparison, a study or a sweep, or a folder that contains some.

    Left out are folders without runs, and runs that have not ended, were stopped before an evaluation, failed before a
    round was finished or cannot be read. Files, such as a picture that a shell's ``*`` caught, are passed over.

    Raises
    ------
    ConfigError : if no path is given, or nothing is left to report on.
    NoRun : if a path does not exist.
    """
    if not paths:
        raise ConfigError("raypfl report needs a run's folder or several, such as: raypfl report runs/digits-*")

    folders: list[Path] = []
    notes: list[str] = []
    for path in map(Path, paths):
        path_folders, path_notes = run_folders(path)
        folders += path_folders
        notes += path_notes

    # A run may be named twice, by itself and by a study or a pattern of the shell.
    distinct = {folder.resolve(): folder for folder in folders}
    folders, failed_note = _without_failed_attempts(list(distinct.values()))
    notes += failed_note
    results: list[RunResult] = []
    for folder in folders:
        try:
            results.append(_load_evaluated(folder))
        except RaypflError as error:
            note = str(error)
            if str(folder) not in note:
                note = f"{folder} is left out: {note}"
            notes.append(note)
        except _DAMAGED as error:
            notes.append(f"{folder} is left out, since it cannot be read: {type(error).__name__}: {error}")
    if not any(result.evaluations.num_rows for result in results):
        for result in results:
            reason = recorded_end(result.run_dir)["error"]
            notes.append(f"{result.run_dir} {result.status} before its first evaluation: {reason}")
        raise ConfigError("\n".join(notes) or f"There is no run in {', '.join(map(str, paths))}, only files.")

    return results, [*notes, *_beginnings(results)]


def _without_failed_attempts(folders: list[Path]) -> tuple[list[Path], list[str]]:
    """The folders, and a sentence on those left out: lone runs that failed before a round was finished, unless all did.

    They have nothing to show, and their experiment may no longer be readable: its method may have been renamed since.
    """
    failed = []
    for folder in folders:
        if has_failed(folder) and ended_at_once(folder) and not (folder.parent / COMPARISON).exists():
            failed.append(folder)
    if len(failed) in (0, len(folders)):
        return folders, []

    names = ", ".join(map(str, failed))
    note = f"Left out, since no round was finished before the failure: {names}."
    return [folder for folder in folders if folder not in failed], [note]


def _beginnings(results: Sequence[RunResult]) -> list[str]:
    """A sentence on each run whose first rounds are another run's, with settings that its label does not have."""
    notes = []
    for result in results:
        deciding = flatten(deciding_settings(result.experiment)).keys() - {"rounds"}
        for before, entry in pairwise(result.history):
            changed = [key for key in entry["changed"] if key in deciding]
            if "parent" in entry and changed:
                settings = flatten(before["settings"])
                values = ", ".join(f"{key}={settings.get(key)}" for key in changed)
                parent = entry["parent"]
                notes.append(f"Up to round {parent['round']}, {result.run_dir} is {parent['run']}, with {values}.")
    return notes


def run_folders(path: Path) -> tuple[list[Path], list[str]]:
    """Return the folders of the runs in a path that a report shows, and sentences on what it leaves out of it.

    The path itself if it has no runs, to be refused together with others.
    """
    refuse_missing(path)
    if path.is_file():
        return [], []

    if is_sweep(path):
        best, note = best_runs(path)
        return best or [path], [note] if note else []
    if (path / STUDY_CELLS).exists():
        return _cells_of(path), _diverged_in(path)
    runs = _runs_of(path)
    if runs:
        return runs, []

    notes = []
    for folder in sorted(path.iterdir()):
        runs += _runs_of(folder)
        if is_sweep(folder) or (folder / STUDY_CELLS).exists():
            kind = "sweep" if is_sweep(folder) else "study"
            notes.append(f"The {kind} {folder} is left out: {shlex.join(['raypfl', 'report', str(folder)])} shows it.")
    return runs or [path], notes


def _cells_of(study: Path) -> list[Path]:
    """The folders of a study's runs; the study's own if its file is damaged, to be refused together with others."""
    try:
        runs = pq.read_table(study / STUDY_CELLS, columns=["run_dir"])["run_dir"].to_pylist()
    except _DAMAGED:
        return [study]
    return [Path(run) for run in dict.fromkeys(runs)]


def _diverged_in(study: Path) -> list[str]:
    """A sentence on the methods of a study with seeds that diverged, whose runs its table does not name."""
    try:
        rows = pq.read_table(study / STUDY_TABLE).to_pylist()
        positions = [(row["method"], row["down"], row["across"]) for row in rows if row["diverged_seeds"]]
    except _DAMAGED:
        return []
    names = [" · ".join(filter(None, position)) for position in dict.fromkeys(positions)]
    return [f"Seeds that diverged in the study {study.name} are not shown: {'; '.join(names)}."] if names else []


def _runs_of(folder: Path) -> list[Path]:
    """The folder, if it is a run's, or those in a comparison's."""
    if (folder / DESCRIPTION).exists():
        return [folder]
    try:
        comparison = ComparisonFolder.load(folder)
    except (RaypflError, *_DAMAGED):
        # The comparison's file is damaged, but its runs are there all the same.
        return sorted(file.parent for file in folder.glob(f"*/{DESCRIPTION}"))
    return comparison.folders if comparison else []


def _load_evaluated(folder: Path) -> RunResult:
    """The run, if it has been evaluated; a RaypflError otherwise."""
    if not (folder / DESCRIPTION).exists():
        sentence = (
            f"{folder} is not a run's folder, and contains none: a run's folder has an {DESCRIPTION}, and a sweep's "
            f"has {SWEEP} and trials."
        )
        if any(folder.glob(f"*/*/{DESCRIPTION}")) or any(folder.glob(f"*/*/*/{DESCRIPTION}")):
            sentence += f" There are runs further down: try raypfl report {shlex.quote(str(folder))}/*"
        raise ConfigError(sentence)

    result = RunResult.load(folder)
    # Compute with the metrics, so that a damaged table is found here.
    result.summary()
    refuse_untested(result)
    return result
