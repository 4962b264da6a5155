"""A program for `test_changing_cluster`: it runs experiments on a cluster of its own, which a node joins and leaves.

It prints one line of JSON: the hashes of its runs, their warnings, how many processes trained, and what an autoscaler
would have been asked for.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster

import raypfl
from raypfl.engine.events import Checkpointed, Event, Warned
from raypfl.methods import Ditto
from raypfl.runs import driver
from tests.support.runs import experiment

JOINS = 2
LEAVES = 6
"""Rounds with a checkpoint, after which the node joins and leaves."""

PATIENCE = 120.0

FOLDER = "RAYPFL_TEST_FOLDER"


class MarksItsProcesses(Ditto):
    """Leave a file for each process that has built its network, and one for each that has trained."""

    def network(self, module):
        Path(os.environ[FOLDER], f"built-{os.getpid()}").touch()
        return module

    def train(self, clients, theta):
        Path(os.environ[FOLDER], f"trained-{os.getpid()}").touch()
        return super().train(clients, theta)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(condition)
        time.sleep(0.1)


def ray_experiment(folder: Path, **changes: Any) -> raypfl.Experiment:
    """Six clients a round in six groups, on Ray."""
    method = "tests.support.changing_cluster:MarksItsProcesses"
    changes = {"engine__backend": "ray"} | changes
    return experiment(folder, method=method, rounds=10, engine__group_size=1, **changes)


def main(folder: Path) -> None:
    os.environ[FOLDER] = str(folder)
    # Without this, other programs on this machine would find this cluster and join it.
    ray._private.utils.write_ray_address = lambda *arguments: None

    head = {"num_cpus": 1, "include_dashboard": False, "temp_dir": f"/tmp/raypfl-{os.getpid()}"}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    address = cluster.address
    report = {"warned": []}

    def count_processes(kind: str) -> int:
        return len(list(folder.glob(f"{kind}-*")))

    def change_cluster(event: Event) -> None:
        if isinstance(event, Warned):
            report["warned"].append(event.text)
        if not isinstance(event, Checkpointed):
            return

        if event.round == JOINS:
            report["before"] = count_processes("trained")
            cluster.add_node(num_cpus=2)
            time.sleep(1.5)  # the server looks once a second
        elif event.round == JOINS + 2:
            wait_until(lambda: count_processes("built") >= first_networks + 2)
            time.sleep(0.5)
        elif event.round == LEAVES:
            report["after"] = count_processes("trained")
            cluster.remove_node(*cluster.worker_nodes)
            wait_until(lambda: sum(node["Alive"] for node in ray.nodes()) == 1)
            time.sleep(1.5)

    def record_demand(event: Event) -> None:
        if isinstance(event, Checkpointed) and event.round == JOINS:
            from ray.autoscaler.v2.sdk import get_cluster_status

            demands = get_cluster_status(address).resource_demands.ray_task_actor_demand
            report["demand"] = []
            for demand in demands:
                for bundle in demand.bundles_by_count:
                    report["demand"].append([dict(bundle.bundle), bundle.count])

    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        with raypfl.session(ray_experiment(folder)):
            first_networks = 3  # this process's, the server's, and that of the first client actor
            grown = driver.run(ray_experiment(folder / "a"), listeners=[change_cluster], lockstep=True)

            pools = "[{cpus_per_actor: 0.5, actors: 1}, {cpus_per_actor: 0.1, actors: 2}]"
            pooled = raypfl.run(ray_experiment(folder / "b", ray__pools=pools))

            limited = ray_experiment(folder / "c", ray__max_actors=4)
            demanding = driver.run(limited, listeners=[record_demand], lockstep=True)

        report["hashes"] = [result.weights_hash for result in (grown, pooled, demanding)]
        print(json.dumps(report))
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
