"""The cost of client states between rounds.

    python -m benchmarks.states                      # two minutes
    python -m benchmarks.states --json states.json

Twenty clients train a 5-million-parameter network (20 MB) on 50 samples each in batches of 10, on two actors, all of
them in every round. With `kept`, each client's trained network is its state, where its next round begins. With `sent`,
rounds begin at the server's model and clients have no state. Neither sends a model up. `touch` does the same without
training, so that only reading and writing states is timed. Runs of both take turns in one session.

Then, in a run of its own, the memory of all processes after the second round and after the last.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import raypfl
from benchmarks.memory import PARTS, memory
from benchmarks.noise import ONLY_ROUNDS, SETS
from raypfl.common.messages import Mean
from raypfl.engine.events import Event, RoundFinished
from raypfl.methods import FedAvg

HERE = "benchmarks.states"


class Local(FedAvg):
    """Every client trains its own network.

    Attributes
    ----------
    keep : whether the network is the client's state; else it begins at the server's model in every round.
    train_it : whether the network is trained; else a constant is added to it.
    """

    keep: bool = True
    train_it: bool = True

    def round(self, server: dict[str, Any], cohort: Any) -> None:
        cohort.run(self.train, theta=server["theta"])

    def train(self, clients: Any, theta: Tensor) -> dict[str, Mean]:
        start = clients.state.get("own", default=theta) if self.keep else theta.expand(len(clients), -1)
        trained = clients.sgd(clients.loss, start) if self.train_it else start + 0.01
        if self.keep:
            clients.state["own"] = trained
        return {"first": Mean(trained[:, :1])}  # one number: no model is sent up


def experiment(folder: str, keep: bool, train: bool, rounds: int) -> raypfl.Experiment:
    """A run of one kind; its first rounds warm up."""
    parts: dict[str, Any] = {
        **ONLY_ROUNDS,
        **SETS["states"].source(f"{folder}/cache"),
        "model": {"name": "mlp", "hidden": [2200, 2200]},
        "method": {"name": f"{HERE}:Local", "keep": keep, "train_it": train},
        "cohort": {"fraction": 1.0},
        "training": {"lr": 0.01, "batch_size": 10},
        "engine": {"executor": "sequential"},
        "ray": {"actors": 2},
    }
    return raypfl.Experiment(name="states", rounds=rounds, output=f"{folder}/runs", **parts)


def compare(folder: str, train: bool, repeats: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of each round with and without states, in turns; two rounds of each run warm up."""
    seconds: dict[str, list[float]] = {"kept": [], "sent": []}
    for _ in range(repeats):
        for name in seconds:
            result = raypfl.run(experiment(folder, name == "kept", train, rounds + 2))
            seconds[name] += result.rounds["seconds"].to_pylist()[2:]
    return seconds


def memory_growth(folder: str, rounds: int) -> dict[str, list[float]]:
    """Part -> MB after the second round and after the last."""
    measurements: list[dict[str, float]] = []

    def measure(event: Event) -> None:
        if isinstance(event, RoundFinished) and event.round in (2, rounds):
            measurements.append(memory())

    raypfl.run(experiment(folder, keep=True, train=False, rounds=rounds), listeners=[measure])
    return {part: [megabytes[part] for megabytes in measurements] for part in PARTS}


def main() -> None:
    """Measure and print; write the numbers with --json."""
    parser = argparse.ArgumentParser(prog=f"python -m {HERE}", description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds a run")
    parser.add_argument("--memory", type=int, default=60, help="rounds of the run whose memory is measured")
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("RAY_worker_niceness", "0")

    numbers: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, raypfl.session(experiment(folder, True, True, 1)):
        for job, train in (("train", True), ("touch", False)):
            times = compare(folder, train, options.repeats, options.rounds)
            numbers[job] = times
            with_states = statistics.median(times["kept"])
            without = statistics.median(times["sent"])
            ratio = with_states / without
            best = min(times["kept"]) / min(times["sent"])
            print(f"{job}: kept {with_states:.3f} s, sent {without:.3f} s; ratio {ratio:.2f} (of minima {best:.2f})")

        numbers["memory"] = memory_growth(folder, options.memory)
        for part, (early, late) in numbers["memory"].items():
            print(f"{part:8} {early:7.0f} MB after 2 rounds, {late:7.0f} MB after {options.memory}")
    if options.json:
        options.json.write_text(json.dumps(numbers, indent=1))


if __name__ == "__main__":
    main()
