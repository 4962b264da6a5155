"""Seconds a round: a bare PyTorch loop, raypfl in this process, and raypfl on Ray with one and two client actors.

    python -m benchmarks.overhead                    # 15 minutes
    python -m benchmarks.overhead --quick            # a minute, rough
    python -m benchmarks.overhead --jobs mlp --json overhead.json
    python -m benchmarks.overhead --check            # against the ratios in benchmarks/results/overhead.json

Four jobs. `cnn` and `mlp`: 1000 clients of 50 samples, cohorts of 50, one local epoch in batches of 10, SGD at 0.1,
with the 1,626,442-parameter network of published benchmarks on 3x32x32 images, which raypfl trains client by client,
and with 9,610 parameters on 8x8 images, which it trains a group at a time. `lenet`: 100 clients of 320 samples, cohorts
of 5, 50 steps in batches of 32, SGD at 0.01 with momentum 0.9, 121,182 parameters on 3x32x32 images. `own`: what a user
brings, a network with dropout and ReLU before pooling, and 200 described clients with inputs in floating point; else as
`cnn`. Every process has one torch thread. Images are noise.

The contenders take turns: a round of the bare loop, in a process of its own, follows every round of raypfl in this one,
then come its faster settings, then runs on Ray, then it starts again. The first round of each run, which warms up, is
not counted. Where others use the machine, compare minima.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

import raypfl
from benchmarks.circumstances import circumstances
from benchmarks.networks import network
from raypfl.common.messages import Mean
from raypfl.data import load_federated
from raypfl.datasets import DataConfig, Population, RawData
from raypfl.methods import FedAvg
from raypfl.server.events import Event, RoundFinished

Ratios = Mapping[str, Mapping[str, float]]
"""Job -> contender -> how many of its rounds fit into one of the bare loop's."""

LR = 0.1
HERE = "benchmarks.overhead"
COMMITTED = Path(__file__).parent / "results" / "overhead.json"
TOLERANCE = 0.25
"""How much smaller than the committed one a ratio may be before --check fails: two runs differ by up to a tenth."""


@dataclass(frozen=True)
class Job:
    """What is trained: clients, samples of each, cohort, and what else the experiment says.

    `model` : where raypfl has none of the job's name.
    """

    images: tuple[int, int, int]
    clients: int
    samples: int
    cohort: int
    training: dict[str, Any]
    layouts: bool = True
    model: str | None = None


JOBS = {
    "cnn": Job((3, 32, 32), 1000, 50, 50, {"batch_size": 10}),
    "mlp": Job((1, 8, 8), 1000, 50, 50, {"batch_size": 10}, layouts=False),
    "lenet": Job((3, 32, 32), 100, 320, 5, {"lr": 0.01, "batch_size": 32, "epochs": 5, "momentum": 0.9}),
    "own": Job((3, 32, 32), 200, 50, 50, {"batch_size": 10}, layouts=False, model="benchmarks.networks:own"),
}
FASTER = {
    "inline, channels last": {"channels_last": True},
    "inline, channels last, bf16": {"channels_last": True, "precision": "bf16"},
}


def cnn(config: DataConfig) -> RawData:
    """The samples of job `cnn`, and 100 to test on."""
    return _noise(JOBS["cnn"])


def mlp(config: DataConfig) -> RawData:
    """Those of `mlp`."""
    return _noise(JOBS["mlp"])


def lenet(config: DataConfig) -> RawData:
    """Those of `lenet`."""
    return _noise(JOBS["lenet"])


class own(Population):
    """The clients of `own`."""

    num_clients, num_classes, input_shape = JOBS["own"].clients, 10, JOBS["own"].images

    def __init__(self, config: DataConfig):
        super().__init__(config)
        draws = np.random.default_rng(0)
        count = self.num_clients * JOBS["own"].samples
        self.inputs = draws.standard_normal((count, *self.input_shape), np.float32)
        self.labels = draws.integers(0, self.num_classes, count)

    def sizes(self, split: str) -> np.ndarray:
        return np.full(self.num_clients, JOBS["own"].samples if split == "train" else 1)

    def samples(self, client: int, split: str) -> tuple[np.ndarray, np.ndarray]:
        first = client * JOBS["own"].samples
        mine = slice(first, first + int(self.sizes(split)[client]))
        return self.inputs[mine], self.labels[mine]


def _noise(job: Job) -> RawData:
    draws = np.random.default_rng(0)
    count = job.clients * job.samples + 100
    return RawData(
        inputs=draws.integers(0, 256, (count, *job.images), dtype=np.uint8),
        labels=draws.integers(0, 10, count),
        class_names=[str(c) for c in range(10)],
        test_mask=np.arange(count) >= job.clients * job.samples,
    )


class Timed(FedAvg):
    """FedAvg that notes how long its groups worked, all together, in each round."""

    def start(self, task: raypfl.Task) -> dict[str, Any]:
        return super().start(task) | {"worked": []}

    def round(self, server: dict[str, Any], cohort: Any) -> None:
        super().round(server, cohort)
        server["worked"] = [*server["worked"], cohort.seconds]


class Echo(Timed):
    """A round without training: the model goes down and comes up again as it was."""

    def train(self, clients: Any, theta: Tensor) -> dict[str, Mean]:
        return {"theta": Mean(theta.expand(len(clients), -1))}


class Nothing(Timed):
    """A round that sends no model: one number a client comes up."""

    def round(self, server: dict[str, Any], cohort: Any) -> None:
        cohort.run(self.answer)
        server["worked"] = [*server["worked"], cohort.seconds]

    def answer(self, clients: Any) -> dict[str, Mean]:
        return {"one": Mean(torch.ones(len(clients)))}


@dataclass
class Times:
    """Seconds of a contender's rounds.

    Attributes
    ----------
    rounds : one a round, warm-up left out. first : of the runs' first rounds.
    worked : seconds that a round's groups worked, all actors together.
    """

    rounds: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    worked: list[float] = field(default_factory=list)

    def add(self, rounds: Sequence[float], worked: Sequence[float] = ()) -> None:
        """Note a run."""
        self.first += rounds[:1]
        self.rounds += rounds[1:]
        self.worked += worked[1:]

    @property
    def median(self) -> float:
        return statistics.median(self.rounds)

    @property
    def best(self) -> float:
        return min(self.rounds)

    def idle(self, actors: int) -> float:
        """Median over rounds of what a round takes beyond its groups' work, evenly shared by the actors."""
        return statistics.median(r - w / actors for r, w in zip(self.rounds, self.worked, strict=True))


class Bare:
    """Federated averaging as one writes it for a single script; nothing that one would leave out of such a script."""

    def __init__(self, experiment: raypfl.Experiment):
        data = load_federated(experiment.data, experiment.partition, seed=experiment.seed)
        mean, std = (torch.from_numpy(v).reshape(-1, 1, 1) for v in (data.mean, data.std))
        self.clients = []
        for client in range(data.num_clients):
            inputs, labels = data.take(data.indices(client))
            x = torch.from_numpy(inputs).float().div_(data.scale).sub_(mean).div_(std)
            self.clients.append((x, torch.from_numpy(labels)))
        self.draws = np.random.default_rng(0)
        self.cohort = experiment.cohort.size
        self.training = experiment.training
        self.net = network(experiment.name.partition("-")[0], data.input_shape, data.num_classes)
        self.weights = {name: tensor.clone() for name, tensor in self.net.state_dict().items()}

    def round(self) -> float:
        """One round; returns its seconds."""
        begun = time.perf_counter()
        sums = {name: torch.zeros_like(tensor) for name, tensor in self.weights.items()}
        total = 0
        for client in self.draws.choice(len(self.clients), self.cohort, replace=False):
            x, y = self.clients[client]
            self._train(x, y)
            for name, tensor in self.net.state_dict().items():
                sums[name].add_(tensor, alpha=len(y))
            total += len(y)
        self.weights = {name: tensor / total for name, tensor in sums.items()}
        return time.perf_counter() - begun

    def _train(self, x: Tensor, y: Tensor) -> None:
        t = self.training
        self.net.load_state_dict(self.weights)
        optimizer = torch.optim.SGD(self.net.parameters(), lr=t.lr, momentum=t.momentum)
        for _ in range(t.epochs):
            for index in torch.randperm(len(y)).split(t.batch_size):
                loss = F.cross_entropy(self.net(x[index]), y[index])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()


def answer(pipe: Any, experiment: raypfl.Experiment) -> None:
    """A process of the bare loop's own: a round and its seconds for every word that comes."""
    torch.set_num_threads(1)
    bare = Bare(experiment)
    while pipe.recv():
        pipe.send(bare.round())


@contextlib.contextmanager
def bare_loop(experiment: raypfl.Experiment) -> Iterator[Callable[[], float]]:
    """Within: what it yields runs a round of the bare loop in a process of its own, and returns the round's seconds."""
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    process = spawn.Process(target=answer, args=(there, experiment), daemon=True)
    process.start()

    def one() -> float:
        here.send(True)
        return here.recv()

    try:
        one()
        yield one
    finally:
        here.send(False)
        process.join()


@dataclass(frozen=True)
class Plan:
    """How much to measure, and the folder for data and runs."""

    folder: str
    repeats: int
    rounds: int
    actors: tuple[int, ...]
    small: bool = False

    def experiment(
        self, job: str, backend: str, actors: int = 1, method: str = "Timed", rounds: int = 0, **training: Any
    ) -> raypfl.Experiment:
        """A run of raypfl; its first round warms up."""
        what = JOBS[job]
        parts: dict[str, Any] = {
            "data": {"name": f"{HERE}:{job}", "cache": f"{self.folder}/cache"},
            "partition": {"name": "iid", "clients": what.clients},
            "model": what.model or job,
            "method": {"name": f"{HERE}:{method}"},
            "cohort": {"size": min(what.cohort, 10) if self.small else what.cohort},
            "training": {"lr": LR, **what.training, **training},
            "evaluation": {"every": 0, "protocols": ["local"]},
            "checkpoint": {"every": 0},
            "engine": {"backend": backend, "threads": 1},
            "ray": {"actors": actors},
            "tracking": {"mlflow": False},
        }
        rounds = 1 + (rounds or self.rounds)
        return raypfl.Experiment(name=f"{job}-{backend}{actors}", rounds=rounds, output=f"{self.folder}/runs", **parts)


def train(job: str, plan: Plan) -> dict[str, Times]:
    """Contender -> times, for one job."""
    faster = FASTER if JOBS[job].layouts else {}
    rays = {f"Ray, {n} actor{'s' if n > 1 else ''}": n for n in plan.actors}
    times: dict[str, Times] = {name: Times() for name in ("bare", "inline", *faster, *rays)}
    with bare_loop(plan.experiment(job, "inline")) as bare:
        for _ in range(plan.repeats):
            loops: list[float] = []

            def alternate(event: Event, loops: list[float] = loops) -> None:
                if isinstance(event, RoundFinished):
                    loops.append(bare())

            times["inline"].add(*_run(plan.experiment(job, "inline"), alternate))
            times["bare"].add(loops)
            for name, settings in faster.items():
                times[name].add(*_run(plan.experiment(job, "inline", **settings)))
            for name, actors in rays.items():
                times[name].add(*_run(plan.experiment(job, "ray", actors)))
    return times


def engine(plan: Plan) -> dict[str, float]:
    """What -> seconds that a round on two actors, with eight groups, takes beyond its groups' work."""
    beyond = {}
    for what, job, method in (
        ("nothing", "mlp", "Nothing"),
        ("a small model", "mlp", "Echo"),
        ("a large one", "cnn", "Echo"),
    ):
        experiment = plan.experiment(job, "ray", max(plan.actors), method, rounds=20 * plan.rounds)
        experiment = experiment.override(["cohort.size=48", "engine.group_size=6"])
        times = Times()
        times.add(*_run(experiment))
        beyond[what] = times.idle(max(plan.actors))
    return beyond


def _run(experiment: raypfl.Experiment, *listeners: Any) -> tuple[list[float], list[float]]:
    """Seconds of each round, and those that its groups worked."""
    result = raypfl.run(experiment, listeners=listeners)
    return result.rounds["seconds"].to_pylist(), result.server_state()["worked"]


def show(job: str, times: dict[str, Times]) -> None:
    """Print a job's table."""
    floor = times["bare"]
    print(f"\n{job}: seconds a round, {len(floor.rounds)} rounds each")
    print(f"  {'':28}{'median':>9}{'min':>9}{'bare / it: median':>20}{'min':>8}{'beyond work':>14}{'first round':>13}")
    for name, t in times.items():
        beyond = f"{1000 * t.idle(_actors_of(name) or 1):.1f} ms" if t.worked else ""
        ratios = f"{floor.median / t.median:19.2f}x{floor.best / t.best:7.2f}x"
        print(f"  {name:28}{t.median:9.4f}{t.best:9.4f}{ratios}{beyond:>14}{max(t.first):11.2f} s")


def ratios(jobs: dict[str, dict[str, Times]]) -> dict[str, dict[str, float]]:
    """Job -> contender -> how many of its rounds fit into one of the bare loop's, by minima."""
    return {
        job: {name: round(times["bare"].best / t.best, 3) for name, t in times.items() if name != "bare"}
        for job, times in jobs.items()
    }


def check(
    measured: Ratios, committed: Ratios, jobs: Collection[str] = tuple(JOBS), actors: Collection[int] = (1, 2)
) -> list[str]:
    """What speaks against the measured ratios, a sentence each.

    A ratio more than `TOLERANCE` below the committed one does, and so does one that there is only on one side: a
    contender that is not measured is not guarded. Left out are other jobs than `jobs`, and Ray with other numbers of
    actors than `actors`.
    """
    found = []
    for job in jobs:
        here, there = measured.get(job, {}), committed.get(job, {})
        for name in dict.fromkeys([*there, *here]):
            now, then = here.get(name), there.get(name)
            if _actors_of(name) not in (*actors, None):
                continue
            if now is None:
                found.append(f"{job}: {name} was not measured; it was {then:.2f} times as fast as the bare loop")
            elif then is None:
                found.append(f"{job}: {name} has no ratio in {COMMITTED.name} to compare with; write one with --json")
            elif now < then * (1 - TOLERANCE):
                found.append(f"{job}: {name} is {now:.2f} times as fast as the bare loop, but was {then:.2f} times")
    return found


def _actors_of(name: str) -> int | None:
    """Client actors of a contender; None where it is one process."""
    return int(name.split()[1]) if name.startswith("Ray") else None


def main() -> None:
    """Measure, print, and write the numbers down if asked to."""
    parser = argparse.ArgumentParser(prog=f"python -m {HERE}", description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one repeat of few rounds with small cohorts: rough")
    parser.add_argument("--jobs", nargs="+", default=list(JOBS), choices=list(JOBS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=4, help="counted rounds a run (ten times as many for mlp)")
    parser.add_argument("--inline", action="store_true", help="leave Ray out")
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    parser.add_argument("--check", action="store_true", help="fail where ratios are below the committed, or missing")
    given = parser.parse_args()
    torch.set_num_threads(1)
    # Ray lets its workers give way to other processes, which the bare loop does not.
    os.environ.setdefault("RAY_worker_niceness", "0")
    actors = () if given.inline else (1, 2) if (os.cpu_count() or 1) > 1 else (1,)
    repeats, rounds = (1, 1) if given.quick else (given.repeats, given.rounds)
    about = f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; torch {torch.__version__}"
    begun = circumstances()
    print(f"raypfl {raypfl.__version__} on {about}")
    jobs: dict[str, dict[str, Times]] = {}
    with tempfile.TemporaryDirectory() as folder:
        plan = Plan(folder, repeats, rounds, actors, given.quick)
        with raypfl.session(plan.experiment("mlp", "inline" if given.inline else "ray")):
            for job in given.jobs:
                many = Plan(folder, repeats, rounds * (10 if job == "mlp" else 1), actors, given.quick)
                jobs[job] = train(job, many)
                show(job, jobs[job])
            beyond = engine(plan) if actors else {}
            if beyond:
                print(f"\nEngine: a round of 8 groups on {max(actors)} actors takes, beyond its groups' work,")
            for what, seconds in beyond.items():
                print(f"  {1000 * seconds:6.1f} ms where clients do nothing and {what} is sent")
    if given.json:
        times = {job: {name: asdict(t) for name, t in of.items()} for job, of in jobs.items()}
        how = begun | {"about": about, "repeats": repeats, "rounds": rounds}
        numbers = how | {"ratios": ratios(jobs), "engine": beyond, "seconds": times}
        given.json.write_text(json.dumps(numbers, indent=1))
    if given.check:
        found = check(ratios(jobs), json.loads(COMMITTED.read_text())["ratios"], given.jobs, actors)
        sys.exit("\n".join(found) or None)


if __name__ == "__main__":
    main()
