"""CPU time of a round and of an evaluation of every row of a study, beside FedAvg's.

    python -m benchmarks.methods                                      # half an hour, with the data in data.root
    python -m benchmarks.methods --study pfllib-small --only "Dir(0.1), CIFAR-100" data.root=~/data

One process and one thread, without Ray. Rows take turns with FedAvg: each ratio is of two runs that follow each other.
A run has the study's experiment, with a few rounds, each of which is evaluated. A number is the median over rounds, so
that an exchange that a method has once does not count. The first round, which warms up, does not count either.
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
from raypfl.engine.events import Evaluated, Event, RoundFinished, RunStarted
from raypfl.experiment import Experiment
from raypfl.studies.cells import StudyCell, plan, select
from raypfl.studies.description import load

BESIDE = "FedAvg"


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


def cells_of(study_name: str, across: str, assignments: Sequence[str]) -> dict[str, StudyCell]:
    """Return a study's cells of its first seed in one group of columns, by method."""
    study, _ = load(study_name)
    cells: dict[str, StudyCell] = {}
    for cell in plan(select(study, [across]), [*assignments, "seeds=1"]):
        cells.setdefault(cell.method, cell)
    return cells


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--study", default="pfllib-small")
    parser.add_argument("--only", default="Dir(0.1), FashionMNIST", help="the group of columns")
    parser.add_argument("--methods", help="labels of rows, separated by commas; all by default")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("assignments", nargs="*", metavar="KEY=VALUE")
    options = parser.parse_args(arguments)

    cells = cells_of(options.study, options.only, options.assignments)
    labels = options.methods.split(",") if options.methods else list(cells)
    print(f"{options.study}, {options.only}; {about()}")
    print("| method | seconds a round | beside FedAvg's | seconds an evaluation |")
    print("|---|---|---|---|")
    total = Cost(0.0, 0.0)
    for label in labels:
        reference = cost(cells[BESIDE].experiment, options.rounds)
        row = cost(cells[label].experiment, options.rounds)
        ratio = row.round / reference.round
        print(f"| {label} | {row.round:.3f} | {ratio:.1f} | {row.evaluation:.3f} |", flush=True)
        total = Cost(total.round + row.round, total.evaluation + row.evaluation)
    print(f"| all | {total.round:.2f} | | {total.evaluation:.2f} |")


if __name__ == "__main__":
    main()
