"""Federated averaging with a pull toward the received model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from raypfl.common.messages import Mean
from raypfl.federation.method import METHODS
from raypfl.methods.fedavg import FedAvg

if TYPE_CHECKING:
    from raypfl.clients.clients import Clients
    from raypfl.objectives.batch import Batch


@METHODS.register("fedprox")
class FedProx(FedAvg):
    """FedAvg whose clients stay near the received model (Li et al. 2020).

    A client minimises ``F_k(w) + mu/2 ||w - w_t||^2``; ``mu = 0`` is FedAvg bit for bit.

    Attributes
    ----------
    mu : strength of the pull.
    """

    mu: float = 0.01

    def train(self, clients: Clients, theta: Tensor) -> dict[str, Mean]:
        def pull(p: Tensor, batch: Batch, anchor: Tensor) -> Tensor:
            return self.mu / 2 * (p - anchor).square().sum()

        trained = clients.sgd(clients.loss, theta, penalty=pull, anchor=theta)
        return {"theta": Mean(trained, weight=self.weights(clients))}
