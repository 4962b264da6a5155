"""Call the command line within this process."""

from __future__ import annotations

import json

from typer.testing import CliRunner, Result

from raypfl.cli.app import app


def raypfl(*words: str) -> Result:
    """Run a command; returns its exit code and what it printed."""
    return CliRunner().invoke(app, words)


def raypfl_json(*words: str) -> dict:
    """Run a command that must succeed; returns the JSON that it prints for programs."""
    result = raypfl(*words, "--json", "--quiet")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)
