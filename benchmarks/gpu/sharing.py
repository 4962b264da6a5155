"""Processes that share a card: equal bits, and how many clients a second they train together."""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, replace
from threading import BrokenBarrierError
from typing import Any

import torch

from benchmarks.gpu.journal import Row
from benchmarks.gpu.steps import Options
from benchmarks.gpu.work import Job, Rounds, bare_round, clients_per_second, recorders
from raypfl.clients.gpu_errors import out_of_memory
from raypfl.common.errors import OutOfMemory
from raypfl.engine.building.devices import limit_memory, mps_runs

PATIENCE = 200.0
"""Seconds within which all processes must be warm."""

COMPARED = 3
"""Rounds after which models are compared."""

BITS = {
    "mlp": Job("mlp", (1, 28, 28), cohort=50),
    "lenet": Job("lenet", cohort=20),
    "cnn": Job("cnn"),
    "cnn, one by one": Job("cnn", executor="sequential", cohort=5),
    "resnet18": Job("resnet18", options={"norm": "group"}, executor="sequential", cohort=3),
    "resnet18, together": Job("resnet18", options={"norm": "group"}, cohort=5),
    "transformer": Job("causal_transformer", (32,), kind="tokens", classes=40),
}
"""What is trained twice in every process."""

PFL = Job("cnn", cohort=50, clients=1000, samples=50, batch=10)
"""pfl-research's CIFAR-10 benchmark: 1,000 users of 50 images, a cohort of 50, an epoch in batches of 10."""

PFL_ROUNDS = 1500
"""Rounds of that benchmark."""


def bits(options: Options) -> Iterator[Row]:
    """Train the same in every process, twice: each must get the same model, however many share the card."""
    jobs = {"mlp": BITS["mlp"], "cnn": replace(BITS["cnn"], cohort=2)} if options.quick else BITS
    expected: Mapping[str, str] | None = None
    for processes in options.processes:
        try:
            hashes = together(_hashes, processes, options, jobs)
        except (RuntimeError, OutOfMemory) as error:
            if not out_of_memory(error):
                raise
            yield {"processes": processes, "fits": False}
            return
        if expected is None:
            expected = hashes[0][0]

        different = set()
        for name, value in expected.items():
            if any(run[name] != value for runs in hashes for run in runs):
                different.add(name)
        row: Row = {"processes": processes, "mps": mps_runs(), "same_bits": not different}
        if different:
            row["different"] = sorted(different)
        yield row | {"hashes": dict(expected)}


def _hashes(options: Options, share: float, ready: Callable[[], None], jobs: Mapping[str, Job]) -> list[dict[str, str]]:
    """The hashes of all jobs' models, trained twice while the other processes do the same."""
    ready()
    runs = []
    for _ in range(2):
        hashes = {}
        for name, job in jobs.items():
            rounds = Rounds(job, options.device)
            for _ in range(COMPARED):
                rounds.run()
            hashes[name] = rounds.hash()
        runs.append(hashes)
    return runs


def pfl(options: Options) -> Iterator[Row]:
    """Clients a second in pfl-research's set-up, whose cohort the processes share, and in a plain loop."""
    job = replace(PFL, cohort=4, clients=20) if options.quick else PFL
    for processes in options.processes:
        cohort = math.ceil(job.cohort / processes)
        contenders = {
            "vectorised": replace(job, cohort=cohort),
            **{f"vectorised, {way}": replace(job, cohort=cohort) for way in recorders(options.device)},
            "sequential": replace(job, cohort=cohort, executor="sequential", group=5),
            "plain PyTorch": replace(job, cohort=cohort),
        }
        try:
            readings = together(_rates, processes, options, contenders)
        except (RuntimeError, OutOfMemory) as error:
            if not out_of_memory(error):
                raise
            yield {"processes": processes, "fits": False}
            return

        for i, name in enumerate(contenders):
            rate = sum(reading.rates[i] for reading in readings)
            yield {
                "executor": name,
                "processes": processes,
                "mps": mps_runs(),
                "clients_per_second": rate,
                "minutes_of_1500_rounds": PFL_ROUNDS * PFL.cohort / rate / 60,
            }
        if options.device == "cuda":
            reserved = sum(reading.reserved for reading in readings)
            used = max(reading.used for reading in readings)
            yield {
                "processes": processes,
                "mib_of_a_process": reserved / processes / 2**20,
                "context_mib": (used - reserved) / processes / 2**20,
            }


@dataclass(frozen=True)
class _Reading:
    """What a process measured.

    Attributes
    ----------
    rates : clients a second of each contender.
    reserved : bytes that this process's tensors reserved at most.
    used : bytes of the card in use at the end, by all processes.
    """

    rates: list[float]
    reserved: float = 0.0
    used: float = 0.0


def _rates(options: Options, share: float, ready: Callable[[], None], contenders: Mapping[str, Job]) -> _Reading:
    rates = []
    for name, job in contenders.items():
        if name == "plain PyTorch":
            run = bare_round(job, options.device)
        else:
            recorder = recorders(options.device).get(name.partition(", ")[2])
            run = Rounds(job, options.device, recorder=recorder and recorder()).run
        run()
        # All processes measure the same contender at the same time.
        ready()
        rates.append(clients_per_second(run, job.cohort, options.seconds))
    if options.device != "cuda":
        return _Reading(rates)

    reserved = torch.cuda.memory_reserved()
    ready()
    free, total = torch.cuda.mem_get_info()
    return _Reading(rates, reserved, total - free)


# --- processes --------------------------------------------------------------------------------------------------------

_gate: Any = None


def _enter(gate: Any) -> None:
    global _gate
    _gate = gate


def _work(function: Callable[..., Any], options: Options, share: float, arguments: tuple[Any, ...]) -> Any:
    try:
        torch.set_num_threads(1)
        if options.device == "cuda":
            limit_memory(share)
        return function(options, share, lambda: _gate.wait(PATIENCE), *arguments)
    except BaseException:
        # The others wait for this process no longer.
        _gate.abort()
        raise


def together(function: Callable[..., Any], processes: int, options: Options, *arguments: Any) -> list[Any]:
    """Return ``function(options, share, ready, *arguments)`` of processes that share the card.

    ``ready()`` waits until all of them have come so far.

    Raises
    ------
    OutOfMemory, RuntimeError : if they do not fit.
    """
    spawning = multiprocessing.get_context("spawn")
    gate = spawning.Barrier(processes)
    with ProcessPoolExecutor(processes, spawning, _enter, (gate,)) as pool:
        work = [pool.submit(_work, function, options, 1 / processes, arguments) for _ in range(processes)]
        try:
            return [future.result() for future in work]
        except BaseException:
            raise _cause(work) from None


def _cause(work: list[Future[Any]]) -> BaseException:
    """The first error of a process, rather than of one that only found the barrier broken by it."""
    outcomes = [future.exception() for future in work]
    errors = [error for error in outcomes if error is not None]
    causes = [error for error in errors if not isinstance(error, BrokenBarrierError)]
    return (causes or errors)[0]
