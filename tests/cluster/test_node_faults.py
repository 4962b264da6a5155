"""A run ends with the bits of an undisturbed one although nodes die, freeze or cannot be reached."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import raypfl
from tests.support.nodes import Node, Nodes, can_isolate, rounds_saved, wait_for
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


def start(nodes: Nodes, driver: Node, folder: Path, **changes: Any) -> subprocess.Popen[str]:
    """Start a run with an actor on each node and results in a folder; return once it has a checkpoint."""
    on_nodes = {"engine__backend": "ray", "ray__address": nodes.address, "ray__actors": 2, "method__marks": folder}
    settings = SETTINGS | on_nodes | changes
    (folder / "mine.yaml").write_text(experiment(folder, **settings).to_yaml())
    command = [sys.executable, "-m", "raypfl", "run", str(folder / "mine.yaml"), "--run-dir", str(folder / "run")]

    run = driver.start(command, env=nodes.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    wait_for(lambda: rounds_saved(folder / "run") >= 5, seconds=120)
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
    output, _ = run.communicate(timeout=300)

    print(output)
    assert run.returncode == 0 and hash_in(tmp_path) == undisturbed

    def no_actor_is_left() -> bool:
        commands = [command for _, command in nodes.head.processes() if "Agent" not in command]
        return not any("Actor" in command for command in commands)

    wait_for(no_actor_is_left, seconds=120)


def test_a_head_that_dies_ends_the_run_with_how_to_continue(tmp_path, nodes, undisturbed):
    nodes.environment["RAY_gcs_rpc_server_reconnect_timeout_s"] = "5"
    (worker,) = nodes.workers
    run = start(nodes, worker, tmp_path)

    nodes.head.end()
    output, _ = run.communicate(timeout=300)

    print(output)
    assert run.returncode != 0 and f"raypfl resume {tmp_path / 'run'}" in output
    wait_for(lambda: not any(command.startswith("ray::") for _, command in worker.processes()), seconds=120)

    (tmp_path / "over").touch()
    resumed = raypfl.resume(tmp_path / "run", overrides=["engine.backend=inline"])
    assert resumed.weights_hash == undisturbed
