"""The command line within this process, as several tests call it."""

from __future__ import annotations

import json

from typer.testing import CliRunner, Result

from raypfl.cli.app import app


def raypfl(*words: str) -> Result:
    """What a command did: its exit code and what it printed."""
    return CliRunner().invoke(app, words)


def told(*words: str) -> dict:
    """What a command that went well prints for programs."""
    result = raypfl(*words, "--json", "--quiet")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)
