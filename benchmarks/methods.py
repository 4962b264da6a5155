"""CPU time of a round and of an evaluation of every method, beside FedAvg's.

    python -m benchmarks.methods                                      # all methods on digits, in some minutes
    python -m benchmarks.methods --study pfllib-small --only "Dir(0.1), CIFAR-100" data.root=~/data

Without a study, methods have their default options. One process and one thread, without Ray. Methods take turns with
FedAvg: each ratio is of two runs that follow each other. A run has a few rounds, each of which is evaluated. A number
is the median over rounds, so that an exchange that a method has once does not count. The first round, which warms up,
does not count either.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from typing import NamedTuple

import raypfl
from benchmarks.circumstances import about
from raypfl.common.errors import did_you_mean
from raypfl.engine.events import Evaluated, Event, RoundFinished, RunStarted
from raypfl.experiment import Experiment
from raypfl.methods import METHODS
from raypfl.runs.choices.every_method import experiment_for_every_method, with_method
from raypfl.studies.cells import plan, select
from raypfl.studies.description import load

BESIDE = ("FedAvg", "fedavg")
"""The label of a study's row of FedAvg, and its registered name."""


class Cost(NamedTuple):
    """Seconds of CPU time of a round and of an evaluation."""

    round: float
    evaluation: float


class Stopwatch:
    """A listener that notes the CPU time of rounds and evaluations."""

    def __init__(self) -> None:
        self.rounds: list[float] = []
        self.evaluations: list[float] = []
        self._since = time.process_time()

    def __call__(self, event: Event) -> None:
        now = time.process_time()
        if isinstance(event, RoundFinished):
            self.rounds.append(now - self._since)
        if isinstance(event, Evaluated):
            self.evaluations.append(now - self._since)
        if isinstance(event, RunStarted | RoundFinished | Evaluated):
            self._since = now


def cost(experiment: Experiment, rounds: int) -> Cost:
    """Run `rounds` rounds after the first, each with an evaluation."""
    stopwatch = Stopwatch()
    with tempfile.TemporaryDirectory() as folder:
        changes = {
            "rounds": rounds + 1,
            "evaluation.every": 1,
            "checkpoint.every": 0,
            "engine.backend": "inline",
            "engine.threads": 1,
            "tracking.mlflow": "false",
            "output": folder,
        }
        raypfl.run(experiment.override([f"{key}={value}" for key, value in changes.items()]), listeners=[stopwatch])
    return Cost(statistics.median(stopwatch.rounds[1:]), statistics.median(stopwatch.evaluations[-rounds:]))


def experiments_of_study(name: str, across: str, assignments: Sequence[str]) -> dict[str, Experiment]:
    """Return the experiments of a study's first seed in one group of columns, by method."""
    study, _ = load(name)
    experiments: dict[str, Experiment] = {}
    for cell in plan(select(study, [across]), [*assignments, "seeds=1"]):
        experiments.setdefault(cell.method, cell.experiment)
    return experiments


def experiments_of_registered(assignments: Sequence[str]) -> dict[str, Experiment]:
    """Return an experiment on digits for each registered method."""
    experiment = experiment_for_every_method(assignments)
    return {name: with_method(experiment, name) for name in METHODS}


def positive(text: str) -> int:
    """Read a number of rounds."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is no number of rounds to measure; give 1 or more.")
    return number


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--study", help="a study's rows; without it, all registered methods")
    parser.add_argument("--only", default="Dir(0.1), FashionMNIST", help="the study's group of columns")
    parser.add_argument("--methods", help="names, or labels of a study's rows, separated by commas; all by default")
    parser.add_argument("--rounds", type=positive, default=10)
    parser.add_argument("assignments", nargs="*", metavar="KEY=VALUE")
    options = parser.parse_args(arguments)

    if options.study:
        experiments = experiments_of_study(options.study, options.only, options.assignments)
        title = f"{options.study}, {options.only}"
    else:
        experiments = experiments_of_registered(options.assignments)
        title = "All methods on digits"
    beside = next(experiments[label] for label in BESIDE if label in experiments)

    labels = options.methods.split(",") if options.methods else list(experiments)
    unknown = [label for label in labels if label not in experiments]
    if unknown:
        parser.error(f"--methods names {unknown[0]!r}; {did_you_mean(unknown[0], experiments)}")

    print(f"{title}; {about()}")
    print("| method | seconds a round | beside FedAvg's | seconds an evaluation |")
    print("|---|---|---|---|")
    total = Cost(0.0, 0.0)
    for label in labels:
        reference = cost(beside, options.rounds)
        row = cost(experiments[label], options.rounds)
        ratio = row.round / reference.round
        print(f"| {label} | {row.round:.3f} | {ratio:.1f} | {row.evaluation:.3f} |", flush=True)
        total = Cost(total.round + row.round, total.evaluation + row.evaluation)
    print(f"| all | {total.round:.2f} | | {total.evaluation:.2f} |")


if __name__ == "__main__":
    main()
