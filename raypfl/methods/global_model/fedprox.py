"""Federated averaging with a proximal term."""

from __future__ import annotations

from typing import Annotated

from torch import Tensor

from raypfl.clients.clients import Clients
from raypfl.common.limits import FROM_ZERO
from raypfl.common.messages import Mean
from raypfl.federation.method import METHODS
from raypfl.methods.global_model.fedavg import FedAvg
from raypfl.methods.local_training import proximal


@METHODS.register("fedprox")
class FedProx(FedAvg):
    """FedAvg whose clients stay close to the received model (Li et al. 2020).

    A client minimises ``F_k(w) + mu/2 ||w - w_t||^2``; with ``mu = 0`` it is FedAvg, bit for bit.

    Attributes
    ----------
    mu : weight of the proximal term.
    """

    mu: Annotated[float, FROM_ZERO] = 0.01

    def train(self, clients: Clients, theta: Tensor) -> dict[str, Mean]:
        trained = clients.sgd(clients.loss, theta, penalty=proximal(self.mu), anchor=theta)
        return {"theta": Mean(trained, weight=clients.weights(self.weighting))}
