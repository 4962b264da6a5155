"""Memory of a group of clients, by the trained part of their network and by how the rest is kept still.

Eight clients with ResNet-18 and adapters train together, each case in a process of its own. Either all of the network
is trained. Or all of it is in the clients' vectors, and a mask moves adapters and head alone
(``clients.sgd(train=...)``). Or the rest is frozen (``model.trained``), so that it exists once.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from benchmarks.noise import ONLY_ROUNDS, SETS
from raypfl import Experiment, Mean, run
from raypfl.methods import FedAvg

if TYPE_CHECKING:
    from raypfl.clients.clients import Clients

PARTS = {"all of it": None, "adapters and head": "adapters, output layer", "head": "output layer"}
CASES = [("all of it", ""), *((part, rest) for part in list(PARTS)[1:] for rest in ("masked", "frozen"))]
STEPS = 2


class Watched(FedAvg):
    """Trains some segments, and records by how much the process grew at most meanwhile.

    Attributes
    ----------
    moving : the segments that a mask lets move; None: all.
    file : the JSON file for `vector` (numbers in a client's vector), `group` (its clients) and `grown` (bytes).
    """

    moving: str | None = None
    file: str = ""

    def train(self, clients: Clients, theta: torch.Tensor) -> dict[str, Mean]:
        before = _resident()
        trained = clients.sgd(clients.loss, theta, steps=STEPS, train=self.moving)
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
        sizes = {"vector": clients.model.size, "group": len(clients), "grown": grown}
        Path(self.file).write_text(json.dumps(sizes))
        return {"theta": Mean(trained)}


def _resident() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) * 1024


def train(part: str, rest: str, clients: int, folder: str) -> None:
    """Run one round of a group."""
    segments = PARTS[part]
    frozen = rest == "frozen"
    experiment = Experiment(
        **ONLY_ROUNDS,
        **SETS["frozen"].source(f"{folder}/cache"),
        rounds=1,
        model={"name": "resnet18", "adapters": "bias", "trained": segments if frozen else None},
        method=Watched(moving=None if frozen else segments, file=f"{folder}/sizes.json"),
        cohort={"size": clients},
        training={"batch_size": 4},
        engine={"backend": "inline", "executor": "vectorised", "group_size": clients},
        output=f"{folder}/runs",
    )
    run(experiment, listeners=[])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[8], help="that are trained together")
    options = parser.parse_args()
    print("| trained | the rest | numbers in a client's vector | clients together | the process grew by |")
    print("|---|---|---|---|---|")
    for clients in options.clients:
        for part, rest in CASES:
            with tempfile.TemporaryDirectory() as folder:
                process = multiprocessing.get_context("spawn").Process(target=train, args=(part, rest, clients, folder))
                process.start()
                process.join()
                sizes = json.loads(Path(folder, "sizes.json").read_text())
            print(f"| {part} | {rest} | {sizes['vector']:,} | {sizes['group']} | {sizes['grown'] / 1e6:,.0f} MB |")


if __name__ == "__main__":
    main()
