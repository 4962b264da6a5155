"""The first hour on a GPU as a whole, and two processes of it at once, on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.gpu.__main__ import STEPS, main
from benchmarks.gpu.sharing import _hashes, together
from benchmarks.gpu.steps import Options
from benchmarks.gpu.work import Job

pytestmark = pytest.mark.slow


def test_processes_that_share_a_device_train_the_same_models_twice():
    two = together(_hashes, 2, Options("cpu", quick=True), {"tiny": Job("mlp", (1, 4, 4), cohort=2)})
    assert len({run["tiny"] for runs in two for run in runs}) == 1 and [len(runs) for runs in two] == [2, 2]


def test_a_rehearsal_on_a_cpu_goes_through_every_step(tmp_path: Path):
    file = tmp_path / "rows"
    assert main(["--device", "cpu", "--quick", "--minutes", "30", "--json", str(file)]) == 0
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert {row["step"] for row in rows} == {"begin", *STEPS, "goal"}
    assert not [row for row in rows if "failed" in row or "error" in row or row.get("right") is False]
