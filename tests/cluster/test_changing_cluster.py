"""A cluster that a node joins and leaves during a run, and pools of unequal actors, on real Ray nodes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import raypfl
from tests.support.changing_cluster import FOLDER, ray_experiment

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_actors_grow_and_shrink_with_the_cluster_and_pools_of_any_shape_give_the_same_bits(tmp_path: Path, monkeypatch):
    program = [sys.executable, "-m", "tests.support.changing_cluster", str(tmp_path)]
    result = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout.splitlines()[-1])

    monkeypatch.setenv(FOLDER, str(tmp_path))
    inline = raypfl.run(ray_experiment(tmp_path / "inline", engine__backend="inline"))
    assert report["hashes"] == [inline.weights_hash] * 3
    assert (report["before"], report["after"]) == (1, 3)
    assert "The cluster has changed: the run now has 3 client actors, not 1." in report["warned"]
    assert "The cluster has changed: the run now has 1 client actors, not 3." in report["warned"]
    assert report["demand"] == [[{"CPU": 1.0}, 3]]  # of four actors, three wait for an autoscaler's nodes
