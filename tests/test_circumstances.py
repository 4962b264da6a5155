"""What a measurement notes of the code and the machine."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from benchmarks.circumstances import circumstances, commit


def git(folder: Path, *arguments: str) -> None:
    who = ["-c", "user.name=somebody", "-c", "user.email=somebody@example.org"]
    subprocess.run(["git", "-C", str(folder), *who, *arguments], check=True, capture_output=True)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for folder in ("raypfl", "benchmarks/results", "docs"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "file").write_text("as committed")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-q", "-m", "all of it")
    return tmp_path


def test_a_measurement_notes_the_commit_it_is_of(tree: Path) -> None:
    found = commit(tree)
    assert found is not None and re.fullmatch("[0-9a-f]{7,}", found)


@pytest.mark.parametrize("changed", ["raypfl/file", "benchmarks/file2"])
def test_a_changed_tree_is_told_from_its_commit(tree: Path, changed: str) -> None:
    clean = commit(tree)
    (tree / changed).write_text("as it is now")
    git(tree, "add", "-A")
    assert commit(tree) == f"{clean}-dirty"


def test_results_that_are_being_written_do_not_make_the_tree_another_one(tree: Path) -> None:
    clean = commit(tree)
    (tree / "benchmarks/results/file").write_text("of a new measurement")
    (tree / "docs/file").write_text("drawn anew")
    assert commit(tree) == clean


def test_outside_of_git_there_is_no_commit_but_a_date_and_a_load(tmp_path: Path) -> None:
    found = circumstances(tmp_path)
    assert found["commit"] is None
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\dZ", found["date"])
    assert found["load"] >= 0
