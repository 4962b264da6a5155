"""The idle time of client actors on clusters larger than this machine: measured times, replayed by the scheduler.

    python -m benchmarks.scheduling                  # prints a table
    python -m benchmarks.scheduling --reply 3        # if the server took 3 ms for each reply
    python -m benchmarks.scheduling --largest 8      # if sequential groups shrank from eight clients
    python -m benchmarks.scheduling --fit            # minutes; the times that groups take on this machine
    python -m benchmarks.scheduling --plot docs/performance/scheduling.png

Cohorts of 1000 clients with log-normal sample counts (mean 50, sigma 0.8 of the logarithm) are cut, ordered and handed
out by the code that runs on Ray (`grouping` and `placement` of `federation.exchange`); only actors and the clock are
simulated. A group takes `Times.seconds`, as measured, times a log-normal disturbance of 5 % that nobody can foresee; it
needs a millisecond to reach its actor, and the server handles replies one after the other. The first round, in which
nothing is known of times, is left out.

Idle is the share of the actors' time, from the round's begin to its last reply, in which they do not work. Beside it:
what greedy longest-first scheduling of the same groups would leave idle if it knew every time beforehand, and handing
out and replies cost nothing.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import os
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path

import numpy as np

import raypfl
from benchmarks.overhead import Plan, on_ray
from raypfl.clients.worker import Group
from raypfl.federation.exchange.bundles import Bundle, bundled
from raypfl.federation.exchange.grouping import cut_into_groups, group_sizes, shrinking_sizes
from raypfl.federation.exchange.placement import Dispatch
from raypfl.federation.exchange.timings import Timings

ACTORS = (8, 16, 32, 64, 128, 256, 512)
COHORT, POPULATION, BATCH, ROUNDS = 1000, 5000, 10, 21
LATENCY = 0.001
HERE = "benchmarks.scheduling"


@dataclass(frozen=True)
class Times:
    """The seconds that a job's groups and replies take.

    Attributes
    ----------
    group : the seconds of a group, whatever its clients.
    step : the seconds of each step; a vectorised group takes as many steps as its longest client.
    client_step : the seconds of each step of each client.
    reply : the seconds of the server's work on a reply.
    """

    executor: str
    group: float
    step: float
    client_step: float
    reply: float

    def seconds(self, steps: np.ndarray) -> float:
        """The seconds of a group, by the steps of its clients."""
        return self.group + self.step * float(steps.max()) + self.client_step * float(steps.sum())


JOBS = {
    "cnn": Times("sequential", group=0.0, step=0.0, client_step=0.0156, reply=0.00107),
    "mlp": Times("vectorised", group=0.001, step=0.0005, client_step=0.000034, reply=0.00006),
}
"""On one core of the machine that `docs/performance/engine.md` names, while nobody else used it: rounds in one process
(`results/overhead.json`), in groups of several sizes. `--fit` finds what an actor takes on yours."""


def replay(groups: Sequence[Group], seconds: Sequence[float], actors: int, reply: float) -> tuple[float, int]:
    """Simulated seconds from handing out the first group to having handled the last reply; and the replies."""
    bundles = bundled(groups, actors)
    dispatch = Dispatch(bundles)
    for actor in range(actors):
        dispatch.join(actor, "node")
    free = [0.0] * actors  # when each actor has finished its groups
    at_work: dict[int, Bundle] = {}  # by the index of the first group
    ends: list[tuple[float, int, int]] = []  # a heap of (time, actor, index)

    def hand_out(now: float) -> None:
        while chosen := dispatch.next(now):
            actor, bundle = chosen
            free[actor] = max(free[actor], now + LATENCY) + sum(seconds[group.index] for group in bundle.groups)
            at_work[bundle.index] = bundle
            heapq.heappush(ends, (free[actor], actor, bundle.index))

    now = 0.0
    while not dispatch.done:
        hand_out(now)
        moment = now + dispatch.pause(now)
        if moment < ends[0][0]:
            now = max(moment, now + 1e-6)
            continue
        end, actor, index = heapq.heappop(ends)
        now = max(now, end)
        dispatch.finished(actor, at_work.pop(index), now)
        hand_out(now)  # like RayBackend: before the server looks at the reply
        now += reply
    return now, len(bundles)


def longest_first(seconds: Sequence[float], actors: int) -> float:
    """Seconds of the greedy schedule that knows all times beforehand and costs nothing."""
    loads = [0.0] * actors
    for duration in sorted(seconds, reverse=True):
        heapq.heappush(loads, heapq.heappop(loads) + duration)
    return max(loads)


@dataclass(frozen=True)
class Replayed:
    """Medians over rounds.

    Attributes
    ----------
    idle, bound : the actors' share of idle time, by :func:`replay` and by :func:`longest_first`.
    seconds, groups, replies : the seconds of a round, its groups, and the bundles in which they are sent.
    """

    idle: float
    bound: float
    seconds: float
    groups: float
    replies: float


def rounds(times: Times, actors: int, largest: int | None = None) -> Replayed:
    """Replay rounds on a number of actors, always with the same clients and cohorts.

    Sequential groups shrink from the `largest`, or as the engine's do.
    """
    if largest is None or times.executor == "vectorised":
        cut = group_sizes(COHORT, times.executor)
    else:
        cut = shrinking_sizes(COHORT, largest)

    draws = np.random.default_rng(0)
    sizes = np.maximum(1, draws.lognormal(np.log(50) - 0.8**2 / 2, 0.8, POPULATION))
    steps = np.ceil(sizes / BATCH)

    timings = Timings(steps)
    replayed = []
    for _ in range(ROUNDS):
        cohort = np.sort(draws.choice(POPULATION, COHORT, replace=False))
        members = [cohort[part] for part in cut_into_groups(steps[cohort], cut, times.executor)]
        groups = []
        for i, clients in enumerate(members):
            length = timings.length(clients)
            expected = timings.seconds("train", clients)
            groups.append(Group(i, tuple(clients.tolist()), clients, {}, [], length, expected))
        seconds = [times.seconds(steps[clients]) * float(draws.lognormal(0, 0.05)) for clients in members]

        whole, replies = replay(groups, seconds, actors, times.reply)
        for group, duration in zip(groups, seconds, strict=True):
            timings.note("train", group.clients, duration)

        idle = 1 - sum(seconds) / (actors * whole)
        bound = 1 - sum(seconds) / (actors * longest_first(seconds, actors))
        replayed.append(Replayed(idle, bound, whole, len(groups), replies))

    counted = map(astuple, replayed[1:])  # without the first round, in which nothing is known of times
    return Replayed(*(statistics.median(values) for values in zip(*counted, strict=True)))


def fitted(job: str, plan: Plan) -> Times:
    """A job's times, by least squares on the relative errors of rounds in groups of several sizes."""
    executor = JOBS[job].executor
    sizes = (10, 25, 50) if executor == "vectorised" else (1, 2, 5)
    shapes = []
    seconds = []
    for size, epochs in itertools.product(sizes, (1, 2)):
        changes = [f"engine.group_size={size}", f"engine.executor={executor}", f"training.epochs={epochs}"]
        result = raypfl.run(plan.experiment(job, on_ray(1)).override(changes))
        seconds.append(statistics.median(result.rounds["seconds"].to_pylist()[1:]))

        groups = 50 / size
        steps = epochs * 50 / BATCH
        shapes.append([groups, groups * steps * (executor == "vectorised"), 50 * steps])

    # Divided by the seconds, so that the residuals are relative.
    relative = np.array(shapes) / np.array(seconds)[:, None]
    group, step, client_step = np.linalg.lstsq(relative, np.ones(len(seconds)))[0]
    return replace(JOBS[job], group=float(group), step=float(step), client_step=float(client_step))


def main() -> None:
    """Print a table, and draw it with --plot."""
    parser = argparse.ArgumentParser(prog=f"python -m {HERE}", description=__doc__.partition("\n")[0])
    parser.add_argument("--plot", type=Path, help="draw idle time over actors into this file")
    parser.add_argument("--reply", type=float, help="ms that the server takes for a reply, in place of the measured")
    parser.add_argument("--largest", type=int, help="clients of the largest sequential group, in place of raypfl's")
    parser.add_argument("--fit", action="store_true", help="measure what groups take; nothing is replayed")
    options = parser.parse_args()
    if options.fit:
        fit()
        return

    jobs = JOBS
    if options.reply is not None:
        jobs = {job: replace(times, reply=options.reply / 1000) for job, times in JOBS.items()}
    results = {}
    for job, times in jobs.items():
        results[job] = {actors: rounds(times, actors, options.largest) for actors in ACTORS}

    for job, rows in results.items():
        groups = next(iter(rows.values())).groups
        print(f"\n{job}: cohort of {COHORT} in {groups:.0f} groups, {1000 * jobs[job].reply:g} ms a reply")
        print("  actors " + "".join(f"{n:>8}" for n in rows))
        print("  idle   " + "".join(f"{row.idle:>8.1%}" for row in rows.values()))
        print("  bound  " + "".join(f"{row.bound:>8.1%}" for row in rows.values()))
        print("  replies" + "".join(f"{row.replies:>8.0f}" for row in rows.values()))
        print("  seconds" + "".join(f"{row.seconds:>8.3f}" for row in rows.values()))
    if options.plot:
        plot(results, options.plot)


def fit() -> None:
    """Print what groups take on one actor of this machine."""
    os.environ.setdefault("RAY_worker_niceness", "0")
    with tempfile.TemporaryDirectory() as folder:
        plan = Plan(folder, 1, 5, (1,))
        with raypfl.session(plan.experiment("mlp", on_ray(1))):
            for job in JOBS:
                t = fitted(job, plan if job == "cnn" else replace(plan, rounds=100))
                print(f"{job}: {1000 * t.group:.2f} ms a group, {1000 * t.step:.3f} a step, ", end="")
                print(f"{1000 * t.client_step:.4f} a client's step")


def plot(results: dict[str, dict[int, Replayed]], file: Path) -> None:
    """Idle share over actors, one curve a job, its bound dashed."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 4.4), layout="constrained")
    for job, rows in results.items():
        shares = [100 * row.idle for row in rows.values()]
        (line,) = axes.plot(
            list(rows), shares, marker="o", label=f"{job}, {next(iter(rows.values())).groups:.0f} groups"
        )
        bounds = [100 * row.bound for row in rows.values()]
        axes.plot(list(rows), bounds, "--", color=line.get_color(), label=f"{job}, longest first at no cost")
    axes.axhline(5, color="grey", linewidth=0.8, label="target, at 64 actors")
    axes.set_xscale("log", base=2)
    axes.set_xticks(ACTORS, [str(n) for n in ACTORS])
    axes.set_ylim(0, 100)
    axes.set_xlabel("client actors")
    axes.set_ylabel("idle time of the actors, %")
    axes.set_title(f"Cohort of {COHORT}, log-normal client sizes (simulated)")
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=150)


if __name__ == "__main__":
    main()
