"""What a group of clients takes of memory, by what of their network is trained, and by how the rest is kept still.

Eight clients with ResNet-18 and adapters train together, in a process of its own for each way: all of the network; all
of it in the clients' vectors, but only adapters and head moved by a mask (``clients.sgd(train=...)``); and the rest
frozen (``model.trained``), so that it exists once.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from raypfl import Experiment, Mean, run
from raypfl.datasets import Population
from raypfl.methods import FedAvg

if TYPE_CHECKING:
    from raypfl.clients.clients import Clients

PARTS = {"all of it": None, "adapters and head": "adapters, output layer", "head": "output layer"}
WAYS = [("all of it", "mask"), *((part, way) for part in list(PARTS)[1:] for way in ("mask", "frozen"))]
STEPS = 2


class Noise(Population):
    """Clients with eight images of noise each."""

    num_clients, num_classes, input_shape = 64, 10, (3, 32, 32)

    def sizes(self, split: str) -> np.ndarray:
        return np.full(self.num_clients, 8 * (split == "train"))

    def samples(self, client: int, split: str) -> tuple[np.ndarray, np.ndarray]:
        draws = np.random.default_rng(client)
        count = int(self.sizes(split)[client])
        return draws.random((count, 3, 32, 32), dtype=np.float32), draws.integers(0, 10, count)


class Watched(FedAvg):
    """Trains some segments, and writes down by how much the process grew at most meanwhile.

    Attributes
    ----------
    moving : the segments that a mask lets move; None: all there are.
    told : the file.
    """

    moving: str | None = None
    told: str = ""

    def train(self, clients: Clients, theta: torch.Tensor) -> dict[str, Mean]:
        before = _resident()
        trained = clients.sgd(clients.loss, theta, steps=STEPS, train=self.moving)
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
        sizes = {"vector": clients.model.size, "group": len(clients), "grown": grown}
        Path(self.told).write_text(json.dumps(sizes))
        return {"theta": Mean(trained)}


def _resident() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) * 1024


def measure(part: str, way: str, clients: int, folder: Path) -> dict[str, int]:
    """Of one training: numbers in a client's vector, and the bytes by which its process grew."""
    told = folder / "told.json"
    subprocess.run([sys.executable, "-m", "benchmarks.frozen", "--one", part, way, str(clients), str(told)], check=True)
    return json.loads(told.read_text())


def _one(part: str, way: str, clients: int, told: Path) -> None:
    model = {"name": "resnet18", "adapters": "bias", "trained": PARTS[part] if way == "frozen" else None}
    experiment = Experiment(
        rounds=1,
        data={"name": "benchmarks.frozen:Noise"},
        model=model,
        method=Watched(moving=PARTS[part] if way == "mask" else None, told=str(told)),
        cohort={"size": clients},
        training={"batch_size": 4},
        engine={"backend": "inline", "executor": "vectorised", "group_size": clients},
        evaluation={"every": 0},
        tracking={"mlflow": False},
        output=str(told.parent / "runs"),
    )
    run(experiment, listeners=[])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[8], help="that are trained together")
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        part, way, clients, told = given.one
        _one(part, way, int(clients), Path(told))
        return
    print("| trained | the rest | numbers in a client's vector | clients together | the process grew by |")
    print("|---|---|---|---|---|")
    for clients in given.clients:
        for part, way in WAYS:
            with tempfile.TemporaryDirectory() as folder:
                found = measure(part, way, clients, Path(folder))
            rest = "" if part == "all of it" else {"mask": "masked", "frozen": "frozen"}[way]
            print(f"| {part} | {rest} | {found['vector']:,} | {found['group']} | {found['grown'] / 1e6:,.0f} MB |")


if __name__ == "__main__":
    main()
