"""How fast are clients that train together: by the size of the group, beside a plain loop and one by one."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from benchmarks.gpu.journal import Row
from benchmarks.gpu.steps import Options
from benchmarks.gpu.work import Job, Rounds, bare_round, clients_per_second, count_kernels, noise, peak_bytes
from raypfl.clients.gpu_errors import out_of_memory
from raypfl.common.errors import OutOfMemory
from raypfl.models import MODELS
from raypfl.models.cost import Cost, measured_cost

SIZES = (1, 2, 5, 10, 20, 50, 100)
"""Clients of a group."""

LONGEST = 6.0
"""Seconds of a round after which larger groups are left out."""

NETWORKS = {
    "mlp": Job("mlp", (1, 28, 28)),
    "lenet": Job("lenet", batch=32, samples=160),
    "cnn": Job("cnn"),
    "cnn, batch 50": Job("cnn", batch=50, samples=250),
    "resnet18": Job("resnet18", options={"norm": "group"}),
}
"""Each client takes five steps."""


def groups(options: Options) -> Iterator[Row]:
    """Clients a second, kernels a step and memory a client; then the constants of the rule that follow."""
    sizes = (1, 5) if options.quick else SIZES
    names = ["mlp"] if options.quick else list(NETWORKS)
    points = []
    for name in names:
        job = NETWORKS[name]
        alone = replace(job, cohort=1 if options.quick else 5, executor="sequential")
        row: Row = {"network": name, "batch": job.batch, "multiplications_a_step": multiplications(job)}
        plain = _measured(bare_round(alone, options.device), alone, options)
        yield row | {"executor": "plain PyTorch"} | plain
        one_by_one = _measured(Rounds(alone, options.device).run, alone, options)
        yield row | {"executor": "sequential"} | one_by_one

        together = []
        for size in sizes:
            group = replace(job, cohort=size)
            start = time.perf_counter()
            try:
                measured = _measured(Rounds(group, options.device).run, group, options)
            except (RuntimeError, OutOfMemory) as error:
                if not out_of_memory(error):
                    raise
                yield row | {"executor": "vectorised", "group": size, "fits": False}
                break
            finally:
                _free(options.device)
            measured["of_plain_PyTorch"] = measured["clients_per_second"] / plain["clients_per_second"]
            together.append((size, measured))
            yield row | {"executor": "vectorised", "group": size} | measured
            if time.perf_counter() - start > LONGEST + options.seconds:
                break

        points.append((multiplications(job), one_by_one["clients_per_second"], together))
        if together and "peak_mib" in together[-1][1]:
            yield {"network": name} | _memory(job, together)
    yield from constants(points)


def _measured(run: Callable[[], None], job: Job, options: Options) -> Row:
    """Measure rounds of a job."""
    row: Row = {"clients_per_second": clients_per_second(run, job.cohort, options.seconds)}
    peak = peak_bytes(run, options.device)
    if peak is not None:
        row["peak_mib"] = peak / 2**20
    kernels = count_kernels(run, options.device)
    if kernels is not None:
        steps = job.steps * (1 if job.executor == "vectorised" else job.cohort)
        row["kernels_a_step"] = kernels / steps
    return row


def _memory(job: Job, together: list[tuple[int, Row]]) -> Row:
    """MiB a client, from the smallest and the largest group, and what the rule expects."""
    network = MODELS.get(job.network)(job.shape, job.classes, **job.options)
    parameters = sum(parameter.numel() for parameter in network.parameters())
    (small, first), *_, (large, last) = together if len(together) > 1 else [(0, {"peak_mib": 0.0}), *together]
    expected = cost_of(job).client_bytes(parameters, job.batch)
    return {
        "mib_a_client": (last["peak_mib"] - first["peak_mib"]) / (large - small),
        "expected_mib_a_client": expected / 2**20,
    }


def constants(points: list[tuple[int, float, list[tuple[int, Row]]]]) -> Iterator[Row]:
    """The smallest group that pays, and the largest step with which clients train faster together.

    `points` : multiplications of a client's step, clients a second one by one, and by the size of the group.
    """
    faster = []
    slower = []
    smallest = []
    for work, one_by_one, together in points:
        usual = [measured for size, measured in together if size <= 50]
        if usual and usual[-1]["clients_per_second"] > one_by_one:
            faster.append(work)
            smallest.append(min(size for size, row in together if row["clients_per_second"] > one_by_one))
        else:
            slower.append(work)

    row: Row = {"about": "constants for CUDA in raypfl/runs/choices/autotune.py"}
    if faster:
        row["smallest_group"] = max(smallest)
    if faster and slower:
        bound = math.sqrt(max(faster) * min(slower))
        row["largest_step"] = f"2**{math.log2(bound):.1f}"
        row["consistent"] = max(faster) < min(slower)
    elif faster:
        row["largest_step"] = f"at least 2**{math.log2(max(faster)):.1f}"
    else:
        row["largest_step"] = f"below 2**{math.log2(min(slower)):.1f}"
    yield row


def cost_of(job: Job) -> Cost:
    """The cost of a sample's forward pass."""
    network = MODELS.get(job.network)(job.shape, job.classes, **job.options)
    few = noise(replace(job, cohort=1, samples=2, clients=1), "cpu")
    with measured_cost(network, samples=2) as cost:
        network(few.normalise(torch.as_tensor(few.inputs)))
    return cost


def multiplications(job: Job) -> int:
    """Multiplications of a client's forward pass in a step."""
    return job.batch * cost_of(job).multiplications


def _free(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
