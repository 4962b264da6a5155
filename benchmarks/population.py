"""The cost of a large population: the same cohort drawn from 1,000 and from 100,000 clients, in turns.

    python -m benchmarks.population                  # two minutes, half of it to make the data
    python -m benchmarks.population --quick          # cohorts of 300, few rounds: rough

The data are those of the jobs `small-population` and `population` of `benchmarks.peers`: clients have 10 to 100 samples
of 8x8 pixels, and train the 9,610-parameter network for an epoch in batches of 10. The cohort is as large as the small
population. Both populations take turns on the same actors. The first round of each run warms up and is not counted.
Memory is that of this process, of Ray's and of all actors, proportional set sizes (PSS), memory-mapped data included.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

import raypfl
from benchmarks.circumstances import about
from benchmarks.memory import Peak, higher
from benchmarks.noise import ONLY_ROUNDS, SETS

HERE = "benchmarks.population"


@dataclass
class Measured:
    """The measurements of one population.

    Attributes
    ----------
    data : MB of samples.
    rounds : the seconds of each round.
    beside : the seconds of each run beside its rounds.
    prepared, opened : the seconds to make the data, and to open them again.
    peak : the most MB in use, by part.
    """

    clients: int
    data: float
    rounds: list[float] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)
    prepared: float = 0.0
    opened: float = 0.0
    peak: dict[str, float] = field(default_factory=dict)


def experiment(folder: str, noise: str, cohort: int, rounds: int, actors: int) -> raypfl.Experiment:
    """A run on one population; its first round warms up."""
    source = SETS[noise].source(f"{folder}/cache")
    parts = ONLY_ROUNDS | source | {"cohort": {"size": cohort}, "ray": {"actors": actors}}
    return raypfl.Experiment(name=noise, rounds=1 + rounds, output=f"{folder}/runs", **parts)


def prepare(described: raypfl.Experiment, measured: Measured) -> None:
    """Make the data, and open them again."""
    for step in ("prepared", "opened"):
        start = time.perf_counter()
        described.load_data()
        setattr(measured, step, time.perf_counter() - start)


def main() -> None:
    """Measure and print; write the numbers with --json."""
    parser = argparse.ArgumentParser(prog=f"python -m {HERE}", description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a small cohort, few rounds: rough")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=6, help="counted rounds a run")
    parser.add_argument("--actors", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("RAY_worker_niceness", "0")

    cohort = 300 if options.quick else 1000
    machine = about()
    print(f"{machine}; cohorts of {cohort}, {options.actors} actors")
    small, large = (Measured(SETS[noise].clients, SETS[noise].bytes / 1e6) for noise in ("village", "country"))
    with tempfile.TemporaryDirectory() as folder:
        runs = []
        for noise, measured in (("village", small), ("country", large)):
            runs.append((experiment(folder, noise, cohort, options.rounds, options.actors), measured))
        for described, measured in runs:
            prepare(described, measured)

        with raypfl.session(runs[0][0]):
            for _ in range(1 if options.quick else options.repeats):
                for described, measured in runs:
                    start = time.perf_counter()
                    with Peak() as peak:
                        seconds = raypfl.run(described).rounds["seconds"].to_pylist()
                    measured.beside.append(time.perf_counter() - start - sum(seconds))
                    measured.rounds += seconds[1:]
                    measured.peak = higher(measured.peak, peak.megabytes)
    show(small, large)
    if options.json:
        options.json.write_text(json.dumps({"about": machine, "small": vars(small), "large": vars(large)}, indent=1))


def show(small: Measured, large: Measured) -> None:
    """Print the table, and what the larger population costs."""
    names = ("clients", "median s", "min s", "beside s", "prepared s", "opened s", "data MB", "peak MB")
    print("".join(f"{name:>11}" for name in names))
    for m in (small, large):
        print(f"{m.clients:11d}{statistics.median(m.rounds):11.4f}{min(m.rounds):11.4f}{min(m.beside):11.2f}", end="")
        print(f"{m.prepared:11.2f}{m.opened:11.2f}{m.data:11.0f}{sum(m.peak.values()):11.0f}", end="")
        print("  " + ", ".join(f"{part} {megabytes:.0f}" for part, megabytes in m.peak.items()))

    ratio = statistics.median(large.rounds) / statistics.median(small.rounds)
    least = min(large.rounds) / min(small.rounds)
    more = sum(large.peak.values()) - sum(small.peak.values())
    print(f"A round from {large.clients:,} clients takes {ratio:.3f} times one from {small.clients:,}", end="")
    print(f" (minima: {least:.3f} times).")
    print(f"They take {more:.0f} MB more, of which {large.data - small.data:.0f} MB are samples.")


if __name__ == "__main__":
    main()
