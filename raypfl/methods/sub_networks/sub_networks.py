"""What methods share whose clients train slices of one model: who has which slice, and the means of its entries."""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from raypfl.clients.clients import Clients
from raypfl.common import rng
from raypfl.common.errors import ConfigError, IncompleteError, MethodError
from raypfl.common.limits import Limit
from raypfl.common.messages import Broadcast, Mean, Scatter, Sum, Weighting, per_client, unmarked
from raypfl.devices import Loads
from raypfl.federation.cohort import Cohort
from raypfl.federation.method import Method, ServerState, ServerView
from raypfl.federation.task import Task
from raypfl.learning.objectives import Classification, Objective
from raypfl.learning.objectives.batch import Batch
from raypfl.methods.sub_networks.slices import slices_of
from raypfl.models.flat import FlatModel

RATES = Limit("one number or more, each above 0 and at most 1", lambda v: len(v) > 0 and all(0 < r <= 1 for r in v))
SHARES = Limit("numbers of 0 or more, not all 0", lambda v: all(0 <= s < np.inf for s in v) and sum(v) > 0)


def masked(outputs: Tensor, owned: Tensor | None) -> Tensor:
    """Return a client's outputs ``[b, outputs]``, 0 where it lacks the class; None: as they are."""
    return outputs if owned is None else torch.where(owned, outputs, 0.0)


def loss_at(clients: Clients, p: Tensor, batch: Batch, owned: Tensor | None) -> Tensor:
    """Return a client's loss at the parameters p of the whole network, of :func:`masked` outputs."""
    if owned is None:
        return clients.loss(p, batch)
    return clients.objective.loss(masked(clients.model(p, batch.x), owned), batch)


class SubNetworks(Method):
    """Clients of unequal capacity train slices of one model.

    An entry of the model becomes the mean over the clients of the cohort that have it; one that nobody has stays as it
    is. A client's personal model is its slice of the global model, also if it was in no cohort; that of a client that
    is never trained is the widest slice. Clients keep nothing.

    Attributes
    ----------
    rates : the rates r that clients have: a slice has ``ceil(r width)`` units of each hidden layer.
    shares : the share of the clients that has each rate, relative to each other; None: equal shares.
    assignment : rates are drawn once (``fixed``), or anew in every round (``dynamic``); the shares are exact, up to
        whole clients.
    weighting : weights of clients in the mean: training samples (``samples``) or equal (``uniform``).
    masked_loss : whether outputs of classes that a client lacks are 0 in its training, and its weights of these outputs
        do not count in the mean: the masked cross-entropy of Diao et al. 2021.
    """

    rates: Annotated[tuple[float, ...], RATES] = (1.0, 0.5, 0.25)
    shares: Annotated[tuple[float, ...] | None, SHARES] = None
    assignment: Literal["fixed", "dynamic"] = "fixed"
    weighting: Weighting = "uniform"
    masked_loss: bool = False

    @property
    def objectives(self) -> tuple[type[Objective], ...]:  # type: ignore[override]
        """The objectives that the method can learn: only with classes are there some that a client lacks."""
        return (Classification,) if self.masked_loss else (Objective,)

    def trained(self, clients: Clients, start: Tensor, level: Tensor, owned: Tensor | None) -> Tensor:
        """Return the slices ``[K, P+B]`` after local training, with zeros outside of them, as in `start`.

        Parameters
        ----------
        level : the number of each client's rate in `rates`, ``int64[K]``.
        owned : whether a client has the class of an output, ``bool[K, outputs]``; None: the loss is not masked.
        """
        raise IncompleteError(f"{type(self).__name__} is not complete: define trained(self, clients, ...).")

    def work(self, task: Task) -> np.ndarray:
        """Return a step's multiplications at each of the `rates`, as a share of the whole network's."""
        return np.array([slices_of(task.model).work(rate, task.input_shape) for rate in self.rates])

    def shift(self, rounds: int) -> int:
        """Return the first unit of a slice after so many rounds."""
        return 0

    def check(self, model: FlatModel) -> None:
        slices_of(model)
        if self.shares is not None and len(self.shares) != len(self.rates):
            raise ConfigError(
                f"method.shares has {len(self.shares)} numbers and method.rates {len(self.rates)}; give each rate its "
                "share."
            )

    def loads(self, task: Task) -> Loads:
        sizes = self.slices(task.model, 0).sum(1).double().cpu().numpy()
        work = self.work(task)
        levels = self.drawn_levels(task, 0).numpy()
        if self.assignment == "fixed":
            return Loads(sizes[levels], work[levels])
        # Rates are redrawn in each round, so every client counts as the average one.
        return Loads(np.ones(len(levels)), np.full(len(levels), work[levels].mean()))

    def message_sizes(self, task: Task, round: int) -> np.ndarray | None:
        if self.assignment == "fixed":
            return None
        sizes = self.slices(task.model, 0).sum(1).double().cpu().numpy()
        sizes_of_clients = sizes[self.drawn_levels(task, round).numpy()]
        return sizes_of_clients / sizes_of_clients.mean()

    def start(self, task: Task) -> ServerState:
        return {"theta": task.model.init(task.seed), "levels": self.drawn_levels(task, 0), "rounds": 0}

    def drawn_levels(self, task: Task, draw: int) -> Tensor:
        """Return the number of each client's rate in `rates`, ``int64[num_clients]``."""
        shares = np.array(self.shares or [1.0] * len(self.rates))
        ends = np.round(shares.cumsum() / shares.sum() * task.num_clients)
        levels = np.searchsorted(ends, np.arange(task.num_clients), side="right")
        return torch.from_numpy(rng.generator(task.seed, "rates", draw).permutation(levels))

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

        # The level is not charged: the size of the model tells a client its rate.
        reply = cohort.run(
            self.train,
            theta=Broadcast(theta, charged=slices.sum(1)[server["levels"].to(slices.device)]),
            level=Scatter(levels, charged=False),
            shift=shift,
        )
        weights = reply["weights"].to(theta.device, theta.dtype)
        # An output that only some clients own has a column of weights of its own.
        columns = slices_of(cohort.task.model).output_of if self.masked_loss else torch.zeros_like(theta).long()
        weight_of_entry = (weights[:, columns] * slices).sum(0)
        # For an entry that all clients have, the factor is 1, so the mean keeps its bits.
        mean = reply["slices"] * (weights[:, 0].sum() / weight_of_entry.clamp_min(1))
        server["theta"] = torch.where(weight_of_entry > 0, mean, theta)
        server["rounds"] += 1

    def train(self, clients: Clients, theta: Tensor, level: Tensor, shift: int) -> dict[str, Mean | Sum]:
        level = unmarked(level)
        in_slice = self.slices(clients.model, shift)[level]
        owned = self._owned(clients) if self.masked_loss else None
        start = per_client(torch.where(in_slice, theta, 0.0))
        trained = unmarked(self.trained(clients, start, level, owned))
        if bool((trained.masked_fill(in_slice, 0) != 0).any()):
            raise MethodError(
                f"{type(self).__name__} trains a slice of the network as the whole one with zeros outside of it, but "
                "this training moved them: by the noise of privacy.noise, an optimizer that moves weights without a "
                "gradient, or a loss that depends on more than the network's outputs. Choose another."
            )

        weight = clients.weights(self.weighting)
        weights = F.one_hot(level, len(self.rates))[:, :, None]
        if weight is not None:
            weights = weights * unmarked(weight).long()[:, None, None]
        # The weights are not charged: the server knows which client has which entries, except for its classes.
        charged: bool | int = False
        if owned is not None:
            # Whatever is not of an output is everybody's.
            columns = F.pad(owned, (1, 0), value=True)
            weights = weights * columns[:, None]
            trained = trained * columns[:, slices_of(clients.model).output_of]
            charged = owned.shape[1]
        return {"slices": Mean(trained, weight, charged=in_slice.sum(1)), "weights": Sum(weights, charged=charged)}

    def _owned(self, clients: Clients) -> Tensor:
        owned = unmarked(clients.label_counts()) > 0
        # An output beyond the classes is nobody's.
        return F.pad(owned, (0, slices_of(clients.model).num_outputs - owned.shape[1]))

    def global_model(self, server: ServerState) -> Tensor:
        return server["theta"]

    def personal_model(self, clients: Clients, server: ServerView) -> Tensor:
        """Return each client's slice, with the units of the last round, and zeros outside of it: ``[K, P+B]``."""
        level = server["levels"][list(clients.ids)]
        in_slice = self._last_slices(clients, server)[level.to(server["theta"].device)]
        return per_client(torch.where(in_slice, server["theta"], 0.0))

    def unseen_model(self, clients: Clients, server: ServerView) -> Tensor:
        # Nothing tells what such a client can compute, so it gets the widest slice that was trained.
        widest = max(server["levels"].tolist(), key=lambda level: self.rates[level])
        model = torch.where(self._last_slices(clients, server)[widest], server["theta"], 0.0)
        return per_client(model.expand(len(clients), -1))

    def _last_slices(self, clients: Clients, server: ServerView) -> Tensor:
        """Return the entries ``bool[rates, P+B]`` that a client of each rate had in the last round."""
        return self.slices(clients.model, self.shift(max(server["rounds"] - 1, 0)))
