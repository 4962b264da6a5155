"""CPU time of a group's steps, taken as they are and repeated from a recording, in turns in one process.

    python -m benchmarks.recording          # two minutes

The digits of 100 clients and a network of 9,610 parameters, FedAvg with batches of ten; and the default experiment,
whose 20 clients have different numbers of steps, also with methods that take steps of their own on mini-batches. A
round counts whole: the draw, the training, the average. Both ways must end with the same model.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from unittest import mock

import torch

import raypfl
from benchmarks.circumstances import about
from benchmarks.digits import experiment
from benchmarks.noise import ONLY_ROUNDS
from raypfl.engine.events import Event, RoundFinished
from raypfl.learning.recording import Replays, StepSignature

STEPS = (5, 20, 50)
COHORTS = (5, 10, 20, 50)
METHODS = ("fedavg", "ditto", "apfl", "pfedme", "per-fedavg", "mime")
TURNS = 3
ROUNDS = 20
FIRST = 4
"""The first round whose time counts; in the rounds before, steps are recorded."""

ENGINE = {"backend": "inline", "executor": "vectorised"}


def experiments(folder: str) -> Iterator[tuple[str, raypfl.Experiment]]:
    """Yield experiments with their names."""
    common = {**ONLY_ROUNDS, "rounds": ROUNDS, "engine": ENGINE}
    for steps in STEPS:
        for cohort in COHORTS:
            yield f"{steps} steps, cohort {cohort}", experiment(folder, cohort, steps, **common)
    for method in METHODS:
        default = raypfl.Experiment(method=method, output=f"{folder}/runs", **common)
        yield f"an epoch of 20 unequal clients, {method}", default


def without_recording(replays: Replays, work: Callable[[], None], times: int, signature: StepSignature | None) -> bool:
    """Do work as it is."""
    for _ in range(times):
        work()
    return True


def milliseconds(described: raypfl.Experiment) -> tuple[list[float], str]:
    """CPU time of each round that counts, and the hash of the models at the end."""
    ends: list[float] = []

    def note(event: Event) -> None:
        if isinstance(event, RoundFinished):
            ends.append(1000 * time.process_time())

    result = raypfl.run(described, listeners=[note])
    times = [after - before for before, after in itertools.pairwise(ends[FIRST - 2 :])]
    return times, result.weights_hash


def main() -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    print(about())
    print(f"{'ms of CPU time a round':<42}{'as it is':>10}{'repeated':>10}{'ratio':>8}")
    with tempfile.TemporaryDirectory() as folder:
        for name, described in experiments(folder):
            plain: list[float] = []
            repeated: list[float] = []
            hashes = set()
            for _ in range(TURNS):
                with mock.patch.object(Replays, "do", without_recording):
                    times, weights_hash = milliseconds(described)
                plain += times
                hashes.add(weights_hash)

                times, weights_hash = milliseconds(described)
                repeated += times
                hashes.add(weights_hash)

            assert len(hashes) == 1, "a repeated step gave other bits"
            before = statistics.median(plain)
            after = statistics.median(repeated)
            print(f"{name:<42}{before:10.1f}{after:10.1f}{before / after:7.2f}x", flush=True)


if __name__ == "__main__":
    main()
