"""What the size of the population costs: the same cohort drawn from 1,000 and from 100,000 clients, in turns.

    python -m benchmarks.population                  # two minutes, half of it to make the data
    python -m benchmarks.population --quick          # 300 and 30,000 clients, cohorts of 300: rough

Clients have 10 to 100 samples of 8x8 pixels, log-normally many, and train the 9,610-parameter network for an epoch in
batches of 10; the cohort is as large as the small population. Both populations take turns on the same actors, and the
first round of each run, which warms up, is not counted. Memory is that of this process, of Ray's and of all actors:
shared pages are shared out among their users (PSS), and those of the data, which is mapped into memory, are included.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

import raypfl
from benchmarks.memory import memory
from raypfl.data import Partition, Traits, load_federated
from raypfl.datasets import DataConfig, RawData

HERE = "benchmarks.population"
BLOCK = 1 << 16
PIXELS = 64


def sizes(clients: int) -> np.ndarray:
    """Samples of each client, 10 to 100: ``int64[clients]``."""
    drawn = np.random.default_rng(0).lognormal(np.log(30), 0.6, clients)
    return np.clip(np.rint(drawn), 10, 100).astype(np.int64)


def crowd(config: DataConfig) -> RawData:
    """Noise for as many clients as the folder `config.root` says, made block by block."""
    count = int(sizes(int(Path(config.root or "", "clients").read_text())).sum())
    draws = np.random.default_rng(0)

    def blocks() -> Iterator[np.ndarray]:
        for first in range(0, count, BLOCK):
            yield draws.integers(0, 256, (min(BLOCK, count - first), 1, 8, 8), dtype=np.uint8)

    return RawData(blocks(), np.random.default_rng(1).integers(0, 10, count), [str(c) for c in range(10)])


@dataclass(frozen=True, kw_only=True)
class Sized(Partition):
    """The first samples to the first client, and so on."""

    def owners(self, samples: Traits, seed: int) -> np.ndarray:
        return np.repeat(np.arange(self.clients), sizes(self.clients))


@dataclass
class Measured:
    """Of one population: seconds of rounds, of a run beside them, of preparing and opening the data, and MB in use."""

    clients: int
    rounds: list[float] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)
    prepared: float = 0.0
    opened: float = 0.0
    data: float = 0.0
    peak: dict[str, float] = field(default_factory=dict)


class Peak:
    """Within: what this process and all below it held when they held most, in MB by what they are for."""

    def __enter__(self) -> Peak:
        self.held: dict[str, float] = {}
        self._over = threading.Event()
        self._watcher = threading.Thread(target=self._watch)
        self._watcher.start()
        return self

    def __exit__(self, *about: object) -> None:
        self._over.set()
        self._watcher.join()

    def _watch(self) -> None:
        while not self._over.wait(1.0):
            self.held = max(self.held, memory(), key=lambda held: sum(held.values()))


def experiment(folder: str, clients: int, cohort: int, rounds: int) -> raypfl.Experiment:
    """A run on one population; its first round warms up."""
    root = Path(folder, str(clients))
    root.mkdir(exist_ok=True)
    (root / "clients").write_text(str(clients))
    parts: dict[str, Any] = {
        "data": {"name": f"{HERE}:crowd", "root": str(root), "cache": f"{folder}/cache", "test_fraction": 0.0},
        "partition": {"name": f"{HERE}:Sized", "clients": clients},
        "cohort": {"size": cohort},
        "evaluation": {"every": 0, "protocols": ["local"]},
        "tracking": {"mlflow": False},
    }
    return raypfl.Experiment(name=f"of-{clients}", rounds=1 + rounds, output=f"{folder}/runs", **parts)


def prepare(described: raypfl.Experiment, measured: Measured) -> None:
    """Make the data, and open it again."""
    for step in ("prepared", "opened"):
        begun = time.perf_counter()
        data = load_federated(described.data, described.partition, seed=described.seed)
        setattr(measured, step, time.perf_counter() - begun)
    measured.data = int(data.sizes().sum()) * (PIXELS + 8) / 1e6


def main() -> None:
    """Measure, print, and write the numbers down if asked to."""
    parser = argparse.ArgumentParser(prog=f"python -m {HERE}", description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a small population, few rounds: rough")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=6, help="counted rounds a run")
    parser.add_argument("--actors", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    given = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("RAY_worker_niceness", "0")
    cohort = 300 if given.quick else 1000
    about = f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; torch {torch.__version__}"
    print(f"raypfl {raypfl.__version__} on {about}; cohorts of {cohort}, {given.actors} actors")
    small, large = Measured(cohort), Measured(100 * cohort)
    with tempfile.TemporaryDirectory() as folder:
        described = [
            experiment(folder, m.clients, cohort, given.rounds).override([f"ray.actors={given.actors}"])
            for m in (small, large)
        ]
        for one, measured in zip(described, (small, large), strict=True):
            prepare(one, measured)
        with raypfl.session(described[0]):
            for _ in range(1 if given.quick else given.repeats):
                for one, measured in zip(described, (small, large), strict=True):
                    begun = time.perf_counter()
                    with Peak() as peak:
                        seconds = raypfl.run(one).rounds["seconds"].to_pylist()
                    measured.beside.append(time.perf_counter() - begun - sum(seconds))
                    measured.rounds += seconds[1:]
                    measured.peak = max(measured.peak, peak.held, key=lambda held: sum(held.values()))
    show(small, large)
    if given.json:
        given.json.write_text(json.dumps({"about": about, "small": vars(small), "large": vars(large)}, indent=1))


def show(small: Measured, large: Measured) -> None:
    """Print the table, and what the larger population costs."""
    names = ("clients", "median s", "min s", "beside s", "prepared s", "opened s", "data MB", "peak MB")
    print("".join(f"{name:>11}" for name in names))
    for m in (small, large):
        print(f"{m.clients:11d}{statistics.median(m.rounds):11.4f}{min(m.rounds):11.4f}{min(m.beside):11.2f}", end="")
        print(f"{m.prepared:11.2f}{m.opened:11.2f}{m.data:11.0f}{sum(m.peak.values()):11.0f}", end="")
        print("  " + ", ".join(f"{part} {held:.0f}" for part, held in m.peak.items()))
    ratio = statistics.median(large.rounds) / statistics.median(small.rounds)
    least = min(large.rounds) / min(small.rounds)
    more = sum(large.peak.values()) - sum(small.peak.values())
    print(f"A round from {large.clients:,} clients takes {ratio:.3f} times one from {small.clients:,}", end="")
    print(f" (minima: {least:.3f} times).")
    print(f"They take {more:.0f} MB more, of which {large.data - small.data:.0f} MB are samples.")


if __name__ == "__main__":
    main()
