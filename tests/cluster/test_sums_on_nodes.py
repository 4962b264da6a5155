"""Sums that nodes add up before the head gets them, on a cluster of several nodes of which one dies."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

import raypfl
from tests.support.nodes import Nodes, can_isolate, wait_for
from tests.support.runs import experiment

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not can_isolate(), reason="this machine allows no namespaces"),
]

MODEL = 4 * 16_000 * (64 + 10)
SETTINGS = {
    "method": "tests.support.federated_methods:MovesModels",
    "partition__clients": 48,
    "cohort__size": 48,
    "model": "{name: mlp, hidden: [16000]}",
    "engine__group_size": 1,
    "rounds": 4,
    "evaluation__every": 0,
    "checkpoint__every": 0,
}


def trainings(folder: Path) -> Counter[str]:
    """How often each client was trained in round 4."""
    return Counter((folder / "trained").read_text().split())


def test_nodes_add_sums_up_and_the_groups_of_one_that_dies_run_again_to_the_same_bits(tmp_path: Path):
    nodes = Nodes([0, 1, 1, 1], visible=[tmp_path])
    try:
        on_nodes = {"engine__backend": "ray", "ray__address": nodes.address, "ray__actors": 3}
        settings = experiment(tmp_path, **SETTINGS, **on_nodes, method__marks=tmp_path)
        (tmp_path / "run.yaml").write_text(settings.to_yaml())
        command = ["-m", "raypfl", "run", str(tmp_path / "run.yaml"), "--run-dir", str(tmp_path / "run")]
        run = nodes.head.start(
            [sys.executable, *command], env=nodes.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )

        wait_for(lambda: (tmp_path / "waiting").exists() and (tmp_path / "waiting").read_text())
        # Some may be in the queue of the actor that waits.
        wait_for(lambda: trainings(tmp_path).total() > 40)
        time.sleep(2)
        received = nodes.head.received
        waiting = (tmp_path / "waiting").read_text()
        next(node for node in nodes.workers if node.address != waiting).end()
        (tmp_path / "over").touch()
        output, _ = run.communicate(timeout=300)
    finally:
        nodes.end()

    print(output, f"{received / MODEL:.1f} models received for 4 x 48")
    assert run.returncode == 0
    lost = [int(number) for number in re.findall(r"Sums of (\d+) groups? are lost", output)]
    times = trainings(tmp_path)
    assert len(times) == 48 and times.total() == 48 + sum(lost) and set(times.values()) == {1, 2}

    inline = experiment(tmp_path, **SETTINGS, method__marks=tmp_path)
    assert raypfl.Result.load(tmp_path / "run").weights_hash == raypfl.run(inline).weights_hash
