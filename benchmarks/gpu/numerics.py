"""What other numerics and CUDA graphs gain: each beside fp32 without them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec

from benchmarks.gpu.groups import NETWORKS
from benchmarks.gpu.journal import Row
from benchmarks.gpu.steps import Options
from benchmarks.gpu.work import Rounds, clients_per_second
from raypfl.learning.executor import DEFAULT_PRECISION, Precision

JOBS = {
    "mlp": replace(NETWORKS["mlp"], cohort=50),
    "lenet": replace(NETWORKS["lenet"], cohort=50),
    "cnn": replace(NETWORKS["cnn"], cohort=20),
    "resnet18": replace(NETWORKS["resnet18"], cohort=5, executor="sequential"),
}

SETTINGS = {
    "fp32": DEFAULT_PRECISION,
    "tf32": Precision(tf32=True),
    "bf16": Precision(autocast=True),
}


def numerics(options: Options) -> Iterator[Row]:
    """Clients a second under each setting."""
    names = ["mlp"] if options.quick else list(JOBS)
    for name in names:
        job = replace(JOBS[name], cohort=3) if options.quick else JOBS[name]
        usual = 0.0
        for setting, precision in SETTINGS.items():
            rounds = Rounds(job, options.device, precision=precision)
            rate = clients_per_second(rounds.run, job.cohort, options.seconds)
            usual = usual or rate
            yield {"network": name, "setting": setting, "clients_per_second": rate, "of_fp32": rate / usual}
    if find_spec("raypfl.learning.graphs") is None:
        yield {"setting": "CUDA graphs", "about": "left out: this version has none"}
