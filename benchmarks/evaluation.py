"""Seconds to evaluate 1000 personal models on their own test samples, beside a bare loop of the forward passes alone.

    python -m benchmarks.evaluation                            # 2 minutes; needs 15 GB for `cnn`
    python -m benchmarks.evaluation --jobs mlp --samples 10    # seconds
    python -m benchmarks.evaluation --json evaluation.json

Every client has a model of its own, of either the 9,610-parameter MLP on 8x8 images or the 1,626,442-parameter CNN on
3x32x32 images, and `--samples` test samples. Images are noise. One process, one torch thread.

The bare loop is that of the job `evaluation` of `benchmarks.peers`: weights in place, batches normalised, both in the
faster layout. raypfl finds each client's state and its samples (uint8, memory-mapped), normalises them, runs the
network, and computes accuracy, loss and calibration error of every client, the table's rows and their aggregates. The
two take turns. On a machine that others use, compare minima.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import raypfl
from benchmarks.circumstances import about
from benchmarks.noise import SETS
from benchmarks.peers.data import prepare
from benchmarks.peers.jobs import Contender, Job
from benchmarks.peers.systems.bare import forward, prepared
from benchmarks.peers.systems.raypfl import experiment
from raypfl.engine.events import Evaluated, Event, RoundFinished, RunStarted

NOISE = {"mlp": {10: "pixels_10", 50: "pixels_50"}, "cnn": {10: "images", 50: "images_50"}}
"""Network -> test samples a client -> data set."""


def measured(model: str, precision: str, samples: int, repeats: int) -> dict[str, Any]:
    """Seconds of both contenders, in turns; the first turn warms up."""
    noise = SETS[NOISE[model][samples]]
    job = Job("evaluation", "", noise, model, "evaluation", cohort=noise.clients)
    contender = Contender("raypfl", "raypfl", options={"precision": precision})
    times: dict[str, list[float]] = {"bare": [], "raypfl": []}
    executor = ""
    start = 0.0

    with tempfile.TemporaryDirectory() as folder:
        source, files = prepare(noise, Path(folder))
        order = job.order(contender, source, files, Path(folder, "report"), job.cohort)
        pairs = prepared(order)

        def listen(event: Event) -> None:
            nonlocal executor, start
            if isinstance(event, RunStarted):
                executor = event.experiment.engine.executor
            elif isinstance(event, RoundFinished):
                # The bare loop takes its turn between a round and raypfl's evaluation, which follows it.
                start = time.perf_counter()
                with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                    forward(pairs)
                times["bare"].append(time.perf_counter() - start)
                start = time.perf_counter()
            elif isinstance(event, Evaluated):
                times["raypfl"].append(time.perf_counter() - start)

        raypfl.run(experiment(order, folder).replace(rounds=1 + repeats), listeners=[listen])

    least = {name: min(seconds[1:]) for name, seconds in times.items()}
    medians = {name: statistics.median(seconds[1:]) for name, seconds in times.items()}
    result = {"model": model, "precision": precision, "samples": samples, "executor": executor}
    for name in times:
        result[name] = {"min": least[name], "median": medians[name]}
    result["ratio"] = least["raypfl"] / least["bare"]
    result["ratio_of_medians"] = medians["raypfl"] / medians["bare"]
    return result


def main() -> None:
    """Measure and print; write the numbers with --json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", nargs="+", choices=NOISE, default=list(NOISE))
    parser.add_argument("--samples", type=int, nargs="+", choices=(10, 50), default=[10, 50])
    parser.add_argument("--precision", nargs="+", choices=("fp32", "bf16"), default=["fp32"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)

    results = []
    for model, precision, samples in itertools.product(options.jobs, options.precision, options.samples):
        result = measured(model, precision, samples, options.repeats)
        results.append(result)
        print(
            f"{model} {precision}, {samples} samples a client, {result['executor']}: "
            f"bare {result['bare']['min']:.3f} s, raypfl {result['raypfl']['min']:.3f} s, "
            f"ratio {result['ratio']:.2f} (of medians {result['ratio_of_medians']:.2f})",
            flush=True,
        )
    if options.json:
        options.json.write_text(json.dumps({"about": about(), "results": results}, indent=1))


if __name__ == "__main__":
    main()
