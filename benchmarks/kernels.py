"""The cost of kernels of 2,000 samples: seconds, peak memory, and bytes on disk of a round.

``python -m benchmarks.kernels`` prints a line for each job, every one in a process of its own. None needs the
gradients of all samples in memory (n x P numbers), let alone all products of their entries (n x n x P).
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import tempfile
import time
from functools import partial

import numpy as np
import torch

import raypfl
from raypfl.analysis.theory.empirical import Side, kernel, sketch
from raypfl.engine.events import Event, RoundFinished, RunStarted
from raypfl.models import MODELS, FlatModel

SAMPLES, INPUTS, CLIENTS, ROUNDS = 2_000, 64, 20, 5
OBSERVED = 3
"""The round, besides the first and the last, whose local steps `flntk` observes."""


def federated(analyses: list[dict[str, object]], width: int) -> str:
    """Seconds of the start, of rounds without and with observed steps, and of the end; MB of an observed round."""
    times: list[tuple[Event, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        inputs = np.random.default_rng(0).standard_normal((SAMPLES, INPUTS))
        np.save(f"{folder}/inputs.npy", inputs)
        np.save(f"{folder}/targets.npy", np.tanh(inputs[:, 0]))
        experiment = raypfl.Experiment(
            rounds=ROUNDS,
            analyses=analyses,
            data={"name": "arrays", "root": folder, "test_fraction": 0.0, "cache": f"{folder}/cache"},
            partition={"name": "label_sorted", "clients": CLIENTS},
            model={"name": "two_layer", "width": width},
            method={"name": "fedavg", "weighting": "uniform"},
            objective={"name": "regression", "reduction": "sum"},
            training={"steps": 5, "batch_size": SAMPLES, "lr": 0.05, "precision": "fp64"},
            evaluation={"every": 0},
            engine={"backend": "inline"},
            tracking={"mlflow": False},
            output=f"{folder}/runs",
        )

        begin = time.perf_counter()
        result = raypfl.run(experiment, listeners=[lambda event: times.append((event, time.perf_counter()))])
        ends = [at for event, at in times if isinstance(event, RunStarted | RoundFinished)]
        start, *rounds = np.diff([begin, *ends])

        files = (result.run_dir / "analyses").glob(f"*/round-{OBSERVED:06d}/*")
        size = sum(file.stat().st_size for file in files) / 1e6

    # The first round and the last are observed as well.
    plain = np.median([seconds for round, seconds in enumerate(rounds, 1) if round not in (1, OBSERVED, ROUNDS)])
    observed = rounds[OBSERVED - 1]
    text = f"start {start:.1f} s, round {plain:.2f} s, observed {observed:.2f} s, last {rounds[-1]:.1f} s"
    return f"{text}, {size:.1f} MB on disk an observed round"


def empirical(sketched: int, hidden: int) -> str:
    """Seconds of one client's columns of the kernel, or of all samples' sketches."""
    build = partial(MODELS.get("mlp"), input_shape=(INPUTS,), num_classes=1, hidden=[hidden])
    model = FlatModel(build)
    x = torch.randn(SAMPLES, INPUTS, generator=torch.Generator().manual_seed(0))
    side = Side(model, model.init(0), x)

    begin = time.perf_counter()
    if sketched:
        sketch(side, 1, sketched)
    else:
        kernel(side, side.part(0, SAMPLES // CLIENTS), 1)
    seconds = time.perf_counter() - begin

    whole = SAMPLES * model.num_parameters * 4 / 1e6
    return f"{seconds:.1f} s; {model.num_parameters:,} parameters, all samples' gradients would take {whole:,.0f} MB"


def measured(name: str, job: partial[str]) -> str:
    """Run a job in a process that does nothing else; returns its line."""
    before = _peak()
    text = job()
    return f"{name}: {text}; peak memory {_peak():,.0f} MB, {before:,.0f} MB of them before"


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--width", type=int, default=4096, help="of the two-layer network and of the MLP")
    width = parser.parse_args().width
    jobs = {
        "two_layer without analyses": partial(federated, [], width),
        "two_layer with flntk": partial(federated, [{"name": "flntk", "kernels_every": OBSERVED}], width),
        "exact columns of one client": partial(empirical, 0, width),
        "sketches of 4,096 numbers": partial(empirical, 4096, width),
    }
    for name, job in jobs.items():
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            print(pool.apply(measured, (name, job)), flush=True)


if __name__ == "__main__":
    main()
