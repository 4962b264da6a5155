"""A long run on two nodes whose processes are killed all the time: the same bits at the end, and flat memory?

    python -m benchmarks.soak                                  # a quarter of an hour
    python -m benchmarks.soak --rounds 60 --plot soak.png

Each node has two client actors. Every three to eight rounds one of the four is killed, and every fiftieth round ends
with the server's death. Memory (PSS) is that of the server, of the largest client actor, of the driver and of Ray's own
processes, and what the nodes' object stores hold. Needs Linux and root: a node is a set of namespaces
(`tests/support/nodes.py`).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import raypfl.runs.driver as runs
from benchmarks.circumstances import about
from benchmarks.memory import proportional
from raypfl.engine.events import Event, RoundFinished
from raypfl.experiment import Experiment
from raypfl.results.drawing.canvas import png
from raypfl.results.drawing.curves import scale
from tests.support.nodes import Node, Nodes
from tests.support.runs import experiment

KINDS = {"server": "ray::ServerActor", "client actor": "ray::ClientActor", "driver": "soak --driver", "Ray": "/ray/"}
SEED = 7
ROUNDS = "rounds.jsonl"
EVERY = 50
"""Rounds from one death of the server to the next."""


def settings(folder: Path, rounds: int, **more: Any) -> Experiment:
    """The experiment: Ditto on digits, with all twelve clients a round, whose states travel between nodes.

    A group's states take 320 KB, so they are in the object stores and not in messages.
    """
    common = {
        "method": "tests.support.federated_methods:Slow",
        "rounds": rounds,
        "cohort__size": 12,
        "model__hidden": [512],
        "evaluation__every": 50,
        "checkpoint__every": 10,
    }
    return experiment(folder, **common, **more)


def memory_by_kind(nodes: Sequence[Node]) -> dict[str, float]:
    """MB by kind of process: the largest of each, and the sum of Ray's."""
    megabytes: dict[str, list[float]] = {kind: [0.0] for kind in KINDS}
    for node in nodes:
        for pid, command in node.processes():
            kind = next((kind for kind, part in KINDS.items() if part in command), None)
            if kind is None:
                continue
            with contextlib.suppress(OSError, KeyError):  # it has ended meanwhile
                sizes = proportional(pid)
                megabytes[kind].append((sizes["Pss"] - sizes.get("Pss_Shmem", 0)) / 1e6)

    return {kind: sum(sizes) if kind == "Ray" else max(sizes) for kind, sizes in megabytes.items()}


class Rounds:
    """A listener in the driver that records every round, and the contents of the object stores after every tenth."""

    def __init__(self, file: Path):
        self._file = file

    def __call__(self, event: Event) -> None:
        if not isinstance(event, RoundFinished):
            return
        row: dict[str, float] = {"round": event.round}
        if event.round % 10 == 0:
            from ray._private.internal_api import get_memory_info_reply, get_state_from_address

            stats = get_memory_info_reply(get_state_from_address()).store_stats
            row |= {"MB": stats.object_store_bytes_used / 1e6, "objects": stats.num_local_objects}
        with self._file.open("a") as file:
            file.write(json.dumps(row) + "\n")


def drive(folder: Path, address: str, rounds: int) -> None:
    """The run itself, on the head."""
    on_nodes = {"engine__backend": "ray", "ray__address": address, "ray__actors": 4, "ray__cpus_per_actor": 0.4}
    described = settings(folder, rounds, **on_nodes, failures__retries=50)
    result = runs.run(described, listeners=[Rounds(folder / ROUNDS)], run_dir=folder / "run")
    print(json.dumps({"hash": result.weights_hash, "round": result.round}))


def soak(folder: Path, rounds: int) -> dict[str, Any]:
    """Carry out the run on two nodes while processes are killed; returns the measurements."""
    whole = runs.run(settings(folder / "whole", rounds)).weights_hash
    nodes = Nodes([2, 2], visible=[folder])
    machines = [nodes.head, *nodes.workers]
    draws = random.Random(SEED)
    killed = {"client actor": 0, "server": 0}
    samples = []
    arguments = ["-m", "benchmarks.soak", "--driver", str(folder), nodes.address, "--rounds", str(rounds)]
    output = folder / "output"
    try:
        driver = nodes.head.start([sys.executable, *arguments], env=nodes.environment, stdout=output.open("w"))
        next_kill = 0
        deaths_of_server = 0
        while driver.poll() is None:
            time.sleep(0.5)
            now = max([row["round"] for row in rounds_in(folder)], default=0)
            if now <= next_kill:
                continue

            samples.append({"round": now, **memory_by_kind(machines)})
            next_kill = now + draws.randint(3, 8)
            if now // EVERY > deaths_of_server:
                deaths_of_server = now // EVERY
                killed["server"] += nodes.head.signal(KINDS["server"], signal.SIGKILL)
            else:
                killed["client actor"] += kill_one(draws, machines)
        last_lines = output.read_text().splitlines()[-1:]
    finally:
        nodes.end()

    stores = [row for row in rounds_in(folder) if "objects" in row]
    result = json.loads(last_lines[0]) if driver.returncode == 0 else {"hash": f"exit code {driver.returncode}"}
    return {"whole": whole, **result, "killed": killed, "memory": samples, "stores": stores, "about": about()}


def rounds_in(folder: Path) -> list[dict[str, float]]:
    """The rounds that the driver has recorded so far."""
    file = folder / ROUNDS
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text().splitlines()]


def kill_one(draws: random.Random, machines: Sequence[Node]) -> int:
    """Kill a client actor of any node; returns 1, or 0 if there is none."""
    actors = []
    for node in machines:
        actors += [pid for pid, command in node.processes() if KINDS["client actor"] in command]
    if not actors:
        return 0

    with contextlib.suppress(ProcessLookupError):
        os.kill(draws.choice(sorted(actors)), signal.SIGKILL)
    return 1


def draw(seen: dict[str, Any], path: Path) -> None:
    """Draw memory by round: of processes on the left, of the object stores on the right."""
    with png(path, 10, 4.2) as figure:
        left, right = figure.subplots(1, 2)

        for kind in KINDS:
            label = {"client actor": "largest client actor", "Ray": "Ray's own processes, all"}.get(kind, kind)
            left.plot([row["round"] for row in seen["memory"]], [row[kind] for row in seen["memory"]], label=label)
        left.set(title="Memory of processes", xlabel="round", ylabel="MB (PSS)", ylim=(0, None))
        left.legend(loc="upper left", bbox_to_anchor=(0, 0.6))

        rounds = [row["round"] for row in seen["stores"]]
        right.plot(rounds, [row["MB"] for row in seen["stores"]], color="#B565A7")
        right.set(title="Object stores of both nodes", xlabel="round", ylabel="MB", ylim=(0, None))
        for axes in (left, right):
            scale(axes.xaxis, integer=True)
            scale(axes.yaxis)

        killed = seen["killed"]
        deaths = f"{killed['client actor']} deaths of client actors, {killed['server']} of the server"
        figure.suptitle(f"{seen['round']} rounds, {deaths}", fontsize=11)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--plot", type=Path, help="PNG of memory over rounds")
    parser.add_argument("--json", type=Path, help="file for everything that was seen")
    parser.add_argument("--driver", nargs=2, metavar=("FOLDER", "ADDRESS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.driver:
        drive(Path(options.driver[0]), options.driver[1], options.rounds)
        return

    with tempfile.TemporaryDirectory(prefix="soak-", dir="/tmp") as folder:
        seen = soak(Path(folder), options.rounds)

    if options.json:
        options.json.write_text(json.dumps(seen))
    same = "the same bits as alone" if seen["hash"] == seen["whole"] else f"NOT the same: {seen['hash']}"
    print(f"{seen.get('round', 0)} rounds, killed {seen['killed']}: {same}")
    for part in (seen["memory"][len(seen["memory"]) // 4], seen["memory"][-2]):
        print({key: round(value, 1) for key, value in part.items()})
    print(seen["stores"][len(seen["stores"]) // 4], seen["stores"][-1])
    if options.plot:
        draw(seen, options.plot)
    if seen["hash"] != seen["whole"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
