"""Clients a second, memory and utilisation of one GPU that 1, 2, 4, ... processes share.

    python -m benchmarks.gpu                                       # ten minutes
    python -m benchmarks.gpu --jobs cnn --actors 1 4 --seconds 2   # half a minute
    python -m benchmarks.gpu --json gpu.json

It needs torch, NumPy and PyArrow, no Ray: every process is what a client actor is, trains groups of clients again and
again, and may take its share of the GPU's memory. All begin together, after a warm-up. Images are noise.

The table says which ``ray.gpus_per_actor`` is fastest: 1 divided by the processes, as long as there are so many CPUs.
The last column says whether all processes, however many, had the same model after the same rounds.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import subprocess
import time
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import BrokenBarrierError
from typing import Any

import numpy as np
import torch

from benchmarks.circumstances import about
from raypfl.clients.context import Context
from raypfl.clients.worker import Worker
from raypfl.common.errors import OutOfMemory
from raypfl.common.memory import out_of_memory
from raypfl.engine.backends.inline import Inline
from raypfl.engine.building.devices import same_bits_on_gpus
from raypfl.federation.cohort import Cohort
from raypfl.federation.exchange.group_runner import GroupRunner
from raypfl.federation.ledger import Ledger
from raypfl.federation.server_training import ServerContext
from raypfl.federation.settings import FailureSettings
from raypfl.federation.task import Task
from raypfl.learning.batches import Samples
from raypfl.learning.executor import Executor, Precision
from raypfl.learning.sample_pools import Pools
from raypfl.learning.settings import TrainingSettings
from raypfl.learning.vectorised import Vectorised
from raypfl.methods import FedAvg
from raypfl.models import MODELS, FlatModel
from raypfl.storage.states import StateTable

CLASSES = 10
SAMPLES = 50
"""Of each client; an epoch in batches of ten."""

COMPARED = 3
"""Rounds after which the models of all processes are compared; they also warm up."""

PATIENCE = 300.0
"""Seconds within which all processes must be warm."""


@dataclass(frozen=True)
class Job:
    """A network, and the clients of a group, which train together or one by one."""

    network: str
    shape: tuple[int, int, int]
    executor: str
    group: int


JOBS = {
    "mlp": Job("mlp", (1, 8, 8), "vectorised", 50),
    "cnn": Job("cnn", (3, 32, 32), "vectorised", 10),
    "cnn-one-by-one": Job("cnn", (3, 32, 32), "sequential", 5),
    "resnet18": Job("resnet18", (3, 32, 32), "sequential", 5),
}


@dataclass(frozen=True)
class Measured:
    """The measurements of a number of processes at work together.

    Attributes
    ----------
    rate : clients a second.
    process : the most GiB that the tensors of a process took.
    gpu : the most GiB in use on the GPU; None without a GPU.
    busy : the mean share of the time in which the GPU was at work; None without a GPU.
    models : the SHA-256 of each process's model after `COMPARED` rounds.
    """

    job: str
    actors: int
    rate: float
    process: float
    gpu: float | None
    busy: float | None
    models: list[str]


class Actor:
    """A process's clients, and a server that averages them."""

    def __init__(self, job: Job, device: torch.device):
        self.job = job
        if device.type == "cuda":
            same_bits_on_gpus()
        model = FlatModel(lambda: MODELS.get(job.network)(job.shape, CLASSES), 0, torch.float32, device)
        draws = np.random.default_rng(0)
        x = torch.from_numpy(draws.integers(0, 256, (job.group * SAMPLES, *job.shape), dtype=np.uint8)).to(device)
        y = torch.from_numpy(draws.integers(0, CLASSES, job.group * SAMPLES)).to(device)
        samples = Samples(x, y, torch.tensor(1 / 64, device=device), torch.tensor(-2.0, device=device))
        pools = Pools(samples, {}, seed=0)
        sizes = np.full(job.group, SAMPLES)

        context = Context(
            model=model,
            executor=(Vectorised if job.executor == "vectorised" else Executor)(model, Precision()),
            samples=samples,
            split=lambda client, name: np.arange(client * SAMPLES, (client + 1) * SAMPLES),
            num_clients=job.group,
            num_classes=CLASSES,
            training=TrainingSettings(lr=0.01),
            seed=0,
            pools=pools,
        )
        self.method = FedAvg()
        self.runner = GroupRunner(
            task=Task(model, 0, 1, job.group, CLASSES, job.shape, sizes),
            backend=Inline(Worker(context, self.method)),
            states=StateTable(),
            ledger=Ledger(),
            failures=FailureSettings(),
            context=ServerContext(pools, Precision(), lambda event: None),
            costs=sizes.astype(float),
            cut_for=lambda cohort: ([cohort], job.executor),
            warn=print,
        )
        self.server = self.method.start(self.runner.task)
        self.rounds = 0

    def round(self) -> None:
        """Train the group, and average it; waits for the GPU, since the server needs the numbers."""
        self.rounds += 1
        cohort = Cohort(self.runner, tuple(range(self.job.group)), (), self.rounds, 0.01)
        self.method.round(self.server, cohort)
        self.server["theta"].sum().item()


_gate: Any = None


def _behind(gate: Any) -> None:
    global _gate
    _gate = gate


def _work(job: Job, device: str, actors: int, seconds: float) -> tuple[float, float, str]:
    """Train in one of `actors` processes; returns clients a second, GiB, and the model's SHA-256."""
    try:
        torch.set_num_threads(1)
        if device == "cuda":
            torch.cuda.set_per_process_memory_fraction(1 / actors)
        actor = Actor(job, torch.device(device))
        for _ in range(COMPARED):
            actor.round()
        model = hashlib.sha256(actor.server["theta"].cpu().numpy().tobytes()).hexdigest()
        _gate.wait(PATIENCE)
    except BaseException:
        _gate.abort()
        raise

    start = time.perf_counter()
    rounds_before = actor.rounds
    while time.perf_counter() - start < seconds:
        actor.round()
    rate = (actor.rounds - rounds_before) * job.group / (time.perf_counter() - start)
    memory = torch.cuda.max_memory_reserved() / 2**30 if device == "cuda" else 0.0
    return rate, memory, model


def measured(name: str, actors: int, seconds: float, device: str = "cuda") -> Measured:
    """Measure a number of processes for some seconds.

    Raises
    ------
    OutOfMemory, RuntimeError : if they do not fit.
    """
    spawning = multiprocessing.get_context("spawn")
    gate = spawning.Barrier(actors + 1)
    with ProcessPoolExecutor(actors, spawning, _behind, (gate,)) as processes:
        work = [processes.submit(_work, JOBS[name], device, actors, seconds) for _ in range(actors)]
        try:
            gate.wait(PATIENCE)
        except BrokenBarrierError:
            raise _cause(work) from None

        readings = []
        while device == "cuda" and not all(future.done() for future in work):
            readings.append(_read_nvidia_smi())
            time.sleep(0.2)
        rates, memory, models = zip(*(future.result() for future in work), strict=True)

    gpu = None
    busy = None
    if readings:
        used_mib, utilisation = zip(*readings, strict=True)
        gpu = max(used_mib) / 1024
        busy = sum(utilisation) / len(utilisation) / 100
    return Measured(name, actors, sum(rates), max(memory), gpu, busy, [*models])


def _cause(work: list[Future[Any]]) -> BaseException:
    """The first error of a process, rather than of one that only found the barrier broken by it."""
    outcomes = [future.exception() for future in work]
    errors = [error for error in outcomes if error is not None]
    causes = [error for error in errors if not isinstance(error, BrokenBarrierError)]
    return (causes or errors)[0]


def _read_nvidia_smi() -> tuple[float, float]:
    """MiB in use on the first GPU, and the percentage of the last moments in which it was at work."""
    query = ["nvidia-smi", "-i", "0", "--query-gpu=memory.used,utilization.gpu", "--format=csv,noheader,nounits"]
    used, busy = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split(",")
    return float(used), float(busy)


def main() -> None:
    """Measure and print; write the numbers with --json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=list(JOBS))
    parser.add_argument("--actors", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("torch sees no GPU on this machine, so there is nothing to measure.")

    print(f"{about()}, {torch.cuda.get_device_name()}")
    print(f"{'job':16}{'processes':>10}{'clients/s':>11}{'of one':>8}{'GiB each':>10}{'GiB GPU':>9}{'busy':>6}  models")
    results: list[Measured] = []
    for name in options.jobs:
        of_job: list[Measured] = []
        for actors in options.actors:
            try:
                result = measured(name, actors, options.seconds)
            except (RuntimeError, OutOfMemory) as error:
                if not out_of_memory(error):
                    raise
                print(f"{name:16}{actors:10}  do not fit the GPU's memory", flush=True)
                break

            of_job.append(result)
            models = {model for measurement in of_job for model in measurement.models}
            print(
                f"{name:16}{actors:10}{result.rate:11.1f}{result.rate / of_job[0].rate:7.2f}x{result.process:10.2f}"
                f"{result.gpu or 0:9.2f}{result.busy or 0:6.0%}  {'equal' if len(models) == 1 else 'DIFFERENT'}",
                flush=True,
            )
        results += of_job

    if options.json:
        rows = [asdict(result) for result in results]
        document = {"about": about(), "gpu": torch.cuda.get_device_name(), "results": rows}
        options.json.write_text(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
