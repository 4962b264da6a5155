"""The commit that a Git checkout is at."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path


def commit(root: Path, paths: Sequence[str] = (".",)) -> str | None:
    """Return a folder's short commit, followed by ``-dirty`` if tracked files in `paths` have changed.

    None: git is not installed, or does not track the folder, such as a package installed in someone's repository.
    """
    if not _git(root, "ls-files", "--", *paths):
        return None
    short = _git(root, "rev-parse", "--short", "HEAD")
    changes = _git(root, "status", "--porcelain", "--untracked-files=no", "--", *paths)
    return f"{short}-dirty" if changes else short


def _git(root: Path, *arguments: str) -> str:
    """Return the output of a git command; empty if it fails, or if git is not installed."""
    try:
        result = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True)
    except FileNotFoundError:
        return ""
    return result.stdout.strip() if result.returncode == 0 else ""
