"""Seconds a round: a bare PyTorch loop, raypfl in this process, and raypfl on Ray with one and two client actors.

    python -m benchmarks.overhead                    # 15 minutes
    python -m benchmarks.overhead --quick            # a minute, rough
    python -m benchmarks.overhead --jobs mlp --json overhead.json
    python -m benchmarks.overhead --check            # against the ratios in benchmarks/results/overhead.json

Four jobs. `cnn`, `mlp` and `lenet` are those of `benchmarks.peers`; raypfl trains the first client by client and the
second a group at a time. `own` is a network of a user's own, with dropout and ReLU before pooling, and 200 described
clients with inputs in floating point; else it is as `cnn`. Every process has one torch thread. Samples are noise.

The contenders take turns. A round of the bare loop, in a process of its own, follows every round of raypfl in this
process. Then come raypfl's faster settings and runs on Ray, and then it starts again. The first round of each run warms
up and is not counted. On a machine that others use, compare minima.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import raypfl
from benchmarks.circumstances import about, circumstances
from benchmarks.noise import SETS
from benchmarks.peers.data import prepare
from benchmarks.peers.jobs import ACTORS, BF16, CHANNELS_LAST, INLINE, Contender, Job
from benchmarks.peers.jobs import JOBS as OF_PEERS
from benchmarks.peers.order import Order
from benchmarks.peers.systems.bare import Loop
from benchmarks.peers.systems.raypfl import experiment
from raypfl.common.messages import Mean
from raypfl.engine.events import Event, RoundFinished
from raypfl.methods import FedAvg

Ratios = Mapping[str, Mapping[str, float]]
"""Job -> contender -> how many of its rounds fit into one of the bare loop's."""

HERE = "benchmarks.overhead"
COMMITTED = Path(__file__).parent / "results" / "overhead.json"
TOLERANCE = 0.25
"""How much smaller than the committed one a ratio may be before --check fails: two runs differ by up to a tenth."""

OWN = Job("own", "a network of a user's own", SETS["described"], "benchmarks.networks:own", contenders=(INLINE,))
JOBS = {name: OF_PEERS[name] for name in ("cnn", "mlp", "lenet")} | {"own": OWN}
FASTER = {"inline, channels last": CHANNELS_LAST, "inline, channels last, bf16": BF16}


class Timed(FedAvg):
    """FedAvg whose clients log their share of the seconds that their group worked."""

    def train(self, clients: Any, theta: Tensor) -> dict[str, Mean]:
        start = time.perf_counter()
        reply = self.work(clients, theta)
        clients.log(worked=torch.full((len(clients),), (time.perf_counter() - start) / len(clients)))
        return reply

    def work(self, clients: Any, theta: Tensor) -> dict[str, Mean]:
        return super().train(clients, theta)


class Echo(Timed):
    """A round without training: clients return the model that they get."""

    def work(self, clients: Any, theta: Tensor) -> dict[str, Mean]:
        return {"theta": Mean(theta.expand(len(clients), -1))}


class Nothing(Timed):
    """A round that sends no model: each client returns one number."""

    def round(self, server: dict[str, Any], cohort: Any) -> None:
        cohort.run(self.answer)

    def answer(self, clients: Any) -> dict[str, Mean]:
        return self.train(clients, clients.initial)

    def work(self, clients: Any, theta: Tensor) -> dict[str, Mean]:
        return {"one": Mean(torch.ones(len(clients)))}


@dataclass
class Times:
    """Seconds of a contender's rounds.

    Attributes
    ----------
    rounds : the seconds of each round except the runs' first.
    first : the seconds of the runs' first rounds, which warm up.
    worked : the seconds that a round's groups worked, all actors together.
    """

    rounds: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    worked: list[float] = field(default_factory=list)

    def add(self, rounds: Sequence[float], worked: Sequence[float] = ()) -> None:
        """Add a run."""
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
        """Median over rounds of the seconds beyond the groups' work, evenly shared by the actors."""
        pairs = zip(self.rounds, self.worked, strict=True)
        return statistics.median(seconds - worked / actors for seconds, worked in pairs)


def answer(pipe: Any, order: Order) -> None:
    """The bare loop's process: it runs a round and sends its seconds whenever it receives True, and ends at False."""
    torch.set_num_threads(1)
    loop = Loop(order)
    while pipe.recv():
        start = time.perf_counter()
        loop.round()
        pipe.send(time.perf_counter() - start)


@contextlib.contextmanager
def bare_loop(order: Order) -> Iterator[Callable[[], float]]:
    """A function that runs a round of the bare loop in a process of its own and returns the round's seconds."""
    spawn = multiprocessing.get_context("spawn")
    pipe, pipe_of_process = spawn.Pipe()
    process = spawn.Process(target=answer, args=(pipe_of_process, order), daemon=True)
    process.start()

    def run_round() -> float:
        pipe.send(True)
        return pipe.recv()

    try:
        run_round()
        yield run_round
    finally:
        pipe.send(False)
        process.join()


@dataclass(frozen=True)
class Plan:
    """How much to measure, and the folder for data and runs."""

    folder: str
    repeats: int
    rounds: int
    actors: tuple[int, ...]
    small: bool = False

    def order(self, job: Job, contender: Contender = INLINE) -> Order:
        """The job for a contender, its samples prepared."""
        source, files = prepare(job.noise, Path(self.folder))
        cohort = min(job.cohort, 10) if self.small else job.cohort
        return job.order(contender, source, files, Path("unused"), cohort)

    def experiment(
        self, job: str, contender: Contender = INLINE, method: str = "Timed", rounds: int = 0
    ) -> raypfl.Experiment:
        """A run of raypfl; its first round warms up."""
        described = experiment(self.order(JOBS[job], contender), f"{self.folder}/runs")
        return described.replace(rounds=1 + (rounds or self.rounds), method=f"{HERE}:{method}")


def on_ray(actors: int) -> Contender:
    """raypfl with `actors` client actors."""
    return Contender(f"Ray, {actors} actor{'s' if actors > 1 else ''}", "raypfl", actors, {"actors": actors})


def train(job: str, plan: Plan) -> dict[str, Times]:
    """Contender -> times, for one job."""
    after_inline = {name: contender for name, contender in FASTER.items() if contender in JOBS[job].contenders}
    for contender in map(on_ray, plan.actors):
        after_inline[contender.name] = contender

    times: dict[str, Times] = {name: Times() for name in ("bare", "inline", *after_inline)}
    with bare_loop(plan.order(JOBS[job])) as bare:
        for _ in range(plan.repeats):
            loops: list[float] = []

            def alternate(event: Event, loops: list[float] = loops) -> None:
                if isinstance(event, RoundFinished):
                    loops.append(bare())

            times["inline"].add(*run(plan.experiment(job), alternate))
            times["bare"].add(loops)
            for name, contender in after_inline.items():
                times[name].add(*run(plan.experiment(job, contender)))
    return times


def engine(plan: Plan) -> dict[str, float]:
    """Message -> seconds that a round of eight groups takes beyond its groups' work."""
    ray = on_ray(max(plan.actors))
    beyond = {}
    for message, job, method in (
        ("nothing", "mlp", "Nothing"),
        ("a small model", "mlp", "Echo"),
        ("a large one", "cnn", "Echo"),
    ):
        described = plan.experiment(job, ray, method, rounds=20 * plan.rounds)
        times = Times()
        times.add(*run(described.override(["cohort.size=48", "engine.group_size=6"])))
        beyond[message] = times.idle(ray.processes)
    return beyond


def run(described: raypfl.Experiment, *listeners: Any) -> tuple[list[float], list[float]]:
    """Seconds of each round, and seconds that its groups worked."""
    result = raypfl.run(described, listeners=listeners)
    shares = [row["value"] for row in result.logged.to_pylist() if row["name"] == "worked"]
    clients = result.rounds["clients"].to_pylist()
    worked = [share * count for share, count in zip(shares, clients, strict=True)]  # a share is the clients' mean
    return result.rounds["seconds"].to_pylist(), worked


def show(job: str, times: dict[str, Times]) -> None:
    """Print a job's table."""
    floor = times["bare"]
    print(f"\n{job}: seconds a round, {len(floor.rounds)} rounds each")
    print(f"  {'':28}{'median':>9}{'min':>9}{'bare / it: median':>20}{'min':>8}{'beyond work':>14}{'first round':>13}")
    for name, t in times.items():
        beyond = f"{1000 * t.idle(actors_of(name) or 1):.1f} ms" if t.worked else ""
        ratios = f"{floor.median / t.median:19.2f}x{floor.best / t.best:7.2f}x"
        print(f"  {name:28}{t.median:9.4f}{t.best:9.4f}{ratios}{beyond:>14}{max(t.first):11.2f} s")


def ratios(jobs: dict[str, dict[str, Times]]) -> dict[str, dict[str, float]]:
    """Job -> contender -> how many of its rounds fit into one of the bare loop's, by minima."""
    ratios = {}
    for job, times in jobs.items():
        floor = times["bare"].best
        ratios[job] = {name: round(floor / t.best, 3) for name, t in times.items() if name != "bare"}
    return ratios


def check(
    measured: Ratios, committed: Ratios, jobs: Collection[str] = tuple(JOBS), actors: Collection[int] = (1, 2)
) -> list[str]:
    """A sentence for each measured ratio that is worse than the committed one.

    A ratio fails if it is more than `TOLERANCE` below the committed one, or if only one of the two exists: what is not
    measured is not guarded. Jobs not in `jobs`, and Ray with numbers of actors not in `actors`, are left out.
    """
    problems = []
    for job in jobs:
        measured_ratios = measured.get(job, {})
        committed_ratios = committed.get(job, {})
        for name in dict.fromkeys([*committed_ratios, *measured_ratios]):
            if actors_of(name) not in (*actors, None):
                continue

            now = measured_ratios.get(name)
            then = committed_ratios.get(name)
            if now is None:
                problems.append(f"{job}: {name} was not measured; it was {then:.2f} times as fast as the bare loop")
            elif then is None:
                sentence = f"{name} has no ratio in {COMMITTED.name} to compare with; write one with --json"
                problems.append(f"{job}: {sentence}")
            elif now < then * (1 - TOLERANCE):
                problems.append(f"{job}: {name} is {now:.2f} times as fast as the bare loop, but was {then:.2f} times")
    return problems


def actors_of(name: str) -> int | None:
    """Client actors of a contender; None if it is one process."""
    return int(name.split()[1]) if name.startswith("Ray") else None


def main() -> None:
    """Measure and print; write the numbers with --json."""
    parser = argparse.ArgumentParser(prog=f"python -m {HERE}", description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one repeat of few rounds with small cohorts: rough")
    parser.add_argument("--jobs", nargs="+", default=list(JOBS), choices=list(JOBS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=4, help="counted rounds a run (ten times as many for mlp)")
    parser.add_argument("--inline", action="store_true", help="leave Ray out")
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    parser.add_argument("--check", action="store_true", help="fail if ratios are below the committed ones, or missing")
    options = parser.parse_args()
    torch.set_num_threads(1)
    # Ray lowers its workers' priority, while the bare loop keeps its own.
    os.environ.setdefault("RAY_worker_niceness", "0")

    if options.inline:
        actors: tuple[int, ...] = ()
    elif (os.cpu_count() or 1) > 1:
        actors = (1, 2)
    else:
        actors = (1,)
    repeats, rounds = (1, 1) if options.quick else (options.repeats, options.rounds)

    origin = circumstances() | {"about": about()}
    print(origin["about"])
    jobs: dict[str, dict[str, Times]] = {}
    with tempfile.TemporaryDirectory() as folder:
        plan = Plan(folder, repeats, rounds, actors, options.quick)
        with raypfl.session(plan.experiment("mlp", INLINE if options.inline else ACTORS)):
            for job in options.jobs:
                many = Plan(folder, repeats, rounds * (10 if job == "mlp" else 1), actors, options.quick)
                jobs[job] = train(job, many)
                show(job, jobs[job])

            beyond = engine(plan) if actors else {}
            if beyond:
                print(f"\nEngine: a round of 8 groups on {max(actors)} actors takes, beyond its groups' work,")
            for message, seconds in beyond.items():
                print(f"  {1000 * seconds:6.1f} ms where clients do nothing and {message} is sent")

    if options.json:
        seconds_of_jobs = {}
        for job, times in jobs.items():
            seconds_of_jobs[job] = {name: asdict(t) for name, t in times.items()}
        settings = origin | {"repeats": repeats, "rounds": rounds}
        numbers = settings | {"ratios": ratios(jobs), "engine": beyond, "seconds": seconds_of_jobs}
        options.json.write_text(json.dumps(numbers, indent=1))

    if options.check:
        committed = json.loads(COMMITTED.read_text())["ratios"]
        problems = check(ratios(jobs), committed, options.jobs, actors)
        sys.exit("\n".join(problems) or None)


if __name__ == "__main__":
    main()
