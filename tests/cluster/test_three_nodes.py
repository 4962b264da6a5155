"""The whole chain: from a machine outside, a sweep and then a run are submitted to three nodes, of which some die."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import raypfl
from raypfl.storage.checkpoints import last_round
from tests.support.nodes import Nodes, can_isolate
from tests.support.runs import experiment

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not can_isolate(), reason="this machine allows no namespaces"),
]

SWEEP = """
recipe: base.yaml
search: {method.lam: {loguniform: [0.001, 10]}, training.lr: {loguniform: [0.01, 0.5]}}
trials: 6
scheduler: {name: asha, grace: 4}
"""


def wait_for(what: Callable[[], object], seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.2)


def rounds_done(run: Path) -> int:
    return last_round(str(run / "checkpoints")) if (run / "checkpoints").exists() else 0


def test_a_sweep_and_a_run_that_are_submitted_to_three_nodes_survive_two_of_them(tmp_path):
    changes = {
        "method": "tests.support.federated_methods:Slow",
        "rounds": 24,
        "evaluation__every": 4,
        "checkpoint__every": 4,
    }
    base = experiment(tmp_path, **changes, data__val_fraction=0.2, output=tmp_path)
    (tmp_path / "base.yaml").write_text(base.to_yaml())
    (tmp_path / "sweep.yaml").write_text(SWEEP)
    nodes = Nodes([1, 1, 1], visible=[tmp_path], dashboard=True)
    try:
        address = f"http://{nodes.head.address}:8265"

        def submitted(*words: str):
            print("$ raypfl submit", *words, flush=True)
            whole = ["-m", "raypfl", "submit", "--address", address, *words]
            return nodes.outside.start([sys.executable, *whole], env=nodes.environment, folder=tmp_path)

        sweep = submitted("tune", "sweep.yaml")
        wait_for(lambda: len(list(tmp_path.glob("sweep/trials/*/checkpoints/*-round-4"))) >= 2)
        print("-- the third node dies", flush=True)
        nodes.workers[1].end()
        assert sweep.wait(600) == 0
        best = raypfl.Experiment.from_yaml(tmp_path / "sweep/best.yaml")
        found = [raypfl.Result.load(run.parent) for run in tmp_path.glob("sweep/trials/*/summary.json")]
        finished = [run for run in found if run.status == "finished"]
        print(f"{len(found)} trials, {len(finished)} to their ends")
        assert len(found) == 6 and 0 < len(finished) < 6
        (same,) = [run for run in finished if run.experiment.method == best.method]
        best = best.replace(output=str(tmp_path / "alone"))
        alone = raypfl.run(best)
        assert same.weights_hash == alone.weights_hash

        nodes.add(cpus=1)
        on_ray = ["engine.backend=ray", "ray.actors=3", "tracking.mlflow=false"]
        run = submitted("run", "sweep/best.yaml", "--run-dir", str(tmp_path / "run"), *on_ray)
        wait_for(lambda: rounds_done(tmp_path / "run") >= 8)
        print("-- the second node dies", flush=True)
        nodes.workers[0].end()
        assert run.wait(600) == 0
        result = raypfl.Result.load(tmp_path / "run")
        print(f"alone {alone.weights_hash}\nhere  {result.weights_hash}")
        assert result.weights_hash == alone.weights_hash
    finally:
        nodes.end()
