"""CPU time of a group's steps, taken as they are and repeated from a recording, in turns in one process.

    python -m benchmarks.recording          # two minutes

The digits of 100 clients and a network of 9,610 parameters, FedAvg with batches of ten. A round counts whole: the draw,
the training, the average. Both ways must end with the same model.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time

import torch

import raypfl
from benchmarks.digits import experiment
from benchmarks.noise import ONLY_ROUNDS
from raypfl.engine.events import Event, RoundFinished
from raypfl.learning.recording import Replays

STEPS = (20, 50)
COHORTS = (5, 10, 20, 50)
TURNS = 3
ROUNDS = 12


def milliseconds(folder: str, cohort: int, steps: int) -> tuple[list[float], str]:
    """CPU time of each round but the first two, and the hash of the models at the end."""
    ends: list[float] = []

    def note(event: Event) -> None:
        if isinstance(event, RoundFinished):
            ends.append(1000 * time.process_time())

    engine = {"backend": "inline", "executor": "vectorised"}
    described = experiment(folder, cohort, steps, **ONLY_ROUNDS, rounds=ROUNDS, engine=engine)
    result = raypfl.run(described, listeners=[note])
    times = [after - before for before, after in itertools.pairwise(ends[1:])]
    return times, result.weights_hash


def main() -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    min_steps = Replays.min_steps
    print(f"{'steps':>6}{'cohort':>8}{'as before':>14}{'repeated':>12}{'ratio':>8}   (ms of CPU time a round)")
    with tempfile.TemporaryDirectory() as folder:
        for steps in STEPS:
            for cohort in COHORTS:
                times: dict[bool, list[float]] = {False: [], True: []}
                hashes = set()
                for turn in range(2 * TURNS):
                    is_repeated = turn % 2 == 1
                    Replays.min_steps = min_steps if is_repeated else steps + 1
                    rounds, weights_hash = milliseconds(folder, cohort, steps)
                    times[is_repeated] += rounds
                    hashes.add(weights_hash)

                assert len(hashes) == 1, "a repeated step gave other bits"
                before = statistics.median(times[False])
                after = statistics.median(times[True])
                print(f"{steps:6}{cohort:8}{before:14.1f}{after:12.1f}{before / after:7.2f}x", flush=True)


if __name__ == "__main__":
    main()
