"""Runs on clusters of several nodes, each with its own address, processes and disk."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import raypfl
from tests.support.nodes import Nodes, can_isolate
from tests.support.runs import experiment

pytestmark = pytest.mark.skipif(not can_isolate(), reason="this machine allows no namespaces")

RUN = """
import json, sys, raypfl
warnings = []
def hear(event):
    if type(event).__name__ == "Warned":
        warnings.append(event.text)
try:
    result = raypfl.run(raypfl.Experiment.from_yaml(sys.argv[1]), listeners=[hear])
    print("END", json.dumps({"hash": result.weights_hash, "actors": result.metadata["actors"], "warnings": warnings}))
except raypfl.RaypflError as error:
    print("SENTENCE", error)
"""

OWN_DISK = Path("/tmp/own")
"""A folder that is another one on each node."""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the nodes of `pair` share."""
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def pair(shared: Path) -> Iterator[Nodes]:
    """A head without CPUs, and a worker with two; earlier tests may have filled their caches."""
    nodes = Nodes([0, 2], visible=[shared])
    yield nodes
    nodes.end()


def on_nodes(nodes: Nodes, folder: Path, **changes: Any) -> Path:
    """The file of an experiment on the cluster, in a folder; results go to the driver's own disk."""
    defaults = {"engine__backend": "ray", "ray__address": nodes.address, "output": OWN_DISK / "runs"}
    file = folder / f"{secrets.token_hex(4)}.yaml"
    file.write_text(experiment(folder, **(defaults | changes)).to_yaml())
    return file


def last_words(nodes: Nodes, file: Path, **options: Any) -> str:
    """Start a run on the head; return the line that it prints at its end."""
    result = nodes.python(nodes.head, "-c", RUN, str(file), **options)
    lines = [line for line in result.stdout.splitlines() if line.startswith(("END ", "SENTENCE "))]
    assert len(lines) == 1, result.stdout + result.stderr
    return lines[0]


def outcome(nodes: Nodes, file: Path, **options: Any) -> dict[str, Any]:
    """Start a run on the head that must not fail; return its hash, warnings and number of actors."""
    line = last_words(nodes, file, **options)
    assert line.startswith("END "), line
    return json.loads(line.removeprefix("END "))


def write_images(folder: Path, count: int) -> None:
    """Write noise in two classes, as ``npy`` reads it: 12 KB an image."""
    folder.mkdir(parents=True)
    draw = np.random.default_rng(0)
    np.save(folder / "image.npy", draw.integers(0, 256, (count, 64, 64, 3), dtype=np.uint8))
    np.save(folder / "labels.npy", np.arange(count) % 2)


@pytest.mark.thorough
def test_data_that_only_the_driver_has_reach_each_node_once(pair, shared, tmp_path):
    (worker,) = pair.workers
    write_images(pair.head.disk(OWN_DISK / "images"), 2000)
    settings = {"data": f"{{name: npy, root: {OWN_DISK}/images}}", "rounds": 2, "model": "{name: mlp, hidden: [4]}"}

    before = worker.received
    result = outcome(pair, on_nodes(pair, shared, ray__actors=2, **settings))
    size = sum(file.stat().st_size for file in worker.disk(Path("/tmp/cache")).rglob("*.arrow"))
    print(f"{(worker.received - before) / 1e6:.1f} MB received for {size / 1e6:.1f} MB of data")
    assert result["actors"] == 2 and size > 24e6
    assert size < worker.received - before < 1.5 * size

    write_images(tmp_path / "images", 2000)
    settings["data"] = f"{{name: npy, root: {tmp_path}/images}}"
    assert raypfl.run(experiment(tmp_path, **settings)).weights_hash == result["hash"]


@pytest.mark.slow
def test_a_server_is_on_another_node_only_if_that_reaches_its_checkpoints(pair, shared, tmp_path):
    large = {"ray__actors": 1, "ray__cpus_for_server": 1}
    sentence = last_words(pair, on_nodes(pair, shared, **large))
    assert "The server reserves 1 CPUs and 0 GPUs, which this node does not have" in sentence
    assert "Set checkpoint.location to an address that all nodes can reach" in sentence

    result = outcome(pair, on_nodes(pair, shared, **large, checkpoint__location=f"file://{shared}/checkpoints"))
    assert result["hash"] == raypfl.run(experiment(tmp_path)).weights_hash


@pytest.mark.slow
def test_a_broadcast_is_sent_once_to_a_node(pair, shared, tmp_path):
    (worker,) = pair.workers
    settings = {"model": "{name: mlp, hidden: [16000]}", "method": "fedavg", "rounds": 12}
    model = 4 * 16_000 * (64 + 10)

    before = worker.received
    result = outcome(pair, on_nodes(pair, shared, ray__actors=2, evaluation__every=0, **settings))
    arrived = worker.received - before

    print(f"{arrived / 1e6:.0f} MB arrived in 12 rounds, for two actors, of a model of {model / 1e6:.1f} MB")
    assert 12 * model < arrived < 1.2 * 12 * model
    assert result["hash"] == raypfl.run(experiment(tmp_path, evaluation__every=0, **settings)).weights_hash


SWEEP = """
recipe: {base}
experiment: {{method: fedavg, data.val_fraction: 0.2, ray.address: "{address}"}}
search: {{training.lr: {{choice: [0.1, 0.2]}}}}
trials: 2
"""
STUDY = """
name: a-study
experiment: {{rounds: 2, data: digits, ray: {{address: "{address}"}}, tracking: {{mlflow: false}}}}
methods: {{FedAvg: fedavg}}
metrics: {{local: {{protocol: local, model: global}}}}
"""


@pytest.mark.slow
@pytest.mark.parametrize(("command", "text"), [("tune", SWEEP), ("study", STUDY)])
def test_a_sweep_or_study_whose_output_another_node_lacks_is_refused_before_anything_runs(pair, shared, command, text):
    (worker,) = pair.workers
    file = shared / f"{command}.yaml"
    file.write_text(text.format(base=on_nodes(pair, shared), address=pair.address))
    output = OWN_DISK / command

    def refusal() -> str:
        result = pair.python(pair.head, "-m", "raypfl", command, str(file), f"output={output}", "--quiet")
        assert result.returncode == 2, result.stdout + result.stderr
        return " ".join(result.stderr.split())

    assert f"on node {worker.address} there is no such folder. Nothing was started. Set output to" in refusal()
    assert not list(pair.head.disk(output).rglob("*.yaml"))

    elsewhere = output if command == "tune" else output / "cells"
    for folder in (elsewhere, elsewhere / "tune"):
        worker.disk(folder).mkdir(parents=True, exist_ok=True)
    assert f"on node {worker.address} it is another folder" in refusal()


OWN_METHOD = """
from my_losses import pulled
from raypfl.methods import FedAvg


class Mine(FedAvg):
    lam: float = 0.5

    def train(self, clients, theta):
        return {"theta": raypfl_mean(clients, clients.sgd(pulled(clients, self.lam), theta, anchor=theta))}


def raypfl_mean(clients, trained):
    from raypfl import Mean

    return Mean(trained, weight=clients.num_samples)
"""
OWN_LOSSES = """
def pulled(clients, lam):
    return lambda p, batch, anchor: clients.loss(p, batch) + lam / 2 * (p - anchor).square().sum()
"""


@pytest.mark.slow
def test_a_users_modules_reach_other_nodes_with_their_imports(pair, shared, tmp_path, monkeypatch):
    for folder in (pair.head.disk(OWN_DISK / "mine"), tmp_path):
        folder.mkdir(exist_ok=True, parents=True)
        (folder / "my_methods.py").write_text(OWN_METHOD)
        (folder / "my_losses.py").write_text(OWN_LOSSES)
    monkeypatch.syspath_prepend(tmp_path)
    changes = {"method": "my_methods:Mine", "method__lam": 0.25}
    file = on_nodes(pair, shared, ray__actors=2, **changes)
    result = outcome(pair, file, folder=OWN_DISK / "mine")
    assert result["hash"] == raypfl.run(experiment(tmp_path, **changes)).weights_hash
