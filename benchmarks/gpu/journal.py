"""The record of the first hour: each row is printed and appended to a file at once."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

Row = dict[str, Any]


class Journal:
    """A file of JSON lines, one for each row; what a cut leaves of a line is removed."""

    def __init__(self, path: Path):
        self.path = path
        path.touch()
        content = path.read_bytes()
        whole_lines = content[: content.rfind(b"\n") + 1]
        if whole_lines != content:
            path.write_bytes(whole_lines)

    def add(self, step: str, row: Row) -> None:
        """Print a row, and append it."""
        print(f"{step:10}{_in_words(row)}", flush=True)
        with self.path.open("a") as file:
            file.write(json.dumps({"step": step, **row}) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def rows(self, step: str) -> list[Row]:
        """Return the rows of a step, the oldest first."""
        return [row for row in self._all() if row["step"] == step]

    def latest(self, step: str) -> list[Row]:
        """Return the rows of a step from the newest call of the program that has any."""
        newest: list[Row] = []
        of_call: list[Row] = []
        for row in self._all():
            if row["step"] == "begin":
                newest = of_call or newest
                of_call = []
            elif row["step"] == step:
                of_call.append(row)
        return of_call or newest

    def _all(self) -> list[Row]:
        return [json.loads(line) for line in self.path.read_text().splitlines()]


TITLES = ("about", "network", "optimizer", "operation", "method", "way", "executor", "setting")
"""Names that a printed line leaves out before their values."""


def _in_words(row: Row) -> str:
    """``{"network": "mlp", "clients_per_second": 1234.5}`` as ``mlp, clients per second 1,234``."""
    parts = []
    for name, value in row.items():
        text = str(value)
        if isinstance(value, bool):
            text = "yes" if value else "NO"
        elif isinstance(value, float):
            text = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
        elif isinstance(value, int):
            text = f"{value:,}"
        parts.append(text if name in TITLES else f"{name.replace('_', ' ')} {text}")
    return ", ".join(parts)
