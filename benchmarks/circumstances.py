"""The commit, the date and the machine's load of a measurement."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path
from typing import Any

import torch

import raypfl
from raypfl.common.checkout import commit

ROOT = Path(__file__).resolve().parents[1]
MEASURED = ("raypfl", "benchmarks", ":!benchmarks/results")
"""Paths whose changes make a tree differ from its commit; results are written during a measurement."""


def circumstances(root: Path = ROOT) -> dict[str, Any]:
    """The ``commit``, the ``date`` (UTC) and the ``load``, an average over the last minute."""
    date = time.strftime("%Y-%m-%dT%H:%MZ", time.gmtime())
    return {"commit": commit(root, MEASURED), "date": date, "load": round(os.getloadavg()[0], 2)}


def about() -> str:
    """The versions and the machine, in a line."""
    versions = f"raypfl {raypfl.__version__}, torch {torch.__version__}"
    return f"{versions} on {platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
