"""What runs of studies and sweeps cost: the commit and CPU time of every process that worked on one."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

COSTS = "costs.jsonl"
"""File in a run's folder. Each process that works on the run adds a line: ``commit`` and ``cpu_seconds``."""


def costs_of(folder: Path) -> list[dict[str, Any]]:
    """Return the costs that each process recorded for a run."""
    file = folder / COSTS
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text().splitlines()]


def cpu_seconds(folders: Iterable[Path]) -> float | None:
    """Return the CPU seconds of runs together; None if those of a part are unknown."""
    seconds = [line["cpu_seconds"] for folder in folders for line in costs_of(folder)]
    return round(sum(seconds), 1) if seconds and None not in seconds else None
