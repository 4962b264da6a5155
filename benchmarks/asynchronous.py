"""Clients a second of asynchronous rounds, beside those of synchronous ones: in this process, and on Ray's actors.

    python -m benchmarks.asynchronous                           # a quarter of an hour
    python -m benchmarks.asynchronous --jobs mlp --actors 2     # two minutes
    python -m benchmarks.asynchronous --cohort 50 --buffer 10

FedAvg on noise. A cohort of `--cohort` clients is at work at a time. Synchronous rounds end after the replies of all,
asynchronous ones after `--buffer` replies (FedBuff); a third kind is synchronous with cohorts as small as the buffer,
so that it makes as many models. All hear equally many replies. Devices are log-normal. The jobs have the networks and
samples of `benchmarks.peers`: `cnn` trains client by client, and `mlp` a group at a time.

All kinds take turns on the same actors. The first run of each warms up, and is not counted. A ratio is of runs that
follow each other; the median of these is printed, with the lowest and the highest. CPU time is of all processes, Ray's
included. `at work` is the share of time in which client actors train, `group` the size of the mean client's group. On
a machine that others use, trust CPU time and this share, not seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import raypfl
from benchmarks.circumstances import about
from benchmarks.memory import PROC, descendants
from benchmarks.noise import ONLY_ROUNDS, SETS
from benchmarks.overhead import Timed
from raypfl.common.messages import Mean
from raypfl.engine.events import Event, RoundFinished, RunStarted

HERE = "benchmarks.asynchronous"
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Job:
    """Clients that train.

    Attributes
    ----------
    noise : the name of their samples in `SETS`.
    replies : the number of replies of a run.
    """

    noise: str
    model: str | dict[str, Any]
    replies: int


JOBS = {
    "mlp": Job("pixels", {"name": "mlp", "hidden": [128]}, 4000),
    "cnn": Job("images", "cnn", 240),
}


class Grouped(Timed):
    """FedAvg whose clients log how long their group worked, and how many clients it had."""

    def work(self, clients: Any, theta: Tensor) -> dict[str, Mean]:
        clients.log(group=torch.full((len(clients),), float(len(clients))))
        return super().work(clients, theta)


@dataclass
class Measured:
    """The measurements of one kind of rounds; each list has an item a run.

    Attributes
    ----------
    rate : clients a second.
    cpu : milliseconds of CPU time a client.
    at_work : share of time that actors trained.
    group : clients of a group, as the mean client sees it.
    """

    rate: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    at_work: list[float] = field(default_factory=list)
    group: list[float] = field(default_factory=list)


class CpuTime:
    """A listener that notes the CPU time of all processes between the run's start and its last round."""

    def __init__(self, last_round: int):
        self._last = last_round
        self._before = 0.0
        self.seconds = 0.0

    def __call__(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self._before = cpu_seconds()
        if isinstance(event, RoundFinished) and event.round == self._last:
            self.seconds = cpu_seconds() - self._before


def cpu_seconds() -> float:
    """CPU time of this process and all below it that run now, in seconds."""
    ticks = 0
    for process in descendants(os.getpid()):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            fields = (PROC / f"{process.pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks / TICKS


def experiment(folder: str, job: Job, cohort: int, buffer: int | None, actors: int) -> raypfl.Experiment:
    """Describe a run.

    Parameters
    ----------
    buffer : replies that end an asynchronous round; None: rounds are synchronous.
    actors : the number of client actors; 0: the run is in this process.
    """
    parts: dict[str, Any] = {
        **ONLY_ROUNDS,
        **SETS[job.noise].source(f"{folder}/cache"),
        "model": job.model,
        "method": f"{HERE}:Grouped",
        "cohort": {"size": cohort},
        "training": {"lr": 0.1, "batch_size": 10},
        "devices": {"hardware": {"name": "lognormal", "speed_spread": 1.0}},
        "asynchronous": {"buffer": buffer} if buffer else {},
        "engine": {"backend": "ray" if actors else "inline", "threads": 1},
        "ray": {"actors": actors or None},
    }
    rounds = job.replies // (buffer or cohort)
    return raypfl.Experiment(name="asynchronous", rounds=rounds, output=f"{folder}/runs", **parts)


def measure(described: raypfl.Experiment, measured: Measured | None) -> str:
    """Run an experiment, and note what it took; return the hash of its models."""
    cpu = CpuTime(described.rounds)
    result = raypfl.run(described, listeners=[cpu])
    if measured is not None:
        clients = result.rounds["clients"].to_pylist()
        seconds = sum(result.rounds["seconds"].to_pylist())
        worked = total(result, "worked", clients)
        measured.rate.append(sum(clients) / seconds)
        measured.cpu.append(1000 * cpu.seconds / sum(clients))
        measured.at_work.append(worked / seconds / (described.ray.actors or 1))
        measured.group.append(total(result, "group", clients) / sum(clients))
    return result.weights_hash


def total(result: raypfl.Result, name: str, clients: Sequence[int]) -> float:
    """Return the sum over all clients of what they logged, of which rounds record means."""
    means = [row["value"] for row in result.logged.to_pylist() if row["name"] == name]
    return sum(mean * count for mean, count in zip(means, clients, strict=True))


def compare(folder: str, job: Job, cohort: int, buffer: int, actors: int, repeats: int) -> dict[str, Measured]:
    """Measure all kinds of rounds in turns."""
    described = {
        "synchronous": experiment(folder, job, cohort, None, actors),
        "as many a round": experiment(folder, job, buffer, None, actors),
        "asynchronous": experiment(folder, job, cohort, buffer, actors),
    }
    measured = {kind: Measured() for kind in described}
    hashes: dict[str, set[str]] = {kind: set() for kind in described}
    with raypfl.session(described["synchronous"]):
        for repeat in range(1 + repeats):
            for kind, kind_described in described.items():
                weights_hash = measure(kind_described, measured[kind] if repeat else None)
                hashes[kind].add(weights_hash)
    assert all(len(of_kind) == 1 for of_kind in hashes.values()), "a run was repeated with other bits"
    return measured


def show(name: str, where: str, measured: dict[str, Measured]) -> None:
    """Print a job's rows."""
    for kind, of_kind in measured.items():
        row = f"{name:>5}{where:>10}  {kind:18}"
        row += f"{statistics.median(of_kind.rate):9.2f}{against(measured, kind, 'rate'):>23}"
        row += f"{statistics.median(of_kind.cpu):9.2f}{against(measured, kind, 'cpu'):>23}"
        row += f"{statistics.median(of_kind.at_work):9.2f}{statistics.median(of_kind.group):9.1f}"
        print(row, flush=True)


def against(measured: dict[str, Measured], kind: str, quantity: str) -> str:
    """Return the median ratio of a kind's runs to the synchronous ones before them, the lowest and the highest."""
    pairs = zip(getattr(measured[kind], quantity), getattr(measured["synchronous"], quantity), strict=True)
    ratios = sorted(value / synchronous for value, synchronous in pairs)
    return f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog=f"python -m {HERE}", description=__doc__.partition("\n")[0])
    parser.add_argument("--jobs", nargs="+", default=list(JOBS), choices=list(JOBS))
    parser.add_argument("--actors", type=int, nargs="+", default=[0, 2], help="0: in this process")
    parser.add_argument("--cohort", type=int, default=20, help="clients at work at a time")
    parser.add_argument("--buffer", type=int, default=10, help="replies that end an asynchronous round")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("RAY_worker_niceness", "0")

    print(f"{about()}; {options.cohort} clients at work, {options.buffer} replies end an asynchronous round")
    print(f"{'':35}{'clients a second':>18}{'/ synchronous':>14}{'CPU ms a client':>18}{'/ synchronous':>14}", end="")
    print(f"{'at work':>9}{'group':>9}")
    with tempfile.TemporaryDirectory() as folder:
        for name in options.jobs:
            for actors in options.actors:
                where = f"{actors} actors" if actors else "inline"
                measured = compare(folder, JOBS[name], options.cohort, options.buffer, actors, options.repeats)
                show(name, where, measured)


if __name__ == "__main__":
    main()
