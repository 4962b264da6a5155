"""What the server's process can keep up with, and for how long.

    python -m benchmarks.head --actors 64            # three minutes, most of them to start 64 processes
    python -m benchmarks.head --replies              # half a minute
    python -m benchmarks.head --rounds 2000          # what processes hold over many small rounds

With `--actors`: that many client actors, whose clients sleep for a quarter of a second and cost nothing, so that a
machine with few cores can have many. A round has four clients for every actor, one a group. How many sleep, on
average over the round and at most at a time, is what the head keeps busy. An actor holds a third of a GB: where 64 of
them leave little, `RAY_memory_usage_threshold=0.99` keeps Ray from killing some.

With `--replies`: the seconds that the server takes for a group's reply, of 1,626,442 and of 9,610 numbers, where 128
are waiting, as at the end of a round on 64 actors with two groups each: to be told that one is there, to fetch it from
shared memory, and to add it up. `benchmarks.scheduling` replays rounds with these.

With `--rounds`: Ditto on 8x8 noise with a small network, cohorts of 10 of 40 clients, on two actors. What each part of
the run holds is looked at after 100 rounds, then at ten moments to the end.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from typing import Any

import numpy as np
import torch

import raypfl
from benchmarks.memory import PARTS, memory
from benchmarks.noise import ONLY_ROUNDS, SETS
from raypfl.clients.replies.reduction import Value
from raypfl.clients.worker import Group, Reply
from raypfl.common.messages import Each
from raypfl.engine.events import Event, RoundFinished
from raypfl.federation.exchange.aggregation import ReplyAggregator
from raypfl.methods import FedAvg

SLEEP = 0.25
WARM = 100
WAITING = 128
TURNS = 11
HERE = "benchmarks.head"


class Sleeper(FedAvg):
    """FedAvg whose clients sleep instead of training.

    Attributes
    ----------
    patience : seconds to wait for all client actors to start.
    """

    patience: float = 0.0

    def start(self, task: raypfl.Task) -> dict[str, Any]:
        time.sleep(self.patience)
        return super().start(task) | {"slept": [], "at_once": []}

    def round(self, server: dict[str, Any], cohort: Any) -> None:
        times = cohort.run(self.sleep)["times"]
        server["slept"] = [*server["slept"], float((times[:, 1] - times[:, 0]).sum())]
        server["at_once"] = [*server["at_once"], at_once(times)]

    def sleep(self, clients: Any) -> dict[str, Each]:
        start = time.monotonic()
        time.sleep(SLEEP)
        times = torch.tensor([start, time.monotonic()], dtype=torch.float64)
        return {"times": Each(times.expand(len(clients), -1))}


def at_once(times: torch.Tensor) -> int:
    """The most that slept at a time, of ``times[n, 2]``: the seconds at which each began and ended."""
    starts = times[:, 0].sort().values
    ends = times[:, 1].sort().values
    started = torch.arange(1, len(starts) + 1)
    ended = torch.searchsorted(ends, starts, right=True)
    return int((started - ended).max())


def experiment(folder: str, clients: int, **parts: Any) -> raypfl.Experiment:
    """A run of small rounds."""
    common: dict[str, Any] = {
        **ONLY_ROUNDS,
        **SETS["head"].source(f"{folder}/cache"),
        "partition": {"name": "iid", "clients": clients},
        "model": {"name": "mlp", "hidden": [8]},
        "output": f"{folder}/runs",
    }
    return raypfl.Experiment(name="head", **(common | parts))


def busy(folder: str, actors: int, patience: float) -> None:
    """Print, round by round, how many actors sleep at a time."""
    share = (os.cpu_count() or 1) / (actors + 1)  # sleeping actors need no core of their own
    described = experiment(
        folder,
        4 * actors,
        rounds=6,
        method={"name": f"{HERE}:Sleeper", "patience": patience},
        engine={"group_size": 1},
        ray={"actors": actors, "cpus_per_actor": share},
    )
    result = raypfl.run(described)

    ideal = 4 * SLEEP
    server = result.server_state()
    rounds = result.rounds["seconds"].to_pylist()
    for seconds, slept, most in zip(rounds, server["slept"], server["at_once"], strict=True):
        average = f"{slept / seconds:.1f} of {actors} actors busy on average"
        print(f"round: {seconds:.3f} s ({ideal:.2f} without a head); {average}, {most} at a time")


class Answerer:
    """An actor whose replies are those of a group under FedAvg."""

    def reply(self, numbers: int) -> Reply:
        theta = Value("mean", np.ones(numbers, dtype=np.float32), 50.0, np.array([numbers]))
        return Reply({"theta": theta}, np.zeros(1), 0.25)


def per_reply(answerer: Any, numbers: int) -> float:
    """Seconds that the server takes for a reply, when `WAITING` of them have arrived."""
    import ray

    waiting = [answerer.reply.remote(numbers) for _ in range(WAITING)]
    ray.wait(waiting, num_returns=WAITING)
    total = ReplyAggregator(1, torch.device("cpu"))
    groups = [Group(index, (0,), np.zeros(1, dtype=np.int64), {}, [()]) for index in range(WAITING)]

    start = time.perf_counter()
    while waiting:
        (ready,), waiting = ray.wait(waiting, num_returns=1)
        reply: Reply = ray.get(ready)
        total.add(groups.pop(), reply.values)
    return (time.perf_counter() - start) / WAITING


def replies(folder: str) -> None:
    """Print what the server takes for a reply."""
    import ray

    with raypfl.session(experiment(folder, 40, ray={"actors": 1})):
        answerer = ray.remote(num_cpus=0)(Answerer).remote()
        for numbers in (1_626_442, 9_610):
            times = [1000 * per_reply(answerer, numbers) for _ in range(TURNS + 1)][1:]  # the first maps fresh memory
            print(f"{4 * numbers:>9,} bytes: {statistics.median(times):.2f} ms a reply ({min(times):.2f} at best)")


def watch_memory(folder: str, rounds: int) -> None:
    """Print the memory of all processes, as rounds go by."""
    moments = set(np.linspace(WARM, rounds, 11).astype(int).tolist())
    last = rounds + 20  # what the end of a run needs is not looked at

    def look(event: Event) -> None:
        if isinstance(event, RoundFinished) and event.round in moments:
            megabytes = memory()
            print(f"{event.round:>7}" + "".join(f"{megabytes[part]:>10.1f}" for part in PARTS), flush=True)

    print("  round" + "".join(f"{part:>10}" for part in PARTS) + "   (MB)")
    parts: dict[str, Any] = {"rounds": last, "method": "ditto", "cohort": {"size": 10}}
    raypfl.run(experiment(folder, 40, ray={"actors": 2}, **parts), listeners=[look])


def main() -> None:
    """Run the measurements that the options name."""
    parser = argparse.ArgumentParser(prog=f"python -m {HERE}", description=__doc__.partition("\n")[0])
    parser.add_argument("--actors", type=int, help="client actors that are to be kept busy")
    parser.add_argument("--patience", type=float, default=90.0, help="seconds for them to come up")
    parser.add_argument("--replies", action="store_true", help="time the server's work on a reply")
    parser.add_argument("--rounds", type=int, help="small rounds to look at memory over")
    options = parser.parse_args()
    os.environ.setdefault("RAY_worker_niceness", "0")
    with tempfile.TemporaryDirectory() as folder:
        if options.actors:
            busy(folder, options.actors, options.patience)
        if options.replies:
            replies(folder)
        if options.rounds:
            watch_memory(folder, options.rounds)


if __name__ == "__main__":
    main()
