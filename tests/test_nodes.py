"""Runs on clusters of several nodes, each with its own address, processes and disk."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import raypfl
from tests.nodes import Node, Nodes, allowed
from tests.runs import experiment

pytestmark = pytest.mark.skipif(not allowed(), reason="this machine allows no namespaces")

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
"""A folder that each node has for itself."""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Callable[..., Nodes]]:
    """Starts a cluster whose nodes share the test's folder; it ends with the test."""
    running = []

    def start(*cpus: int, **options: Any) -> Nodes:
        running.append(Nodes(cpus, visible=[tmp_path], **options))
        return running[-1]

    yield start
    for nodes in running:
        nodes.end()


def on_nodes(nodes: Nodes, tmp_path: Path, **changes: Any) -> Path:
    """The file of an experiment on the cluster, whose results go to the driver's own disk."""
    defaults = {"engine__backend": "ray", "ray__address": nodes.address, "output": OWN_DISK / "runs"}
    file = tmp_path / "experiment.yaml"
    file.write_text(experiment(tmp_path, **(defaults | changes)).to_yaml())
    return file


def ended(nodes: Nodes, file: Path, where: Node | None = None) -> dict[str, Any]:
    """What a run ends with that is started on the head, or on another node."""
    done = nodes.python(where or nodes.head, "-c", RUN, str(file))
    assert "END " in done.stdout, done.stdout + done.stderr
    return json.loads(done.stdout.rpartition("END ")[2])


def write_images(folder: Path, count: int) -> None:
    """Noise in two classes, as ``npy`` reads it: 12 KB an image."""
    folder.mkdir(parents=True)
    draw = np.random.default_rng(0)
    np.save(folder / "image.npy", draw.integers(0, 256, (count, 64, 64, 3), dtype=np.uint8))
    np.save(folder / "labels.npy", np.arange(count) % 2)


def test_data_that_only_the_driver_has_reach_each_node_once(tmp_path, cluster):
    nodes = cluster(0, 2)
    (worker,) = nodes.workers
    write_images(nodes.head.disk(OWN_DISK / "images"), 2000)
    settings = {"data": f"{{name: npy, root: {OWN_DISK}/images}}", "rounds": 2, "model": "{name: mlp, hidden: [4]}"}
    before = worker.received
    result = ended(nodes, on_nodes(nodes, tmp_path, ray__actors=2, **settings))
    size = sum(file.stat().st_size for file in worker.disk(Path("/tmp/cache")).rglob("*.arrow"))
    print(f"{(worker.received - before) / 1e6:.1f} MB received for {size / 1e6:.1f} MB of data")
    assert result["actors"] == 2 and size > 24e6
    assert size < worker.received - before < 1.5 * size
    write_images(tmp_path / "images", 2000)
    settings["data"] = f"{{name: npy, root: {tmp_path}/images}}"
    assert raypfl.run(experiment(tmp_path, **settings)).weights_hash == result["hash"]
