"""Which settings were in force in which rounds of a run: a list in its folder that only grows.

Each time that a run starts or is resumed, ``history.jsonl`` gets a line of JSON with ::

    from_round    rounds finished before; a later line with the same or a smaller number takes over from there
    parent        the run, and its round, that this run continues; only in the line that says so
    changed       settings that differ from those of the line before, by dotted name
    settings      all settings
    metadata      as in ``metadata.json``: versions, devices, and other facts found at the start; absent until then
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

from raypfl.common.files import write
from raypfl.experiment import Experiment
from raypfl.experiment.assignments import flatten

HISTORY = "history.jsonl"

HistoryEntry = dict[str, Any]
"""A line of the history, as the head of this file describes it."""


def read(run_dir: str | Path) -> list[HistoryEntry]:
    """Read the entries, oldest first; a damaged line is left out."""
    entries = []
    for line in _text(Path(run_dir)).splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict) and {"from_round", "settings"} <= entry.keys():
            entries.append(entry)
    return entries


def add(run_dir: Path, from_round: int, experiment: Experiment, **facts: Any) -> None:
    """Add an entry; `facts` are its parent and its metadata."""
    text = _text(run_dir)
    entries = read(run_dir)

    # The run continues another one and starts only now: its entry takes the place of the planned one.
    if entries and "metadata" not in entries[-1]:
        planned = entries.pop()
        facts = {"parent": planned["parent"], **facts}
        text = "".join(text.splitlines(keepends=True)[:-1])

    settings = experiment.to_dict()
    before = flatten(entries[-1]["settings"] if entries else settings)
    now = flatten(settings)
    changed = {key: now.get(key) for key in {**before, **now} if before.get(key) != now.get(key)}
    entry = {"from_round": from_round, "changed": changed, **facts, "settings": settings}
    write(run_dir / HISTORY, text + json.dumps(entry) + "\n")


def inherit(parent_dir: Path, round: int, run_dir: Path, experiment: Experiment) -> None:
    """Start the history of a run that continues another one after a round."""
    entries = [entry for entry in read(parent_dir) if entry["from_round"] < round]
    write(run_dir / HISTORY, "".join(json.dumps(entry) + "\n" for entry in entries))
    add(run_dir, round, experiment, parent={"run": str(parent_dir), "round": round})


def parent_of(run_dir: str | Path) -> dict[str, Any] | None:
    """Return the run, and its round, that a run continues; None if it started with the first round."""
    parents = [entry["parent"] for entry in read(run_dir) if "parent" in entry]
    return parents[-1] if parents else None


def header_comments(run_dir: Path) -> str:
    """Return comments for the head of a run's description; empty if its settings held from the first round on."""
    entries = read(run_dir)
    changed_after = None
    for before, entry in pairwise(entries):
        if before["settings"] != entry["settings"]:
            changed_after = entry["from_round"]

    lines = []
    if changed_after is not None:
        lines.append(f"# In force after round {changed_after}; {HISTORY} says what was before.")
    parent = parent_of(run_dir)
    if parent:
        lines.append(f"# The rounds up to {parent['round']} are those of {parent['run']}.")
    return "".join(f"{line}\n" for line in lines)


def _text(run_dir: Path) -> str:
    file = run_dir / HISTORY
    text = file.read_text(errors="replace") if file.exists() else ""
    # A line that was cut off must not swallow the next one.
    return text if text.endswith("\n") or not text else f"{text}\n"
