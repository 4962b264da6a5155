"""A start of local training between the client's last model and the global one."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from raypfl.clients.clients import Clients
from raypfl.common.limits import COUNT, FROM_ZERO, POSITIVE, SHARE
from raypfl.common.messages import Mean, per_client, unmarked
from raypfl.federation.method import METHODS, ServerView
from raypfl.methods.global_model.fedavg import FedAvg
from raypfl.methods.local_training import mask_of_option, sample_passes
from raypfl.models.flat import FlatModel


@METHODS.register("fedala")
class FedALA(FedAvg):
    """FedAvg with adaptive local aggregation (Zhang et al. 2023).

    Client k starts at ``w`` below `adapted` and at ``v_k + W_k * (w - v_k)`` in it, where ``v_k`` is the model that it
    trained last. Before training, each mini-batch of a part of its samples moves the weights, one for each number:
    ``W_k <- clip(W_k - weight_lr * gradient * (w - v_k), 0, 1)``, with the gradient at the start. ``W_k`` begins with
    ones and is kept. The first time, epochs are repeated until the standard deviation of their last losses is below
    the `threshold`; later there is one.

    A client that was never trained has no ``v_k`` and starts at ``w``. The personal model is the start from the newest
    ``w``, so an evaluation learns weights too, and discards them. With ``weight_lr: 0`` it is FedAvg, bit for bit.

    Attributes
    ----------
    adapted : segments in which the start is between both models.
    weight_lr : learning rate of the weights.
    share : share of a client's samples that the weights see, drawn anew in each round.
    threshold, window : an epoch's loss is that of its last mini-batch, before its step, in evaluation mode; the first
        time, the last `window` of these must have a standard deviation below the threshold. PFLlib, which is the
        authors', has a threshold of 0.1 and losses in training mode.
    max_epochs : largest number of epochs; the authors' code has no limit.
    """

    adapted: str = "output layer"
    weight_lr: Annotated[float, FROM_ZERO] = 1.0
    share: Annotated[float, SHARE] = 0.8
    threshold: Annotated[float, POSITIVE] = 0.01
    window: Annotated[int, COUNT] = 10
    max_epochs: Annotated[int, COUNT] = 100

    def check(self, model: FlatModel) -> None:
        mask_of_option(model, "adapted", self.adapted)

    def train(self, clients: Clients, theta: Tensor) -> dict[str, Mean]:
        start, weights = self._start(clients, theta)
        trained = clients.sgd(clients.loss, start)

        clients.state["model"] = trained
        clients.state["weights"] = weights
        clients.state["rounds"] = self._rounds(clients) + 1
        return {"theta": Mean(trained, clients.weights(self.weighting))}

    def personal_model(self, clients: Clients, server: ServerView) -> Tensor:
        start, _ = self._start(clients, server["theta"])
        return start

    def _start(self, clients: Clients, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Return where clients start, ``[K, P+B]``, with their new weights ``[K, A]`` of the A adapted parameters."""
        model = clients.model
        adapted = mask_of_option(model, "adapted", self.adapted)
        adapted[model.num_parameters :] = False  # statistics are the received model's
        received = theta[adapted]
        last = unmarked(clients.state.get("model", default=theta))[:, adapted]
        weights = unmarked(clients.state.get("weights", default=torch.ones_like(received)))

        def start_at(weights: Tensor) -> Tensor:
            rows = theta.repeat(len(clients), 1)
            # Where the weight is one, v + (w - v) would round.
            rows[:, adapted] = torch.where(weights == 1, received, last + weights * (received - last))
            return per_client(rows)

        rounds = unmarked(self._rounds(clients))
        learning = rounds > 0
        losses: list[Tensor] = []
        steps = sample_passes(clients, "weights", self.share) if bool(learning.any()) else []

        while bool(learning.any()) and len(losses) < self.max_epochs:
            for s, (takes_step, batches) in enumerate(steps, start=1):
                start = start_at(weights)
                if s == len(steps):
                    losses.append(unmarked(clients.map(clients.loss, start, batches)))
                gradient = unmarked(clients.grad(clients.loss, start, batches))
                slope = gradient[:, model.parameters(adapted)] * (received - last)
                moved = (weights - self.weight_lr * slope).clamp(0, 1)
                weights = torch.where((learning & takes_step)[:, None], moved, weights)

            learning = learning & (rounds == 1)
            if len(losses) > self.window:
                spread = torch.stack(losses[-self.window :]).std(0, correction=0)
                learning = learning & ~(spread < self.threshold)
        return start_at(weights), weights

    def _rounds(self, clients: Clients) -> Tensor:
        """Return in how many rounds each client was trained, ``[K]``."""
        return clients.state.get("rounds", default=torch.zeros((), dtype=clients.model.dtype))
