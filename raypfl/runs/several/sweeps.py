"""Which sweep a run is a trial of, and what that sweep searches."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from raypfl.common.errors import RaypflError
from raypfl.experiment.spaces import spaces_of
from raypfl.experiment.yaml_text import read
from raypfl.runs.records import SWEEP
from raypfl.runs.result import RunResult


def is_sweep(folder: Path) -> bool:
    """Return whether a folder is a sweep's: a user's own folder may have a file of the same name, but no trials."""
    return (folder / SWEEP).is_file() and (folder / "trials").is_dir()


def sweep_of(run: Path) -> Path | None:
    """Return the folder of the sweep that a run's folder is in; None if it is in none."""
    for folder in run.absolute().parents:
        if folder.name == "trials" and is_sweep(folder.parent):
            return folder.parent
    return None


def searched_settings(results: Sequence[RunResult]) -> set[str]:
    """Return the dotted names of the settings that the runs' sweeps search; of a damaged description, none."""
    names: set[str] = set()
    for sweep in {sweep_of(result.run_dir) for result in results}:
        if sweep is None:
            continue
        try:
            names |= {space.key for space in spaces_of(read(sweep / SWEEP)["search"])}
        except (RaypflError, OSError, KeyError, TypeError):
            continue
    return names
