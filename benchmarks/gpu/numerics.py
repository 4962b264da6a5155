"""What other numerics, recorded steps and aligned rows gain: each beside fp32 with aligned rows and no recordings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

from benchmarks.gpu.groups import NETWORKS
from benchmarks.gpu.journal import Row
from benchmarks.gpu.steps import Options
from benchmarks.gpu.work import Job, Rounds, clients_per_second, recorders
from raypfl.learning.executor import DEFAULT_PRECISION, Precision
from raypfl.models import rows

STEPS = 20
"""Steps of each client: enough for a recorded step to pay."""

FEW = 10
"""Clients of a cohort for which only fp32 is measured."""

JOBS = {
    "mlp": replace(NETWORKS["mlp"], cohort=50),
    "mlp, ten clients": replace(NETWORKS["mlp"], cohort=FEW),
    "lenet": replace(NETWORKS["lenet"], cohort=50),
    "cnn": replace(NETWORKS["cnn"], cohort=20),
    "resnet18": replace(NETWORKS["resnet18"], cohort=5, executor="sequential"),
}

PRECISIONS = {
    "fp32": DEFAULT_PRECISION,
    "tf32": Precision(tf32=True),
    "bf16": Precision(autocast=True),
}


def numerics(options: Options) -> Iterator[Row]:
    """Clients a second under each setting."""
    names = ["mlp"] if options.quick else list(JOBS)
    for name in names:
        job = replace(JOBS[name], samples=STEPS * JOBS[name].batch)
        if options.quick:
            job = replace(job, cohort=3)

        usual = 0.0
        for setting, rounds in _settings(job, options.device):
            rate = clients_per_second(rounds.run, job.cohort, options.seconds)
            usual = usual or rate
            row: Row = {"network": name, "setting": setting, "clients_per_second": rate, "of_fp32": rate / usual}
            if rounds.warnings:
                row["warnings"] = sorted(rounds.warnings)
            yield row


def _settings(job: Job, device: str) -> Iterator[tuple[str, Rounds]]:
    """Yield the rounds under each setting; what is patched stays so while they are timed."""
    precisions = {"fp32": DEFAULT_PRECISION} if job.cohort == FEW else PRECISIONS
    for name, precision in precisions.items():
        yield name, Rounds(job, device, precision=precision)
        if job.executor == "vectorised":
            for way, recorder in recorders(device).items():
                yield f"{name}, {way}", Rounds(job, device, precision=precision, recorder=recorder())
    if job.executor == "vectorised":
        bytes_per_number = 4
        with mock.patch.object(rows, "ALIGNMENT", bytes_per_number):
            yield "fp32, rows not aligned", Rounds(job, device)
