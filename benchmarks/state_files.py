"""The cost of checkpoints of clients' states, and of more states than the object store holds.

    python -m benchmarks.state_files                      # some minutes; 6 GB of memory, 4 GB of disk
    python -m benchmarks.state_files --folder /dev/shm    # without the disk

A hundred clients' states of 20 MB each (2 GB, as of a network with 5 million parameters), and ten thousand of 40 KB,
are written as a checkpoint's files and read again: by this process, as in a local folder, and by one or two client
actors, as each node of a cluster does at an address that all nodes reach. The object store holds all states, or a
quarter, the rest then being spilled to Ray's folder in /tmp.

Then, in runs, the seconds of a round that reads and writes every state (`touch` of `benchmarks.states`), where the
object store holds them and where it holds a third.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray._private.internal_api import memory_summary

import raypfl
from benchmarks import states as rounds
from raypfl.engine.backends.client_actor import ClientActor
from raypfl.engine.backends.cluster import FREE_AT_ONCE, NO_TASK_EVENTS
from raypfl.engine.backends.objects import states_on_ray
from raypfl.engine.state import client_states
from raypfl.storage.checkpoints import StoredStates
from raypfl.storage.stacks import Stack
from raypfl.storage.states import StateTable

MB = 10**6


class OnActors:
    """The part of a backend that has to do with states: on these actors, or in this process if there are none."""

    def __init__(self, actors: Sequence[Any]):
        self._by_node = {"here": actors} if actors else {}

    def map_states(self, function: Any, jobs: Sequence[tuple[str, Any]]) -> list[Any]:
        return states_on_ray.map_states(self._by_node, function, jobs)

    def read_states(self, location: str, files: Any) -> Iterator[Any]:
        return states_on_ray.read_states(self._by_node, location, files, print)


@contextlib.contextmanager
def local_ray(store: int) -> Iterator[None]:
    """A local Ray with `store` bytes of shared memory."""
    folder = tempfile.mkdtemp(prefix="raypfl-", dir="/tmp")
    ray.init(
        num_cpus=2,
        object_store_memory=store,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
        _temp_dir=folder,
        _system_config=FREE_AT_ONCE | NO_TASK_EVENTS,
    )
    try:
        yield
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def spilled() -> str:
    """Ray's own sentence on what it has spilled so far; empty if nothing."""
    lines = memory_summary(ray.get_runtime_context().gcs_address, stats_only=True).splitlines()
    return next((line for line in lines if line.startswith("Spilled")), "")


def population(clients: int, size: int, group: int) -> StateTable:
    """States of `size` bytes; `group` clients share a stack."""
    draws = np.random.default_rng(0)
    table = StateTable()
    for first in range(0, clients, group):
        stack = Stack({"own": draws.random((group, size // 4), dtype=np.float32)}, {"own": np.arange(group)})
        ids = range(first, first + group)
        table.stage(tuple(ids), ray.put(stack), "here", stack.contents(group))
    table.commit()
    return table


def measure_files(folder: Path, store: int, kinds: dict[str, tuple[int, int, int]]) -> list[dict[str, Any]]:
    """Save and restore each kind of population in this process, and on one and two actors."""
    measurements = []
    with local_ray(store):
        actors = [ray.remote(num_cpus=0)(ClientActor).remote() for _ in range(2)]
        for kind, (clients, size, group) in kinds.items():
            for num_actors in (0, 1, 2):
                table = population(clients, size, group)
                backend: Any = OnActors(actors[:num_actors])
                location = f"file://{folder}" if num_actors else str(folder)
                start = time.perf_counter()
                stored = client_states.save(table, backend, location, lambda: None, print)
                saved = time.perf_counter()
                # As after the start of a run: what is read takes the place of nothing.
                del table
                before_read = time.perf_counter()
                read = client_states.restored(StoredStates(location, stored.state_files), backend)
                restored = time.perf_counter()
                digests = client_states.all_digests(read, backend)
                hashed = time.perf_counter()

                assert len(digests) == clients
                total = clients * size / MB
                measurement = {
                    "states": kind,
                    "store": store // MB,
                    "actors": num_actors,
                    "files": len(stored.state_files),
                    "bytes a client beside its state": sum(f.bytes for f in stored.state_files) / clients - size,
                    "save": total / (saved - start),
                    "restore": total / (restored - before_read),
                    "hash": total / (hashed - restored),
                }
                measurements.append(measurement)
                by = f"{num_actors} actors" if num_actors else "this process"
                speeds = ", ".join(f"{what} {measurement[what]:.0f} MB/s" for what in ("save", "restore", "hash"))
                print(f"{kind}, a store of {store // MB} MB, by {by}: {speeds}; {len(stored.state_files)} files")
                del read
                shutil.rmtree(folder / "states")
        print(spilled() or "Nothing was spilled.", flush=True)
    return measurements


def measure_rounds(folder: Path, store: int, count: int) -> float:
    """The median seconds of a round of `touch`, whose 400 MB of states are there twice at its end."""
    with local_ray(store):
        result = raypfl.run(rounds.experiment(str(folder), keep=True, train=False, rounds=count + 2))
        seconds = statistics.median(result.rounds["seconds"].to_pylist()[2:])
        print(f"touch, a store of {store // MB} MB: {seconds:.2f} s a round. {spilled() or 'Nothing was spilled.'}")
    return seconds


def main() -> None:
    """Measure and print; write the numbers with --json."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.state_files", description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, help="where checkpoints are written; default: a temporary folder")
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds a run")
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    options = parser.parse_args()

    kinds = {"100 x 20 MB": (100, 20 * MB, 1), "10,000 x 40 KB": (10_000, 40_000, 50)}
    numbers: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
        folder = Path(temporary)
        numbers["files"] = measure_files(folder / "checkpoints", 5000 * MB, kinds)
        numbers["files"] += measure_files(folder / "checkpoints", 500 * MB, {"100 x 20 MB": kinds["100 x 20 MB"]})
        numbers["rounds"] = {store: measure_rounds(folder, store * MB, options.rounds) for store in (2000, 270)}
    if options.json:
        options.json.write_text(json.dumps(numbers, indent=1))


if __name__ == "__main__":
    main()
