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
    """Seconds of both, in turns; the first turn warms up."""
    noise = SETS[NOISE[model][samples]]
    job = Job("evaluation", "", noise, model, "evaluation", cohort=noise.clients)
    ours = Contender("raypfl", "raypfl", options={"precision": precision})
    times: dict[str, list[float]] = {"bare": [], "raypfl": []}
    executor, begun = "", 0.0
    with tempfile.TemporaryDirectory() as folder:
        source, files = prepare(noise, Path(folder))
        order = job.order(ours, source, files, Path(folder, "report"), job.cohort)
        pairs = prepared(order)

        def listen(event: Event) -> None:
            nonlocal executor, begun
            if isinstance(event, RunStarted):
                executor = event.experiment.engine.executor
            elif isinstance(event, RoundFinished):
                begun = time.perf_counter()
                with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                    forward(pairs)
                times["bare"].append(time.perf_counter() - begun)
                begun = time.perf_counter()
            elif isinstance(event, Evaluated):
                times["raypfl"].append(time.perf_counter() - begun)

        raypfl.run(experiment(order, folder).replace(rounds=1 + repeats), listeners=[listen])
    result = {"model": model, "precision": precision, "samples": samples, "executor": executor}
    least, medians = ({name: of(t[1:]) for name, t in times.items()} for of in (min, statistics.median))
    result |= {name: {"min": least[name], "median": medians[name]} for name in times}
    ratios = {"ratio": least["raypfl"] / least["bare"], "ratio_of_medians": medians["raypfl"] / medians["bare"]}
    return result | ratios


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
    for model in options.jobs:
        for precision in options.precision:
            for samples in options.samples:
                one = measured(model, precision, samples, options.repeats)
                results.append(one)
                print(
                    f"{model} {precision}, {samples} samples a client, {one['executor']}: "
                    f"bare {one['bare']['min']:.3f} s, raypfl {one['raypfl']['min']:.3f} s, "
                    f"ratio {one['ratio']:.2f} (of medians {one['ratio_of_medians']:.2f})",
                    flush=True,
                )
    if options.json:
        options.json.write_text(json.dumps({"about": about(), "results": results}, indent=1))


if __name__ == "__main__":
    main()
