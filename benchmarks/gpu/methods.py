"""Rounds of methods that do more than local SGD."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

from benchmarks.gpu.journal import Row
from benchmarks.gpu.steps import Options
from benchmarks.gpu.work import Job, Rounds, peak_bytes
from raypfl.common.counting import counted
from raypfl.methods import METHODS, Method

PERADA = Job(
    "resnet18",
    options={"norm": "group", "adapters": "bias"},
    cohort=10,
    samples=100,
    batch=32,
    pool=2000,
    trained="adapters, output layer",
)
FEDPTR = Job("convnet", cohort=5)
PEFLL = Job("lenet", cohort=10, batch=32, samples=160)


def methods(options: Options) -> Iterator[Row]:
    """Seconds of a round of PerAda with its distillation, of FedPTR with its matching, and of PeFLL."""
    quick = options.quick
    few = {"cohort": 2, "samples": 20, "pool": 200} if quick else {}
    perada = {"width": 8} if quick else {}
    distilled = 2 if quick else 100
    matched = 1 if quick else 5
    fedptr = {"width": 8} if quick else {}
    measured: list[tuple[str, Job, Method, int]] = [
        (
            f"perada, {counted(distilled, 'step')} of distillation",
            replace(PERADA, options={**PERADA.options, **perada}, **few),
            METHODS.get("perada")(steps=distilled),
            1,
        ),
        (
            f"fedptr, {counted(matched, 'step')} of matching",
            replace(FEDPTR, options=fedptr, **few),
            METHODS.get("fedptr")(
                window=1,
                per_class=1 if quick else 10,
                outer_steps=matched,
                inner_steps=matched,
            ),
            # Images are matched as soon as a client has seen two models.
            2,
        ),
        ("pefll", replace(PEFLL, **few), METHODS.get("pefll")(), 1),
    ]
    for name, job, method, warm_up in measured:
        for executor in ("vectorised", "sequential"):
            rounds = Rounds(replace(job, executor=executor), options.device, method)
            for _ in range(warm_up):
                rounds.run()
            start = time.perf_counter()
            rounds.run()
            row: Row = {"method": name, "executor": executor, "clients": job.cohort}
            row["seconds_a_round"] = time.perf_counter() - start
            peak = peak_bytes(rounds.run, options.device)
            if peak is not None:
                row["peak_mib"] = peak / 2**20
            yield row
