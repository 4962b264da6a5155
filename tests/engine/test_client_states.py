"""Clients' states are written, read and hashed by the nodes that have them: the same bytes as in one process."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from raypfl.clients.worker import Worker
from raypfl.engine.backends.client_actor import ClientActor
from raypfl.engine.backends.inline import Inline
from raypfl.engine.backends.objects import states_on_ray
from raypfl.engine.state import client_states
from raypfl.storage.checkpoints import Damaged, StoredStates, write_file
from raypfl.storage.stacks import Stack
from raypfl.storage.states import StateTable

NUM_CLIENTS = 6


def stack_of(client: int) -> Stack:
    return Stack({"w": np.full((1, 3), client)}, {"w": np.zeros(1, dtype=np.int64)})


def on_two_nodes(put: Callable[[Stack], Any] = lambda stack: stack) -> StateTable:
    """States of six clients, on two nodes in turns."""
    states = StateTable()
    for client in range(NUM_CLIENTS):
        stack = stack_of(client)
        states.stage((client,), put(stack), node=f"node {client % 2}", contents=stack.contents(1))
    states.commit()
    return states


class Nodes(Inline):
    """A backend that pretends to compute on nodes.

    Attributes
    ----------
    places : node, or "" for the server, of each job so far.
    after : called with a node after each of its jobs.
    """

    def __init__(self, after: Callable[[str], None] = lambda node: None):
        worker: Worker = None  # type: ignore[assignment]  # no groups run
        super().__init__(worker)
        self.after = after
        self.places: list[str] = []

    def map_states(self, function: Any, jobs: Sequence[tuple[str, Any]]) -> list[Any]:
        results = []
        for node, job in jobs:
            self.places.append(node)
            results += super().map_states(function, [(node, job)])
            if node:
                self.after(node)
        return results


def save(location: str, backend: Nodes, warnings: list[str]) -> StoredStates:
    return client_states.save(on_two_nodes(), backend, location, lambda: None, warnings.append)


def test_nodes_write_to_a_location_that_all_reach_what_the_server_would(tmp_path: Path):
    nodes = Nodes()
    by_nodes = save(f"file://{tmp_path}/a", nodes, [])
    by_server = save(f"{tmp_path}/b", nodes, [])
    assert nodes.places == ["node 0", "node 1", "", ""]
    assert by_nodes.state_files == by_server.state_files


def test_what_a_node_cannot_write_the_server_writes_with_a_warning(tmp_path: Path):
    folder = tmp_path / "states"

    def lose(node: str) -> None:
        """Lose what the first node has written, and let the second one find a file where the folder should be."""
        if node == "node 0":
            shutil.rmtree(folder)
            folder.touch()
        else:
            folder.unlink()

    warnings: list[str] = []
    nodes = Nodes(lose)
    stored = save(f"file://{tmp_path}", nodes, warnings)
    assert nodes.places == ["node 0", "node 1", "", ""]
    assert "does not arrive where the server is" in warnings[0]
    assert "A node cannot write clients' states to file://" in warnings[1]
    assert [shard.clients.tolist() for shard in stored] == [[0], [2], [4], [1], [3], [5]]


@pytest.fixture(scope="module")
def actors(ray_cluster: None) -> Iterator[dict[str, list[Any]]]:
    """A client actor that is dead, and one that is alive, on a node each as far as the backend knows."""
    import ray

    living, dead = [ray.remote(num_cpus=0)(ClientActor).remote() for _ in range(2)]
    ray.kill(dead)
    yield {"node 0": [living], "node 1": [dead]}
    ray.kill(living)


def test_a_client_actor_works_on_states_that_the_server_does_not_fetch(tmp_path: Path, actors, monkeypatch):
    import ray

    fetched_here: list[Any] = []

    def fetch(references: Sequence[Any]) -> list[Stack]:
        fetched_here.extend(references)
        return ray.get(list(references))

    monkeypatch.setattr(states_on_ray, "get_states", fetch)
    states = on_two_nodes(ray.put)
    rows = [states.live_rows(stack) for stack in states.stacks()]
    jobs = [("node 0", rows[0::2]), ("node 1", rows[1::2])]
    location = f"file://{tmp_path}"
    files = states_on_ray.map_states(actors, partial(write_file, location), jobs)
    assert fetched_here == [part.stack for part in rows[1::2]]  # those of the dead actor
    assert [shard.clients.tolist() for shard in StoredStates(location, tuple(files))] == [[0], [2], [4], [1], [3], [5]]

    denied = ray.exceptions.RayTaskError("read_states", "", PermissionError("access is denied"))
    stranger = SimpleNamespace(read_states=SimpleNamespace(remote=lambda location, files: iter([ray.put(denied)])))
    warnings: list[str] = []
    stored = list(states_on_ray.read_states(actors | {"node 2": [stranger]}, location, files * 2, warnings.append))
    assert [stack.node for stack in stored] == ["node 0"] * 6 + [""] * 6
    assert f"A node cannot read clients' states in {location}: its client actor died" in warnings[0]
    assert f"A node cannot read clients' states in {location}: access is denied" in warnings[1]
    for stack in stored:
        (client,) = stack.shard.clients.tolist()
        assert ray.get(stack.stack).state_of(0)["w"].tolist() == [client] * 3
        assert stack.contents == stack_of(client).contents(1) and not stack.shard.tensors

    (tmp_path / files[0].path).write_bytes(b"damaged")
    with pytest.raises(Damaged, match=f"its {files[0].path} has 7 bytes instead of"):
        list(states_on_ray.read_states(actors, location, files, pytest.fail))


def test_states_that_an_actor_has_read_outlive_it(tmp_path: Path, actors):
    import ray

    states = on_two_nodes()
    location = f"file://{tmp_path}"
    file = write_file(location, lambda stacks: stacks, [states.live_rows(stack) for stack in states.stacks()])
    reader = ray.remote(num_cpus=0)(ClientActor).remote()
    stored = list(states_on_ray.read_states({"node": [reader]}, location, [file], pytest.fail))
    ray.kill(reader)
    rows = [stack["w"][0, 0] for stack in (ray.get(part.stack).rows for part in stored)]
    assert rows == list(range(NUM_CLIENTS))
