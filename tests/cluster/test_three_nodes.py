"""The whole chain: a machine outside submits a sweep and then a run to three nodes, of which some die."""

from __future__ import annotations

import sys

import pytest

import raypfl
from tests.support.nodes import Nodes, can_isolate, rounds_saved, wait_for
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

        def submit(*words: str):
            print("$ raypfl submit", *words, flush=True)
            command = [sys.executable, "-m", "raypfl", "submit", "--address", address, *words]
            return nodes.outside.start(command, env=nodes.environment, folder=tmp_path)

        sweep = submit("tune", "sweep.yaml")
        wait_for(lambda: len(list(tmp_path.glob("sweep/trials/*/checkpoints/*-round-4"))) >= 2)
        print("-- the third node dies", flush=True)
        nodes.workers[1].end()
        assert sweep.wait(600) == 0

        best = raypfl.Experiment.from_yaml(tmp_path / "sweep/best.yaml")
        trials = [raypfl.Result.load(file.parent) for file in tmp_path.glob("sweep/trials/*/summary.json")]
        finished = [trial for trial in trials if trial.status == "finished"]
        print(f"{len(trials)} trials, {len(finished)} to their ends")
        assert len(trials) == 6 and 0 < len(finished) < 6
        (same,) = [trial for trial in finished if trial.experiment.method == best.method]
        best = best.replace(output=str(tmp_path / "alone"))
        alone = raypfl.run(best)
        assert same.weights_hash == alone.weights_hash

        nodes.add(cpus=1)
        on_ray = ["engine.backend=ray", "ray.actors=3", "tracking.mlflow=false"]
        run = submit("run", "sweep/best.yaml", "--run-dir", str(tmp_path / "run"), *on_ray)
        wait_for(lambda: rounds_saved(tmp_path / "run") >= 8)
        print("-- the second node dies", flush=True)
        nodes.workers[0].end()
        assert run.wait(600) == 0
        result = raypfl.Result.load(tmp_path / "run")
        print(f"alone {alone.weights_hash}\nhere  {result.weights_hash}")
        assert result.weights_hash == alone.weights_hash
    finally:
        nodes.end()
