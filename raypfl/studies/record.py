"""The record of a study: what was measured, how, and at what cost, in a small file to keep."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raypfl.common.counting import counted
from raypfl.common.errors import ConfigError
from raypfl.common.files import make_folder, write
from raypfl.common.version import __version__
from raypfl.runs.records import divergence
from raypfl.runs.result import RunResult
from raypfl.runs.several.costs import costs_of, cpu_seconds
from raypfl.studies.cells import StudyCell
from raypfl.studies.description import Study
from raypfl.studies.search.choice import SearchOutcome
from raypfl.studies.table.entries import TableEntry, last_rounds, standing_columns

BY_HAND = {"title": "", "reasons": []}
"""What a person writes into a record: the table's title, and why numbers are not the published ones, in sentences."""

_LOCATIONS = ("output=", "tracking.", "checkpoint.")
"""Assignments that do not belong in a record: where a run's files are, and who is told of it."""

_ABSOLUTE_PATH = re.compile(r"(?<![\w.~/])(?:~|/)[\w.~-]*(?:/[\w.~-]+)+")
_DIGITS = 4


@dataclass(frozen=True)
class RanStudy:
    """A study, some of whose cells are finished.

    Attributes
    ----------
    study : the study as it was run.
    reference : the study with the published numbers.
    published : the cells as published.
    described : the cells that were run, without the settings that a search chose.
    cells : the cells as they were run.
    results : the results of the finished cells, by index in `cells`.
    searched : what a search chose; None: the study has none.
    """

    study: Study
    reference: Study
    published: Sequence[StudyCell]
    described: Sequence[StudyCell]
    cells: Sequence[StudyCell]
    results: Mapping[int, RunResult]
    searched: SearchOutcome | None

    @property
    def diverged(self) -> list[int]:
        """The indices of the cells that diverged."""
        return [i for i, cell in enumerate(self.cells) if i not in self.results and divergence(cell.folder)]


def record_of(
    ran: RanStudy,
    command: Sequence[str],
    entries: Sequence[TableEntry],
    deviations: Sequence[str],
    smaller: Sequence[str],
) -> dict[str, Any]:
    """Return a study's record, for JSON.

    Parameters
    ----------
    command : the words of the command that ran the study.
    deviations : sentences, see :func:`raypfl.studies.deviations.deviations`.
    smaller : settings by which runs are smaller than published, see :func:`raypfl.studies.deviations.size_settings`.

    Returns
    -------
    ``title`` and ``reasons``, which are empty; ``study``, ``published`` (the source; None: there is none), ``command``,
    ``raypfl`` (the version), ``deviations`` and ``smaller``; ``entries``, a dict for each entry of the table that was
    measured, in percent, with a number for each seed and, if there are several, how the method stands among those of
    its column; and ``runs``, a dict for each finished cell. With a search, also ``search``, which describes it, and
    ``trials``, a dict for each trial.
    """
    record: dict[str, Any] = {
        **BY_HAND,
        "study": ran.reference.name,
        "published": ran.reference.published.source if ran.reference.published else None,
        "command": _without_locations(command),
        "raypfl": __version__,
        "deviations": list(deviations),
        "smaller": list(smaller),
        "entries": _entries(ran, entries),
        "runs": [_run(ran.cells[i], result) for i, result in sorted(ran.results.items())],
    }
    if ran.searched:
        record["search"] = ran.searched.search.model_dump()
        record["trials"] = _trials(ran.searched)
    return record


def written_by_hand(file: Path) -> dict[str, Any]:
    """Return what a person has written into a record; empty if there is no such file.

    Raises
    ------
    ConfigError : if the file holds something else than a record.
    """
    return {key: value for key, value in _read(file).items() if key in BY_HAND}


def refuse_to_lose(file: Path, cells: Sequence[StudyCell]) -> None:
    """Refuse to replace a record that has other runs than those of `cells`, and make the folder for it.

    Raises
    ------
    ConfigError : if it has, or if the file holds something else than a record.
    Unwritable : if the folder cannot be made.
    """
    make_folder(file.parent)
    planned = {(*cell.position, cell.experiment.seed) for cell in cells}
    methods: dict[str, None] = {}
    num_lost = 0
    for run in _read(file).get("runs", []):
        if (run["method"], run["down"], run["across"], run["seed"]) not in planned:
            num_lost += 1
            methods[run["method"]] = None

    if num_lost:
        raise ConfigError(
            f"{file} has {counted(num_lost, 'run')} that this command does not have ({', '.join(methods)}). To extend "
            "the record, select its runs too: those whose folders are in OUTPUT/cells, also copied from another "
            "machine, do not run again. To leave the record as it is, name another file."
        )


def _read(file: Path) -> dict[str, Any]:
    """Return the record in a file; empty if there is no such file."""
    if not file.exists():
        return {}
    try:
        record: dict[str, Any] = json.loads(file.read_text())
        is_record = record.keys() >= {*BY_HAND, "runs", "entries"}
    except (ValueError, AttributeError, IsADirectoryError):
        is_record = False
    if not is_record:
        raise ConfigError(f"{file} holds no record of a study; name another file.")
    return record


def keep(file: Path, record: Mapping[str, Any]) -> None:
    """Write a record, with what a person has written into the file before."""
    make_folder(file.parent)
    write(file, as_text({**record, **written_by_hand(file)}))


def as_text(record: Mapping[str, Any]) -> str:
    """Return a record as JSON with a line for each entry, run and sentence, so that changes are easy to read."""
    parts = []
    for key, value in record.items():
        text = json.dumps(value, ensure_ascii=False)
        if isinstance(value, list) and value:
            lines = ",\n  ".join(json.dumps(item, ensure_ascii=False) for item in value)
            text = f"[\n  {lines}\n ]"
        parts.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _without_locations(command: Sequence[str]) -> str:
    words = [word for word in command if not word.startswith(_LOCATIONS)]
    return shlex.join(_ABSOLUTE_PATH.sub("FOLDER", word) for word in words)


def _entries(ran: RanStudy, entries: Sequence[TableEntry]) -> list[dict[str, Any]]:
    rows = []
    for entry in entries:
        if not entry.values and not entry.never:
            continue
        row: dict[str, Any] = {"method": entry.method, "down": entry.down, "across": entry.across}
        row |= {"metric": entry.metric, "values": _rounded(entry.values)}
        if entry.never:
            row["never"] = entry.never
        if entry.spread_over == "clients":
            row["over_clients"] = _rounded(entry.within)

        position = (entry.method, entry.down, entry.across)
        runs = [result for i, result in ran.results.items() if ran.cells[i].position == position]
        for name, last in (("last_round", 1), ("last_ten", 10)):
            values = last_rounds(runs, ran.study.metrics[entry.metric], last)
            if values and _rounded(values) != row["values"]:
                row[name] = _rounded(values)

        if entry.published:
            row["published"] = entry.published.value
            row["published_spread"] = entry.published.spread

        if entry.standing and entry.standing.seeds > 1:
            columns = standing_columns(entry.standing)
            row["standing"] = {name: round(value, _DIGITS) for name, value in columns.items()}
        rows.append(row)
    return rows


def _trials(searched: SearchOutcome) -> list[dict[str, Any]]:
    rows = []
    for row, score in zip(searched.rows(), searched.scores, strict=True):
        if score.value is not None:
            row["score"] = round(score.value, _DIGITS)
        rows.append(row)
    return rows


def _run(cell: StudyCell, result: RunResult) -> dict[str, Any]:
    commits = dict.fromkeys(line["commit"] for line in costs_of(cell.folder) if line["commit"])
    return {
        "method": cell.method,
        "down": cell.down,
        "across": cell.across,
        "seed": cell.experiment.seed,
        "rounds": result.round,
        "weights_hash": result.weights_hash,
        "cpu_seconds": cpu_seconds([cell.folder]),
        "commit": ", ".join(commits) or None,
    }


def _rounded(values: Sequence[float]) -> list[float]:
    return [round(value, _DIGITS) for value in values]
