"""A program for `test_changing_cluster`: runs on a cluster of its own that a node joins and leaves meanwhile.

It prints a JSON line: the hashes of its runs, what they warned of, how many processes trained, and what an autoscaler
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

JOINS, LEAVES = 2, 6
"""Rounds, of which checkpoints are kept, after which the node joins and leaves."""

PATIENCE = 120.0

FOLDER = "RAYPFL_TEST_FOLDER"


class Seen(Ditto):
    """Leaves a file of each process that has built its network, and of each that has trained."""

    def network(self, module):
        Path(os.environ[FOLDER], f"built-{os.getpid()}").touch()
        return module

    def train(self, clients, theta):
        Path(os.environ[FOLDER], f"trained-{os.getpid()}").touch()
        return super().train(clients, theta)


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not holds():
        if time.monotonic() > end:
            raise TimeoutError(holds)
        time.sleep(0.1)


def described(folder: Path, **changes: Any) -> raypfl.Experiment:
    """Six clients a round in six groups, on Ray."""
    method = "tests.support.changing_cluster:Seen"
    changes = {"engine__backend": "ray"} | changes
    return experiment(folder, method=method, rounds=10, engine__group_size=1, **changes)


def main(folder: Path) -> None:
    os.environ[FOLDER] = str(folder)
    ray._private.utils.write_ray_address = lambda *of: None  # others on this machine would find this cluster
    head = {"num_cpus": 1, "include_dashboard": False, "temp_dir": f"/tmp/raypfl-{os.getpid()}"}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    address, found = cluster.address, {"warned": []}

    def counted(kind: str) -> int:
        return len(list(folder.glob(f"{kind}-*")))

    def change(event: Event) -> None:
        if isinstance(event, Warned):
            found["warned"].append(event.text)
        if not isinstance(event, Checkpointed):
            return
        if event.round == JOINS:
            found["before"] = counted("trained")
            cluster.add_node(num_cpus=2)
            time.sleep(1.5)  # the server looks once a second
        elif event.round == JOINS + 2:
            until(lambda: counted("built") >= built + 2)
            time.sleep(0.5)
        elif event.round == LEAVES:
            found["after"] = counted("trained")
            cluster.remove_node(*cluster.worker_nodes)
            until(lambda: sum(node["Alive"] for node in ray.nodes()) == 1)
            time.sleep(1.5)

    def demand(event: Event) -> None:
        if isinstance(event, Checkpointed) and event.round == JOINS:
            from ray.autoscaler.v2.sdk import get_cluster_status

            waiting = get_cluster_status(address).resource_demands.ray_task_actor_demand
            found["demand"] = [
                [dict(bundle.bundle), bundle.count] for one in waiting for bundle in one.bundles_by_count
            ]

    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        with raypfl.session(described(folder)):
            built = 3  # networks: this process's, the server's, and that of the first client actor
            grown = driver.run(described(folder / "a"), listeners=[change], lockstep=True)
            pools = "[{cpus_per_actor: 0.5, actors: 1}, {cpus_per_actor: 0.1, actors: 2}]"
            shaped = raypfl.run(described(folder / "b", ray__pools=pools))
            asked = driver.run(described(folder / "c", ray__max_actors=4), listeners=[demand], lockstep=True)
        found["hashes"] = [one.weights_hash for one in (grown, shaped, asked)]
        print(json.dumps(found))
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
