"""A run that trained nothing says so where its result is printed."""

from __future__ import annotations

from typer.testing import CliRunner

from raypfl.cli.app import app


def test_a_run_in_which_nobody_meets_the_deadline_says_that_nothing_was_trained(tmp_path):
    words = ["rounds=2", "devices.hardware=lognormal", "cohort.deadline=0.001", "engine.backend=inline", "-q"]
    words += [f"--run-dir={tmp_path / 'run'}", "tracking.mlflow=false", "method=fedavg"]
    result = CliRunner().invoke(app, ["run", *words])
    assert "nothing was trained, since no client counted in any round" in " ".join(result.output.split()), result.output

    finished = CliRunner().invoke(app, ["run", *words[:2], *words[3:5], f"--run-dir={tmp_path / 'other'}", *words[6:]])
    assert "fedavg" in finished.output and "nothing was trained" not in finished.output
