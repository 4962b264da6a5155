"""Methods that misbehave on purpose, importable by name in actors and subprocesses.

What must happen only once in a run leaves a file in the folder `marks`, which all processes see.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import torch

from raypfl import Mean
from raypfl.common.errors import LostState
from raypfl.federation.exchange import partial_sums
from raypfl.methods import Ditto, FedAvg


class Marked(Ditto):
    """Ditto that can do something once in a run, in whichever process comes first.

    Attributes
    ----------
    marks : folder with a file for each thing that has happened.
    """

    marks: str

    def once(self, what: str) -> bool:
        """Return True for the first caller, and False from then on."""
        try:
            (Path(self.marks) / what).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


class Logs(Marked):
    """Log numbers, a table and an image; lose the states of rounds 4 and 5 once each."""

    def round(self, server, cohort):
        super().round(server, cohort)
        if cohort.round in (4, 5) and self.once(f"lost states {cohort.round}"):
            raise LostState("A node is gone.")

        cohort.log(norm=server["theta"].norm(), tenth=cohort.round / 10)
        if cohort.round % 2:
            cohort.log_table("segments", {"round_name": [f"r{cohort.round}", "x"], "entries": [cohort.round, 2]})
            cohort.log_image("weights", server["theta"][:64].reshape(1, 1, 8, 8))

    def train(self, clients, theta):
        clients.log(samples=clients.num_samples, seen=clients.num_samples)
        return super().train(clients, theta)


class Slow(Ditto):
    """Ditto whose rounds take at least a tenth of a second."""

    def round(self, server, cohort):
        time.sleep(0.1)
        super().round(server, cohort)


class WaitsForTheEndOfTrouble(Marked):
    """Ditto whose round 20 waits for a file `over`; every round takes at least a tenth of a second."""

    def round(self, server, cohort):
        time.sleep(0.1)
        while cohort.round == 20 and not Path(self.marks, "over").exists():
            time.sleep(0.1)
        super().round(server, cohort)


class MovesModels(FedAvg):
    """Move the model by numbers of each client instead of training it. Nodes add up, if the server is busy for `load`.

    In round 4, client 47 writes its node's address into the file `waiting`, and waits until there is one `over`; the
    file `trained` gets a line for each group of that round.
    """

    marks: str
    load: float = 0.0

    def start(self, task):
        partial_sums.MAX_LOAD = self.load  # in the server's process
        return super().start(task)

    def train(self, clients, theta):
        if clients.round == 4:
            with (Path(self.marks) / "trained").open("a") as trained:
                print(*clients.ids, file=trained)
            if 47 in clients.ids and not Path(self.marks, "over").exists():
                self._wait()

        moves = torch.sin(torch.tensor(clients.ids, dtype=torch.float32)[:, None] + torch.arange(len(theta)))
        return {"theta": Mean(theta + moves, weight=clients.num_samples)}

    def _wait(self) -> None:
        import ray

        Path(self.marks, "waiting").write_text(ray.util.get_node_ip_address() if ray.is_initialized() else "")
        while not Path(self.marks, "over").exists():
            time.sleep(0.1)


class KillsItsActor(Marked):
    """Kill the client actor in round 3, once."""

    def train(self, clients, theta):
        if clients.round == 3 and self.once("actor"):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().train(clients, theta)


class KillsEveryActor(Marked):
    """Kill every process that trains client 3; the file `tries` gets the size of each of its groups."""

    def train(self, clients, theta):
        if 3 in clients.ids and clients.round == 1:
            with (Path(self.marks) / "tries").open("a") as tries:
                print(len(clients), file=tries)
            os._exit(1)
        return super().train(clients, theta)


class KillsItsServer(Marked):
    """Kill the server's process in round `at` after its clients have trained, the first `times` times."""

    at: int = 5
    times: int = 1

    def round(self, server, cohort):
        super().round(server, cohort)
        if cohort.round == self.at and any(self.once(f"server-{death}") for death in range(self.times)):
            # The driver asks for events several times a second, and should have heard that the run began.
            time.sleep(1.0)
            os.kill(os.getpid(), signal.SIGKILL)


class LosesStates(Marked):
    """Lose the states of some clients in round 4, once."""

    def train(self, clients, theta):
        if clients.round == 4 and self.once("states"):
            raise LostState("The node that held some clients' states is gone.")
        return super().train(clients, theta)


class FailsOnClient3(FedAvg):
    """Raise whenever client 3 trains."""

    def train(self, clients, theta):
        if 3 in clients.ids:
            raise LookupError("the client's disk is on fire")
        return super().train(clients, theta)


class FailsInRound4(FedAvg):
    """Raise for every client in round 4."""

    def train(self, clients, theta):
        if clients.round == 4:
            raise LookupError("no")
        return super().train(clients, theta)


class FailsOnce(Marked):
    """Raise at the first try of each group in round 2."""

    def train(self, clients, theta):
        if clients.round == 2 and self.once(f"group-{clients.ids[0]}"):
            raise OSError("a passing cloud")
        return super().train(clients, theta)
