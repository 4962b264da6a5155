"""Which runs a report is about."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from raypfl.common.errors import ConfigError, RaypflError
from raypfl.results.compared import labels
from raypfl.results.report.sweeps import best_runs, is_sweep
from raypfl.runs.folders import ComparisonFolder
from raypfl.runs.result import RECIPE, RunResult

_DAMAGED = (OSError, ValueError, LookupError, TypeError, pa.ArrowException)
"""What reading files with other content than expected raises."""


def found(paths: Sequence[str | Path]) -> tuple[list[RunResult], list[str]]:
    """The runs in folders, each of a run, a comparison, a sweep, or with such in it; and sentences on what is left out.

    Left out are folders without runs, runs that have not ended, were never evaluated or cannot be read, and all but the
    last of several runs of one experiment from one seed, which are repetitions. Files, such as a picture that a shell's
    ``*`` caught, are passed over.

    Raises
    ------
    ConfigError : if no path is given, one does not exist, or nothing is left to report on.
    """
    if not paths:
        raise ConfigError("raypfl report needs a run's folder or several, such as: raypfl report runs/digits-*")
    results: list[RunResult] = []
    notes: list[str] = []
    folders: list[Path] = []
    for path in map(Path, paths):
        if is_sweep(path):
            runs, more = best_runs(path)
            folders += runs or [path]
            notes += [more] if more else []
        else:
            folders += _folders(path)
    for folder in dict.fromkeys(folders):
        try:
            results += _evaluated(folder)
        except RaypflError as error:
            notes.append(str(error) if str(folder) in str(error) else f"{folder} is left out: {error}")
        except _DAMAGED as error:
            notes.append(f"{folder} is left out, since it cannot be read: {type(error).__name__}: {error}")
    if not results:
        raise ConfigError("\n".join(notes) or f"There is no run in {', '.join(map(str, paths))}, only files.")
    names = labels([result.experiment for result in results])
    last = {(name, one.experiment.seed): one for name, one in zip(names, results, strict=True)}
    for name, one in zip(names, results, strict=True):
        kept = last[name, one.experiment.seed]
        if kept is not one:
            notes.append(f"{one.run_dir} is left out: {kept.run_dir} is also {name} from seed {one.experiment.seed}.")
    return [one for one in results if any(one is kept for kept in last.values())], notes


def _folders(path: Path) -> list[Path]:
    """Those of runs; a folder without any is returned as well, to be refused with the others."""
    if not path.exists():
        raise ConfigError(f"There is no folder {path}. Runs are in the folder that `output` names, else in runs/.")
    if path.is_file():
        return []
    return _runs_of(path) or [run for folder in sorted(path.iterdir()) for run in _runs_of(folder)] or [path]


def _runs_of(folder: Path) -> list[Path]:
    """The folder, if it is a run's, or those in a comparison's."""
    if (folder / RECIPE).exists():
        return [folder]
    try:
        comparison = ComparisonFolder.load(folder)
    except (RaypflError, *_DAMAGED):  # its runs are in it all the same
        return sorted(file.parent for file in folder.glob(f"*/{RECIPE}"))
    return comparison.folders if comparison else []


def _evaluated(folder: Path) -> list[RunResult]:
    """The run, with its table; a RaypflError otherwise."""
    if not (folder / RECIPE).exists():
        raise ConfigError(f"{folder} is no run's folder, and there is none in it: a run's folder has an {RECIPE}.")
    result = RunResult.load(folder)
    result.summary()  # computes with metrics
    if not result.evaluations.num_rows:
        raise ConfigError(f"{folder} was stopped before its first evaluation.")
    return [result]
