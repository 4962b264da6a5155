"""What runs of studies and sweeps cost: the commit and CPU time of every process that worked on one."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

COSTS = "costs.jsonl"
"""File in a run's folder. Each process that works on the run adds a line when the run starts, and one when it ends:
``process``, ``commit`` and ``cpu_seconds``, which stay unknown if the process is killed or cannot write the second."""

_UNREADABLE = {"commit": None, "cpu_seconds": None}


def add_costs(folder: Path, process: str, commit: str | None, cpu_seconds: float | None) -> None:
    """Add a line to a run's costs; `process` names the process, and `cpu_seconds` is None as long as it is at work.

    A run that was refused has no folder. On a full disk, the run's own end says more than an error here.
    """
    line = json.dumps({"process": process, "commit": commit, "cpu_seconds": cpu_seconds})
    with contextlib.suppress(OSError):
        if folder.is_dir():
            with (folder / COSTS).open("a") as file:
                # On a full disk, the line before may have been cut off.
                file.write(f"\n{line}\n")


def costs_of(folder: Path) -> list[dict[str, Any]]:
    """Return the costs that each process recorded for a run."""
    file = folder / COSTS
    if not file.exists():
        return []
    by_process: dict[object, dict[str, Any]] = {}
    for number, line in enumerate(file.read_text().splitlines()):
        if line:
            costs = _read(line)
            by_process[costs.get("process", number)] = costs
    return list(by_process.values())


def _read(line: str) -> dict[str, Any]:
    try:
        return {**_UNREADABLE, **json.loads(line)}
    except (ValueError, TypeError):
        return _UNREADABLE


def cpu_seconds(folders: Iterable[Path]) -> float | None:
    """Return the CPU seconds of runs together; None if those of a part are unknown."""
    costs = [costs_of(folder) for folder in folders]
    seconds = [line["cpu_seconds"] for lines in costs for line in lines]
    return round(sum(seconds), 1) if costs and all(costs) and None not in seconds else None
