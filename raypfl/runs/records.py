"""The files of a run's folder: what is recorded there, and what that says of the run."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from raypfl.common.errors import Diverged, NoRun, did_you_mean, listed
from raypfl.common.files import draft, make_folder, write
from raypfl.data.client_names import ClientNames
from raypfl.engine import history
from raypfl.engine.events import RunFinished
from raypfl.engine.job import checkpoints_of
from raypfl.experiment import Experiment
from raypfl.storage import checkpoints

# In a run's folder: its tables and the folder of its images, and files.
TABLES = ("rounds", "evaluations", "ledger", "logged")
IMAGES = "images"
DESCRIPTION = "experiment.yaml"
METADATA = "metadata.json"
SUMMARY = "summary.json"
CLIENT_NAMES = "clients.parquet"

COMPARISON = "comparison.yaml"
"""The file in a comparison's folder with its runs, and the command that started it."""

SWEEP = "sweep.yaml"
"""The file in a sweep's folder with its description."""

SEARCH = "search.yaml"
"""The file in a study's folder with the description of its search, if it has one."""

STUDY_CELLS = "cells.parquet"
"""The file in a study's folder that names the folders of its runs, which it shares with other studies."""

TRIALS = "trials.csv"
"""The file in the folder of a sweep, or of a study with a search, with its trials."""

WITHOUT_RESULT = ("diverged", "failed")
"""The statuses of runs that ended without a result; what they reached is not compared with other runs."""

_SUMMARY_KEYS = ("status", "round", "weights_hash", "error", "best_round")
"""What ``summary.json`` holds, as in :class:`raypfl.engine.events.RunFinished`."""

_MAX_NAMED = 6
"""The most folders that a sentence names."""


def description(run_dir: str | Path) -> Experiment:
    """Read the experiment that a run's folder describes.

    Raises
    ------
    NoRun : if it is not the folder of a run.
    """
    refuse_missing(Path(run_dir))
    file = Path(run_dir, DESCRIPTION)
    if not file.exists():
        raise NoRun(f"{run_dir} is {_kind_of_folder(Path(run_dir))}")
    return Experiment.from_record(file)


def _kind_of_folder(folder: Path) -> str:
    """Say what a folder without a run is, and how to go on."""
    if (folder / SWEEP).exists():
        return "a sweep, not a run: give the command `raypfl tune ...` of this sweep again to continue it."
    if (folder / STUDY_CELLS).exists():
        return "a study, not a run: give the command `raypfl study ...` of this study again to continue it."
    kind = "a comparison, not a run" if (folder / COMPARISON).exists() else "not the folder of a run"
    return f"{kind}: it has no {DESCRIPTION}. {_where_runs_are(folder)}"


def refuse_missing(folder: Path) -> None:
    """Raise a NoRun that names the nearest run, or where runs are, if there is no such folder."""
    if folder.exists():
        return
    nearby = [file.parent.name for name in (DESCRIPTION, COMPARISON) for file in folder.parent.glob(f"*/{name}")]
    if nearby:
        hint = did_you_mean(folder.name, nearby, str(folder).removesuffix(folder.name))
        raise NoRun(f"There is no folder {folder}; {hint}")
    nearest = next(parent for parent in folder.parents if parent.exists())
    raise NoRun(f"There is no folder {folder}. {_where_runs_are(nearest)}")


def _where_runs_are(folder: Path) -> str:
    """Return a sentence on where runs are: up to two levels below this folder, which is not a run's."""
    descriptions = [*folder.glob(f"*/{DESCRIPTION}"), *folder.glob(f"*/*/{DESCRIPTION}")]
    run_folders = sorted(str(file.parent) for file in descriptions)
    if not run_folders:
        return "Runs are in the folder that `output` names."
    return f"Runs are in {listed(run_folders, _MAX_NAMED)}."


def write_description(folder: Path, experiment: Experiment) -> None:
    """Write the experiment into its folder, which makes it a run's folder that can be resumed."""
    make_folder(folder)
    write(folder / DESCRIPTION, history.header_comments(folder) + experiment.to_yaml())


def discard_unstarted(folder: Path) -> None:
    """Delete the description of a run that has not begun, and its folder if that is then empty."""
    if not (folder / METADATA).exists():
        (folder / DESCRIPTION).unlink()
        with contextlib.suppress(OSError):
            folder.rmdir()


def rounds_saved(run_dir: str | Path, experiment: Experiment) -> int:
    """Return the round of a run's newest checkpoint; 0: it has none."""
    return checkpoints.last_round(checkpoints_of(experiment, str(run_dir)))


def is_finished(run_dir: Path) -> bool:
    """Return whether the files in a run's folder can be read and say that the run is complete."""
    summary = _read_summary(run_dir)
    if summary is None or summary["status"] != "finished":
        return False
    return _read_json(run_dir / METADATA) is not None


def ended_at_once(run_dir: Path) -> bool:
    """Return whether a run ended before it had finished a round, and has not begun again since."""
    summary = _read_summary(run_dir)
    return summary is not None and summary["round"] == 0


def has_failed(run_dir: Path) -> bool:
    """Return whether a run has recorded that it failed, and has not begun again since."""
    summary = _read_summary(run_dir)
    return summary is not None and summary["status"] == "failed"


def divergence(run_dir: Path) -> Diverged | None:
    """Return the error with which a run diverged, as it would again; None if it did not."""
    summary = _read_summary(run_dir)
    return Diverged(summary["error"]) if summary and summary["status"] == "diverged" else None


def reopen(run_dir: Path) -> None:
    """Mark a run that has ended unfinished, so that it can go on; without a finished round, it begins anew."""
    summary = _read_summary(run_dir)
    if ended_at_once(run_dir):
        (run_dir / SUMMARY).unlink()
    elif summary is not None:
        write(run_dir / SUMMARY, json.dumps(summary | {"status": "stopped"}, indent=1))


def _read_summary(run_dir: Path) -> dict[str, Any] | None:
    return _read_json(run_dir / SUMMARY, _SUMMARY_KEYS)


def _read_json(file: Path, keys: Iterable[str] = ()) -> dict[str, Any] | None:
    """Return what a JSON file of a run holds; None if there is none, or something else than a run writes."""
    with contextlib.suppress(FileNotFoundError, ValueError):
        content = json.loads(file.read_text())
        if isinstance(content, dict) and set(keys) <= content.keys():
            return content
    return None


def _require_json(file: Path, keys: Iterable[str] = ()) -> dict[str, Any]:
    """Return what a JSON file of a run holds; raises NoRun if there is none, or something else than a run writes."""
    content = _read_json(file, keys)
    if content is None:
        raise NoRun(f"{file} is damaged; `raypfl resume {file.parent}` writes it again from the run's checkpoint.")
    return content


def recorded_end(folder: Path) -> dict[str, Any]:
    """Return status, round, hash, error and best round of a run that has ended, by their names.

    Raises
    ------
    NoRun : if the file that has them is damaged.
    """
    summary = _require_json(folder / SUMMARY, _SUMMARY_KEYS)
    return {name: summary[name] for name in _SUMMARY_KEYS}


def recorded_metadata(folder: Path) -> dict[str, Any]:
    """Return the facts that were found when a run was last started or resumed.

    Raises
    ------
    NoRun : if the file that has them is damaged or missing.
    """
    return _require_json(folder / METADATA)


def write_client_names(folder: Path, names: ClientNames) -> None:
    """Write the names of a run's clients into its folder: a row for each client and name."""
    table = pa.table({"client": pa.array(names.clients, pa.int32()), "name": pa.array(names.names, pa.string())})
    with draft(folder / CLIENT_NAMES) as file:
        pq.write_table(table, file)


def recorded_reason(folder: Path, experiment: Experiment) -> str:
    """Return the recorded reason for a run's executor and layout; empty for a new run, or if they were changed."""
    metadata = _read_json(folder / METADATA, ["why"]) or {}
    chosen = {"executor": experiment.engine.executor, "channels_last": bool(experiment.training.channels_last)}
    is_as_before = chosen.items() <= metadata.items()
    return str(metadata["why"]) if is_as_before else ""


def write_tables(folder: Path, finished: RunFinished) -> None:
    """Write a run's tables, its summary and the images that its method logged into its folder."""
    for name, table in finished.tables.items():
        with draft(folder / f"{name}.parquet") as file:
            pq.write_table(table, file)

    images = finished.images.to_pylist() if finished.images else []
    for image in images:
        file = folder / IMAGES / image["name"] / f"{image['round']:06d}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        write(file, image["png"])

    # Last, since a run whose folder has a summary counts as ended.
    summary = {name: getattr(finished, name) for name in _SUMMARY_KEYS}
    write(folder / SUMMARY, json.dumps(summary, indent=1))


def newest(run_dir: str | Path, whole: bool = True) -> tuple[Experiment, checkpoints.Snapshot]:
    """Read a run's description and its newest checkpoint; `whole` as in :func:`raypfl.storage.checkpoints.load`."""
    experiment = description(run_dir)
    return experiment, checkpoints.newest(checkpoints_of(experiment, str(run_dir)), whole)
