"""Clients that train a slice of the global model which fits their capacity."""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from raypfl.clients.clients import Clients
from raypfl.common import rng
from raypfl.common.errors import ConfigError, MethodError
from raypfl.common.limits import Limit
from raypfl.common.messages import Broadcast, Mean, Scatter, Sum, per_client, unmarked
from raypfl.devices import Loads
from raypfl.federation.cohort import Cohort
from raypfl.federation.method import METHODS, Method, ServerState, ServerView
from raypfl.federation.task import Task
from raypfl.learning.objectives.batch import Batch
from raypfl.methods.sub_networks.slices import slices_of
from raypfl.models.flat import FlatModel

RATES = Limit("one number or more, each above 0 and at most 1", lambda v: len(v) > 0 and all(0 < r <= 1 for r in v))
SHARES = Limit("numbers of 0 or more, not all 0", lambda v: all(0 <= s < np.inf for s in v) and sum(v) > 0)


@METHODS.register("heterofl")
class HeteroFL(Method):
    """Heterogeneous federated learning (Diao, Ding and Tarokh 2021): a client trains the first units of every layer.

    A client of rate r has the first ``ceil(r width)`` units of each hidden layer, and all inputs and outputs of the
    network. An entry of the global model becomes the equal mean over the clients of the cohort that have it; one that
    nobody has stays as it is. A client's personal model, trained or not, is its slice of the global model. Clients keep
    nothing. With ``rates = [1]`` it is FedAvg with equal weights, bit for bit.

    Attributes
    ----------
    rates : the rates r that clients have.
    shares : the share of the clients that has each rate, relative to each other; None: equal shares.
    assignment : rates are drawn once (``fixed``), or anew in every round (``dynamic``); the shares are exact, up to
        whole clients.
    scaler : whether the outputs of hidden layers are divided by r in training.
    """

    rates: Annotated[tuple[float, ...], RATES] = (1.0, 0.5, 0.25)
    shares: Annotated[tuple[float, ...] | None, SHARES] = None
    assignment: Literal["fixed", "dynamic"] = "fixed"
    scaler: bool = True

    def check(self, model: FlatModel) -> None:
        slices_of(model)
        if self.shares is not None and len(self.shares) != len(self.rates):
            raise ConfigError(
                f"method.shares has {len(self.shares)} numbers and method.rates {len(self.rates)}; give each rate its "
                "share."
            )

    def start(self, task: Task) -> ServerState:
        return {"theta": task.model.init(task.seed), "levels": self.drawn_levels(task, 0), "rounds": 0}

    def drawn_levels(self, task: Task, draw: int) -> Tensor:
        """Return the number of each client's rate in `rates`, ``int64[num_clients]``."""
        shares = np.array(self.shares or [1.0] * len(self.rates))
        ends = np.round(shares.cumsum() / shares.sum() * task.num_clients)
        levels = np.searchsorted(ends, np.arange(task.num_clients), side="right")
        return torch.from_numpy(rng.generator(task.seed, "rates", draw).permutation(levels))

    def loads(self, task: Task) -> Loads:
        sizes = self.slices(task.model, 0).sum(1).double().cpu().numpy()
        work = np.array([slices_of(task.model).work(rate, task.input_shape) for rate in self.rates])
        levels = self.drawn_levels(task, 0).numpy()
        if self.assignment == "fixed":
            return Loads(sizes[levels], work[levels])
        # A client's rate differs from round to round, so that it counts as the mean client.
        return Loads(np.ones(len(levels)), np.full(len(levels), work[levels].mean()))

    def shift(self, rounds: int) -> int:
        """Return the first unit of a slice after so many rounds."""
        return 0

    def slices(self, model: FlatModel, shift: int) -> Tensor:
        """Return the entries that a client of each rate has, ``bool[rates, P+B]``."""
        return torch.stack([slices_of(model).entries(rate, shift) for rate in self.rates])

    def round(self, server: ServerState, cohort: Cohort) -> None:
        if self.assignment == "dynamic":
            server["levels"] = self.drawn_levels(cohort.task, cohort.round)
        theta = server["theta"]
        shift = self.shift(server["rounds"])
        slices = self.slices(cohort.task.model, shift)
        levels = cohort.rows(server["levels"])

        # A client knows its rate, or tells it by the size of what it is sent.
        reply = cohort.run(
            self.train,
            theta=Broadcast(theta, charged=slices.sum(1)[levels.to(slices.device)]),
            level=Scatter(levels, charged=False),
            shift=shift,
        )
        members = reply["members"].to(theta.device, theta.dtype)
        owners = members @ slices.to(theta.dtype)
        # At 1, the mean over the cohort keeps its bits.
        mean = reply["slices"] * (members.sum() / owners.clamp_min(1))
        server["theta"] = torch.where(owners > 0, mean, theta)
        server["rounds"] += 1

    def train(self, clients: Clients, theta: Tensor, level: Tensor, shift: int) -> dict[str, Mean | Sum]:
        level = unmarked(level)
        held = self.slices(clients.model, shift)[level]
        start = per_client(torch.where(held, theta, 0.0))
        if self.scaler and min(self.rates) < 1:

            def scaled_loss(p: Tensor, batch: Batch, scale: Tensor) -> Tensor:
                return clients.loss(p * scale, batch)

            trained = clients.sgd(scaled_loss, start, scale=self._scale(clients, level))
        else:
            trained = clients.sgd(clients.loss, start)

        rows = unmarked(trained)
        if bool((rows.masked_fill(held, 0) != 0).any()):
            raise MethodError(
                f"{type(self).__name__} trains a slice of the network as the whole one with zeros outside of it, but "
                "this training moved them: by the noise of privacy.noise, an optimizer that moves weights without a "
                "gradient, or a loss that depends on more than the network's outputs. Choose another."
            )
        members = F.one_hot(level, len(self.rates))
        # The server knows who has which entries.
        return {"slices": Mean(rows, charged=held.sum(1)), "members": Sum(members, charged=False)}

    def _scale(self, clients: Clients, level: Tensor) -> Tensor:
        """Return what weights and biases are multiplied with in training, so that layers' outputs are: ``[K, P+B]``."""
        rates = torch.tensor(self.rates, dtype=clients.model.dtype, device=level.device)
        return per_client(torch.where(slices_of(clients.model).hidden, 1 / rates[level][:, None], 1.0))

    def global_model(self, server: ServerState) -> Tensor:
        return server["theta"]

    def personal_model(self, clients: Clients, server: ServerView) -> Tensor:
        """Return each client's slice, with the units of the last round, and zeros outside of it: ``[K, P+B]``."""
        # A client that was not in the run is numbered from 0.
        levels = server["levels"]
        level = levels[torch.tensor(clients.ids, device=levels.device) % len(levels)]
        slices = self.slices(clients.model, self.shift(max(server["rounds"] - 1, 0)))
        return per_client(torch.where(slices[level.to(slices.device)], server["theta"], 0.0))

    def unseen_model(self, clients: Clients, server: ServerView) -> Tensor:
        return self.personal_model(clients, server)
