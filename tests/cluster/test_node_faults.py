"""Nodes that die, freeze or cannot be reached in the middle of a run, which ends with an undisturbed one's bits."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import raypfl
from raypfl.storage.checkpoints import last_round
from tests.support.nodes import Node, Nodes, can_isolate
from tests.support.runs import experiment

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not can_isolate(), reason="this machine allows no namespaces"),
]

SETTINGS = {
    "method": "tests.support.federated_methods:WaitsForTheEndOfTrouble",
    "rounds": 30,
    "evaluation__every": 15,
    "checkpoint__every": 5,
}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "over").touch()
    return raypfl.run(experiment(folder, **SETTINGS, method__marks=folder)).weights_hash


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    """A head and a worker with one CPU each, which share the test's folder."""
    cluster = Nodes([1, 1], visible=[tmp_path])
    yield cluster
    cluster.end()


def wait_for(what: Callable[[], object], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.2)


def start(nodes: Nodes, where: Node, folder: Path, **changes: Any) -> subprocess.Popen[str]:
    """Start a run with an actor on each node, whose results go to a folder; it has a checkpoint when this returns."""
    on_nodes = {"engine__backend": "ray", "ray__address": nodes.address, "ray__actors": 2, "method__marks": folder}
    settings = SETTINGS | on_nodes | changes
    (folder / "mine.yaml").write_text(experiment(folder, **settings).to_yaml())
    command = [sys.executable, "-m", "raypfl", "run", str(folder / "mine.yaml"), "--run-dir", str(folder / "run")]
    run = where.start(command, env=nodes.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    wait_for(lambda: (folder / "run/checkpoints").exists() and last_round(str(folder / "run/checkpoints")) >= 5)
    return run


def hash_in(folder: Path) -> str:
    return str(json.loads((folder / "run/summary.json").read_text())["weights_hash"])


def dies(worker: Node) -> None:
    worker.end()


def is_cut_off_for_some_seconds(worker: Node) -> None:
    worker.unplug()
    time.sleep(5)
    worker.plug()


def is_cut_off_for_long(worker: Node) -> None:
    worker.unplug()
    time.sleep(45)
    worker.plug()


def has_a_raylet_that_freezes(worker: Node) -> None:
    assert worker.signal("raylet/raylet", signal.SIGSTOP) == 1
    time.sleep(45)
    worker.signal("raylet/raylet", signal.SIGCONT)


@pytest.mark.parametrize("happens", [dies, is_cut_off_for_some_seconds, is_cut_off_for_long, has_a_raylet_that_freezes])
def test_a_node_that_fails_changes_no_bit(tmp_path, nodes, undisturbed, happens):
    (worker,) = nodes.workers
    run = start(nodes, nodes.head, tmp_path)
    happens(worker)
    (tmp_path / "over").touch()
    told, _ = run.communicate(timeout=300)
    print(told)
    assert run.returncode == 0 and hash_in(tmp_path) == undisturbed
    wait_for(lambda: not any("Actor" in command for _, command in nodes.head.processes() if "Agent" not in command))


def test_a_head_that_dies_ends_the_run_with_how_to_continue(tmp_path, nodes, undisturbed):
    nodes.environment["RAY_gcs_rpc_server_reconnect_timeout_s"] = "5"
    (worker,) = nodes.workers
    run = start(nodes, worker, tmp_path)
    nodes.head.end()
    told, _ = run.communicate(timeout=300)
    print(told)
    assert run.returncode != 0 and f"raypfl resume {tmp_path / 'run'}" in told
    wait_for(lambda: not any(command.startswith("ray::") for _, command in worker.processes()))
    (tmp_path / "over").touch()
    resumed = raypfl.resume(tmp_path / "run", overrides=["engine.backend=inline"])
    assert resumed.weights_hash == undisturbed
