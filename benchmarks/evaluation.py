"""Seconds to judge 1000 personal models on their own test data, beside the forward passes alone in a bare loop.

    python -m benchmarks.evaluation                            # 2 minutes; needs 9 GB for `cnn`
    python -m benchmarks.evaluation --jobs mlp --samples 10    # seconds
    python -m benchmarks.evaluation --json evaluation.json

Every client has a model of its own, of either the 9,610-parameter MLP on 8x8 images or the 1,626,442-parameter CNN on
3x32x32 images, and `--samples` test samples. Models are random and images are noise. One process, one torch thread.

The bare loop has 1000 ordinary modules, whose weights are already in place, and 1000 batches, already normalised, both
in the layout that is faster here; it does ``module(batch)`` without gradients and nothing else. raypfl finds each
client's state and its samples (uint8, memory-mapped), normalises them, runs the network, and works out accuracy, loss
and calibration error of every client, the table's rows and their aggregates. The two take turns. Where others use the
machine, compare minima.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import raypfl
from benchmarks.peers.systems.bare import SAMPLED, faster_layout
from raypfl.backends.allocator import keep_freed_memory
from raypfl.backends.inline import Inline
from raypfl.clients.worker import Worker
from raypfl.data import FederatedData, load_federated
from raypfl.datasets import DataConfig, RawData
from raypfl.models import FlatModel
from raypfl.runs.driver import _job
from raypfl.server.server import Server
from raypfl.server.setup import make_context, make_task
from raypfl.storage.states import Stack

CLIENTS, TOGETHER = 1000, 25
HERE = "benchmarks.evaluation"
SIZES = "RAYPFL_BENCH_TEST_SAMPLES"


def images(config: DataConfig) -> RawData:
    """Noise of 3x32x32 pixels: as many samples a client to train on as to test on."""
    return _noise((3, 32, 32))


def pixels(config: DataConfig) -> RawData:
    """Noise of 8x8 pixels, likewise."""
    return _noise((1, 8, 8))


def _noise(shape: tuple[int, int, int]) -> RawData:
    draws = np.random.default_rng(0)
    count = 2 * CLIENTS * int(os.environ[SIZES])
    return RawData(
        inputs=draws.integers(0, 256, (count, *shape), dtype=np.uint8),
        labels=draws.integers(0, 10, count),
        class_names=[str(c) for c in range(10)],
    )


def described(model: str, precision: str, cache: str) -> raypfl.Experiment:
    """1000 clients, each with a model that it keeps."""
    return raypfl.Experiment(
        method="local",
        data={"name": f"{HERE}:{'pixels' if model == 'mlp' else 'images'}", "test_fraction": 0.5, "cache": cache},
        partition={"name": "iid", "clients": CLIENTS},
        model=model,
        training={"precision": precision},
        evaluation={"every": 1, "protocols": ["local"]},
        engine={"backend": "inline"},
        tracking={"mlflow": False},
        output=cache,
    )


def prepared(experiment: raypfl.Experiment, data: FederatedData, folder: str) -> tuple[Server, dict[int, np.ndarray]]:
    """A server whose clients all have a state, and those states by client, as finished groups leave them behind."""
    keep_freed_memory()
    job = _job(experiment, Path(folder), data, lambda event: None)
    task = make_task(job.experiment, data, torch.device("cpu"))
    worker = Worker(make_context(job.experiment, data, task), experiment.method)
    server = Server(job, task, worker.context.pools, Inline(worker), lambda event: None, {})
    server._restore_or_start()
    server.round = 1
    draws = np.random.default_rng(1)
    base = 0.05 * draws.standard_normal(2 * task.model.size, dtype=np.float32)
    models: dict[int, np.ndarray] = {}
    for group in np.array_split(draws.permutation(CLIENTS), CLIENTS // TOGETHER):
        first = draws.integers(0, task.model.size, len(group))
        rows = np.stack([base[at : at + task.model.size] for at in first])
        server.states.stage(tuple(group.tolist()), Stack({"personal": rows}, {"personal": np.arange(len(group))}))
        models |= dict(zip(group.tolist(), rows, strict=True))
    server.states.commit()
    return server, models


def bare(model: FlatModel, data: FederatedData, models: dict[int, np.ndarray], precision: str) -> Callable[[], None]:
    """The forward passes alone."""
    hollow = copy.deepcopy(model.module).to("meta")
    mean, std = (torch.from_numpy(v).reshape(-1, 1, 1) for v in (data.mean, data.std))
    tests = [torch.from_numpy(data.inputs[data.indices(client, "test")]) for client in range(CLIENTS)]
    batches = [(x.float() / data.scale - mean) / std for x in tests]
    layout = faster_layout(copy.deepcopy(model.module).eval(), batches[:SAMPLED])
    modules = []
    for client in range(CLIENTS):
        module = copy.deepcopy(hollow)
        module.load_state_dict(model.unflatten(torch.from_numpy(models[client])), assign=True)
        modules.append(module.to(memory_format=layout).eval())
    batches = [batch.contiguous(memory_format=layout) for batch in batches]

    def loop() -> None:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            for module, batch in zip(modules, batches, strict=True):
                module(batch)

    return loop


def seconds(work: Callable[[], Any]) -> float:
    """How long it takes."""
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def measured(model: str, precision: str, samples: int, repeats: int) -> dict[str, Any]:
    """Both by turns, after a turn to warm up."""
    os.environ[SIZES] = str(samples)
    with tempfile.TemporaryDirectory() as folder:
        experiment = described(model, precision, folder)
        data = load_federated(experiment.data, experiment.partition, seed=0)
        server, models = prepared(experiment, data, folder)
        loop = bare(server.task.model, data, models, precision)
        turns = [(seconds(loop), seconds(server._evaluate)) for _ in range(repeats + 1)][1:]
    alone, ours = zip(*turns, strict=True)
    result = {"model": model, "precision": precision, "samples": samples, "executor": server.experiment.engine.executor}
    for name, times in (("bare", alone), ("raypfl", ours)):
        result[name] = {"min": min(times), "median": statistics.median(times)}
    result["ratio"] = min(ours) / min(alone)
    result["ratio_of_medians"] = statistics.median(ours) / statistics.median(alone)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", nargs="+", choices=("mlp", "cnn"), default=["mlp", "cnn"])
    parser.add_argument("--samples", type=int, nargs="+", default=[10, 50])
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
        versions = {"torch": torch.__version__, "python": platform.python_version(), "machine": platform.processor()}
        options.json.write_text(json.dumps({"versions": versions, "results": results}, indent=1))


if __name__ == "__main__":
    main()
