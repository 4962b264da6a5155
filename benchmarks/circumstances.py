"""The commit, the date and the machine's load of a measurement."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

import torch

import raypfl

ROOT = Path(__file__).resolve().parents[1]
MEASURED = ("raypfl", "benchmarks", ":!benchmarks/results")
"""Paths whose changes make a tree differ from its commit; results are written during a measurement."""


def circumstances(root: Path = ROOT) -> dict[str, Any]:
    """The ``commit`` (see `commit`), the ``date`` (UTC) and the ``load``, an average over the last minute."""
    date = time.strftime("%Y-%m-%dT%H:%MZ", time.gmtime())
    return {"commit": commit(root), "date": date, "load": round(os.getloadavg()[0], 2)}


def about() -> str:
    """The versions and the machine, in a line."""
    versions = f"raypfl {raypfl.__version__}, torch {torch.__version__}"
    return f"{versions} on {platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"


def commit(root: Path) -> str | None:
    """The commit that a folder is at, ``-dirty`` behind it if tracked files differ; None outside of git."""
    short = _git(root, "rev-parse", "--short", "HEAD")
    if short is None:
        return None

    changes = _git(root, "status", "--porcelain", "--untracked-files=no", "--", *MEASURED)
    return f"{short}-dirty" if changes else short


def _git(root: Path, *arguments: str) -> str | None:
    try:
        result = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True)
    except FileNotFoundError:  # no git here
        return None
    return result.stdout.strip() if result.returncode == 0 else None
