"""Which runs a report is about."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from raypfl.common.errors import CheckpointError, ConfigError
from raypfl.results.contenders import labels
from raypfl.runs import Result
from raypfl.runs.folders import Comparison
from raypfl.runs.result import RECIPE


def found(paths: Sequence[str | Path]) -> tuple[list[Result], list[str]]:
    """The runs in folders, each a run's, a comparison's or one with such in it; a sentence for all that is left out.

    Left out are files, such as a picture that a shell's ``*`` caught, runs that have not come to an end, runs that were
    never evaluated, and all but the last of several runs of one experiment from one seed, which repeat each other.

    Raises
    ------
    ConfigError : if no path is given, one does not exist or holds no run, or nothing is left to report on.
    """
    if not paths:
        raise ConfigError("raypfl report needs a run's folder or several, such as: raypfl report runs/digits-*")
    folders = list(dict.fromkeys(folder for path in paths for folder in _folders(Path(path))))
    results, notes = [], []
    for folder in folders:
        try:
            result = Result.load(folder)
        except CheckpointError as error:
            notes.append(str(error))
            continue
        if result.evaluations.num_rows:
            results.append(result)
        else:
            notes.append(f"{folder} was stopped before its first evaluation.")
    if not results:
        raise ConfigError("\n".join(notes) or f"There is no run in {', '.join(map(str, paths))}, only files.")
    kept, repeated = _once(results)
    return kept, notes + repeated


def _folders(path: Path) -> list[Path]:
    if not path.exists():
        raise ConfigError(f"There is no folder {path}. Runs are in the folder that `output` names, else in runs/.")
    if path.is_file():
        return []
    if (path / RECIPE).exists():
        return [path]
    inside = _compared(path) or [
        run for folder in sorted(path.iterdir()) for run in _compared(folder) or _alone(folder)
    ]
    if not inside:
        raise ConfigError(f"{path} is no run's folder, and there is none in it: a run's folder has an {RECIPE}.")
    return inside


def _compared(folder: Path) -> list[Path]:
    comparison = Comparison.load(folder)
    return comparison.folders if comparison else []


def _alone(folder: Path) -> list[Path]:
    return [folder] if (folder / RECIPE).exists() else []


def _once(results: Sequence[Result]) -> tuple[list[Result], list[str]]:
    named = labels([result.experiment for result in results])
    keys = [(label, result.experiment.seed) for label, result in zip(named, results, strict=True)]
    last = dict(zip(keys, results, strict=True))
    repeated = [
        f"{result.run_dir} is left out: {last[key].run_dir} is {key[0]} from seed {key[1]} too."
        for key, result in zip(keys, results, strict=True)
        if last[key] is not result
    ]
    return [result for key, result in zip(keys, results, strict=True) if last[key] is result], repeated
