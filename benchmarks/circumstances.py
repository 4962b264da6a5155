"""Of which code, when, and beside how much else on the machine something was measured."""

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
"""What a change of makes a tree another one than its commit; results are written while one measures."""


def circumstances(root: Path = ROOT) -> dict[str, Any]:
    """``commit`` (see below), ``date`` (UTC) and ``load``, the average over the last minute."""
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
    return short + ("-dirty" if _git(root, "status", "--porcelain", "--untracked-files=no", "--", *MEASURED) else "")


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True)
    except FileNotFoundError:  # no git here
        return None
    return done.stdout.strip() if done.returncode == 0 else None
