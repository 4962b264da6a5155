"""Call the command line within this process."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import pytest
from typer.testing import CliRunner, Result

from raypfl.cli.app import app
from raypfl.runs import driver
from raypfl.runs.planning.plan import Plan
from raypfl.runs.records import description
from raypfl.runs.result import RunResult
from tests.support.runs import Interrupt


def raypfl(*words: str, draws: bool = False) -> Result:
    """Run a command; returns its exit code and what it printed.

    Its picture is an empty file unless it `draws`, which takes half a second.
    """
    with contextlib.ExitStack() as patches:
        if not draws:
            patches.enter_context(mock.patch("raypfl.results.drawing.draw", _empty_picture))
            patches.enter_context(mock.patch("raypfl.cli.actions.plan.draw", _empty_picture))
        return CliRunner().invoke(app, words)


def _empty_picture(shown: Sequence[RunResult] | Plan, path: Path, title: str = "") -> Path:
    path.touch()
    return path


def raypfl_json(*words: str) -> dict:
    """Run a command that must succeed; returns the JSON that it prints for programs."""
    result = raypfl(*words, "--json", "--quiet")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def hashes(outcome: dict) -> list[str]:
    """The weights' hash of each run in a command's JSON."""
    return [run["weights_hash"] for run in outcome["runs"]]


def interrupted(monkeypatch: pytest.MonkeyPatch, method: str, *words: str, round: int = 1) -> Result:
    """Carry out a command; Ctrl-C interrupts the run of `method` after `round`."""
    resume = driver.resume
    interrupt = Interrupt(round)

    def resume_interrupted(folder, *, listeners, **options):
        run_method = type(description(folder).method).__name__.lower()
        if run_method == method:
            listeners = [*listeners, interrupt]
        return resume(folder, listeners=listeners, **options)

    with monkeypatch.context() as patch:
        patch.setattr(driver, "resume", resume_interrupted)
        return raypfl(*words)
