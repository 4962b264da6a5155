"""What `raypfl tune` says while it runs, and of a sweep that is over."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import yaml

from raypfl import Experiment
from raypfl.cli.actions import tune as implementation
from raypfl.integrations.tuning.result import SweepResult
from raypfl.integrations.tuning.sweep import load
from raypfl.integrations.tuning.trial import Trial
from tests.support.command import raypfl
from tests.support.sweeps import small


def test_a_sweep_that_was_over_before_is_not_called_running_and_is_tracked_by_its_own_command(tmp_path: Path):
    file = tmp_path / "small.yaml"
    file.write_text(yaml.safe_dump(small(trials=1)))
    words = ["tune", str(file), f"output={tmp_path}", "rounds=1", "engine.backend=inline"]

    first = raypfl(*words)
    assert "small: running" in first.stderr and "trial 00000: finished after round 1" in first.stderr
    again = raypfl(*words)
    assert again.stderr == "small: nothing is left to run\n"
    assert again.stdout == first.stdout

    refused = raypfl("track", str(tmp_path / "small"))
    assert refused.exit_code == 2 and f"`raypfl tune {tmp_path}/small/sweep.yaml` repeats no trial" in refused.stderr


def test_a_sweep_that_is_interrupted_before_its_first_trial_says_how_to_continue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    file = tmp_path / "small.yaml"
    file.write_text(yaml.safe_dump(small()))

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(implementation, "tune", interrupt)
    stopped = raypfl("tune", str(file), "rounds=2")
    assert stopped.exit_code == 130
    assert stopped.stderr == f"Stopped. To continue: raypfl tune {file} rounds=2\n"


def test_an_undefined_metric_is_shown_as_none(tmp_path: Path):
    sweep = load(small(trials=1), [f"output={tmp_path}"])
    undefined = Trial("0", {}, "finished", values={"accuracy/val": math.nan})
    result = SweepResult(sweep, [undefined], ["max"], Experiment().measures)
    assert implementation._number(result, undefined, "accuracy/val") == "–"
