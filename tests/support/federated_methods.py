"""Methods that misbehave on purpose, and methods as users write them, importable by name in actors and subprocesses.

What happens once is remembered by a file in the folder `marks`.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import torch
from torch.nn import functional as F

from raypfl import Mean, Sum
from raypfl.common.errors import LostState
from raypfl.methods import Ditto, FedAvg


class Marked(Ditto):
    """Does something once, on a client of its choice."""

    marks: str

    def once(self, what: str) -> bool:
        try:
            (Path(self.marks) / what).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


class Logs(Marked):
    """Logs numbers, a table and an image."""

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
    """Ditto whose rounds take a tenth of a second at least."""

    def round(self, server, cohort):
        time.sleep(0.1)
        super().round(server, cohort)


class WaitsForTheEndOfTrouble(Marked):
    """Ditto whose round 20 begins once there is a file `over`; the others take a tenth of a second at least."""

    def round(self, server, cohort):
        time.sleep(0.1)
        while cohort.round == 20 and not Path(self.marks, "over").exists():
            time.sleep(0.1)
        super().round(server, cohort)


class KillsItsActor(Marked):
    """An actor dies at work in round 3, once."""

    def train(self, clients, theta):
        if clients.round == 3 and self.once("actor"):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().train(clients, theta)


class KillsEveryActor(Marked):
    """Whoever runs client 3 dies, having written down for how many clients it was to work."""

    def train(self, clients, theta):
        if 3 in clients.ids and clients.round == 1:
            with (Path(self.marks) / "tries").open("a") as tries:
                print(len(clients), file=tries)
            os._exit(1)
        return super().train(clients, theta)


class KillsItsServer(Marked):
    """The server's process dies after the clients of a round have trained, the first so many times."""

    at: int = 5
    times: int = 1

    def round(self, server, cohort):
        super().round(server, cohort)
        if cohort.round == self.at and any(self.once(f"server-{k}") for k in range(self.times)):
            os.kill(os.getpid(), signal.SIGKILL)


class LosesStates(Marked):
    """The states of some clients are gone in round 4, once."""

    def train(self, clients, theta):
        if clients.round == 4 and self.once("states"):
            raise LostState("The node that held some clients' states is gone.")
        return super().train(clients, theta)


class FailsOnClient3(FedAvg):
    """Client 3 raises, always."""

    def train(self, clients, theta):
        if 3 in clients.ids:
            raise LookupError("the client's disk is on fire")
        return super().train(clients, theta)


class FailsInRound3(FedAvg):
    """Every client raises in round 4."""

    def train(self, clients, theta):
        if clients.round == 4:
            raise LookupError("no")
        return super().train(clients, theta)


class FailsOnce(Marked):
    """Every group's first try in round 2 fails."""

    def train(self, clients, theta):
        if clients.round == 2 and self.once(f"group-{clients.ids[0]}"):
            raise OSError("a passing cloud")
        return super().train(clients, theta)


class Scaffold(FedAvg):
    """Stochastic controlled averaging (Karimireddy et al. 2020), with control variates by option II."""

    def start(self, task):
        return {**super().start(task), "c": torch.zeros_like(task.model.parameters(task.model.init(task.seed)))}

    def round(self, server, cohort):
        reply = cohort.run(self.train, theta=server["theta"], c=server["c"])
        server["theta"] = reply["theta"]
        server["c"] = server["c"] + reply["moved"] / cohort.task.num_clients

    def train(self, clients, theta, c):
        own = clients.state.get("c", default=torch.zeros_like(c))
        trained = clients.sgd(clients.loss, theta, correction=c - own)
        way = clients.model.parameters(theta - trained)
        clients.state["c"] = own - c + way / (clients.num_steps() * clients.lr)[:, None]
        return {"theta": Mean(trained), "moved": Sum(clients.state["c"] - own)}


class Moon(FedAvg):
    """Model-contrastive federated learning (Li et al. 2021): features near the global model's, far from the last own.

    Attributes
    ----------
    mu, temperature : of the contrast.
    """

    mu: float = 1.0
    temperature: float = 0.5

    def train(self, clients, theta):
        def loss(p, batch, sent, previous):
            z, logits = clients.model.features(p, batch.x)
            near, far = (F.cosine_similarity(z, m.features(batch.x)) / self.temperature for m in (sent, previous))
            return clients.objective.loss(logits, batch) + self.mu * batch.mean(F.softplus(far - near))

        previous = clients.state.get("previous", default=theta)
        trained = clients.sgd(loss, theta, sent=clients.other(theta), previous=clients.other(previous))
        clients.state["previous"] = trained
        return {"theta": Mean(trained, clients.num_samples)}


class PerFedAvg(FedAvg):
    """Personalized FedAvg (Fallah et al. 2020) with second derivatives, both steps on the same mini-batch.

    Attributes
    ----------
    alpha : step size of a client's own step from the shared model.
    """

    alpha: float = 0.1

    def train(self, clients, theta):
        def after_a_step(p, batch):
            before = p.clone()
            (slope,) = torch.autograd.grad(clients.loss(before, batch), before, create_graph=True)
            return clients.loss(before - self.alpha * slope, batch)

        return {"theta": Mean(clients.sgd(after_a_step, theta), clients.num_samples)}
