"""CPU time of ten seeds or learning rates that advance together, in runs of which each is by itself.

    python -m benchmarks.packed                 # ten minutes
    python -m benchmarks.packed --rates         # ten learning rates, not seeds
    python -m benchmarks.packed --steps 50

The digits of 100 clients, FedAvg, inline. A round counts whole: the draw, the training, the average, the records. What
comes before the first round is taken out, by the difference between a long and a short run, each in turns. Every run
must end with the same model both ways. In brackets: the local steps alone, the least that a round can take.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import statistics
import tempfile
import time
import unittest.mock
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import raypfl
from benchmarks import digits
from benchmarks.circumstances import about
from benchmarks.noise import ONLY_ROUNDS
from raypfl.learning.vectorised import Vectorised
from raypfl.runs import driver
from raypfl.runs.records import write_description
from raypfl.runs.result import RunResult
from raypfl.runs.several.resume import resume_all

NETWORKS = {"mlp": {"name": "mlp", "hidden": [128]}, "cnn": {"name": "cnn"}}
COHORTS = (10, 5)
RUNS = 10
SHORT = 10
LONG = 50
TURNS = 3


def seeds(count: int) -> list[str]:
    """Assignments of which each changes the seed."""
    return [f"seed={seed}" for seed in range(count)]


def rates(count: int) -> list[str]:
    """Assignments of which each changes the learning rate."""
    return [f"training.lr={0.01 * (1 + number)}" for number in range(count)]


@dataclass(frozen=True)
class Spent:
    """CPU time: `all` of it, and that of the local `steps`."""

    all: float
    steps: float


@contextlib.contextmanager
def times_of_steps() -> Iterator[list[float]]:
    """Collect the CPU seconds of the local steps within a block, a number for each group that trains."""
    times: list[float] = []
    sgd = Vectorised.sgd

    @functools.wraps(sgd)
    def timed(*arguments: Any, **options: Any) -> Any:
        start = time.thread_time()
        vectors = sgd(*arguments, **options)
        times.append(time.thread_time() - start)
        return vectors

    with unittest.mock.patch.object(Vectorised, "sgd", timed):
        yield times


def seconds(
    folder: Path, experiment: raypfl.Experiment, changes: Sequence[str], together: bool
) -> tuple[Spent, list[str]]:
    """CPU seconds of an experiment with each of some changes, and the hashes of its models."""
    experiments = [experiment.override([change]) for change in changes]
    folders = [Path(tempfile.mkdtemp(dir=folder)) for _ in experiments]
    for run_folder, described in zip(folders, experiments, strict=True):
        write_description(run_folder, described)

    start = time.process_time()
    with times_of_steps() as times:
        if together:
            for outcomes in resume_all(dict(zip(folders, experiments, strict=True)), dict.fromkeys(folders, ())):
                assert all(outcome.error is None for outcome in outcomes.values()), outcomes
        else:
            for run_folder in folders:
                driver.resume(run_folder)
    spent = Spent(time.process_time() - start, sum(times))
    return spent, [RunResult.load(run_folder).weights_hash for run_folder in folders]


def a_round(
    folder: Path, experiment: raypfl.Experiment, changes: Sequence[str], together: bool
) -> tuple[Spent, list[str]]:
    """Milliseconds of CPU time of one round of all runs, and the hashes of their models."""
    # A run by itself makes as many rounds as ten runs do.
    rounds = LONG * RUNS // len(changes)
    short, _ = seconds(folder, experiment.override([f"rounds={SHORT}"]), changes, together)
    long, hashes = seconds(folder, experiment.override([f"rounds={rounds}"]), changes, together)
    scale = 1000 / (rounds - SHORT)
    return Spent(scale * (long.all - short.all), scale * (long.steps - short.steps)), hashes


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5, help="local steps of ten samples (5)")
    parser.add_argument("--method", default="fedavg")
    parser.add_argument("--network", choices=NETWORKS, action="append")
    parser.add_argument("--rates", action="store_true", help="runs that differ in their learning rates, not seeds")
    arguments = parser.parse_args()
    changes = rates(RUNS) if arguments.rates else seeds(RUNS)

    torch.set_num_threads(1)
    print(about())
    print(f"{'network':>8}{'cohort':>8}{'one run':>16}{'ten, in turn':>24}{'ten together':>24}   (CPU ms a round)")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for network, cohort in itertools.product(arguments.network or NETWORKS, COHORTS):
            parts = ONLY_ROUNDS | {"method": arguments.method, "model": NETWORKS[network]}
            parts |= {"engine": {"backend": "inline", "executor": "vectorised"}}
            experiment = digits.experiment(name, cohort, arguments.steps, **parts)
            columns: list[list[Spent]] = [[], [], []]
            for _ in range(TURNS):
                one_run, _ = a_round(folder, experiment, changes[:1], together=False)
                in_turn, hashes = a_round(folder, experiment, changes, together=False)
                together, same_hashes = a_round(folder, experiment, changes, together=True)
                assert hashes == same_hashes, "a run has other bits with the others than alone"
                for column, spent in zip(columns, (one_run, in_turn, together), strict=True):
                    column.append(spent)

            rounds = [statistics.median(spent.all for spent in column) for column in columns]
            steps = [statistics.median(spent.steps for spent in column) for column in columns]
            print(f"{network:>8}{cohort:>8}{rounds[0]:>9.2f} ({steps[0]:5.2f})", end="")
            for all_runs, their_steps in zip(rounds[1:], steps[1:], strict=True):
                ratios = f"{all_runs / rounds[0]:4.1f}x ({their_steps / steps[0]:4.1f}x)"
                print(f"{all_runs:>9.2f} {ratios:>14}", end="")
            print(flush=True)


if __name__ == "__main__":
    main()
