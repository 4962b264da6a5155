"""What fluke 0.8.1 does where it departs from a paper, as methods of raypfl: the test of an explanation.

If one of them gives fluke's models from the same mini-batches, then its difference to the method that it is named after
is the whole difference between the two systems.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from raypfl import methods
from raypfl.common.errors import ConfigError
from raypfl.common.messages import Mean, per_client
from raypfl.federation.method import ServerView
from raypfl.methods import FedAvg

if TYPE_CHECKING:
    from raypfl.clients.clients import Clients


class APFL(methods.APFL):
    """The mixture's gradient never reaches the personal model, which moves toward the local one once a round.

    ``v <- alpha v + (1 - alpha) w`` after the local epochs; it is also what is judged. Its alpha is constant.
    """

    def train(self, clients: Clients, theta: Tensor) -> dict[str, Mean]:
        if self.adaptive:
            raise ConfigError("fluke's mixtures have a constant alpha; set adaptive to false.")
        local = clients.sgd(clients.loss, theta)
        personal = clients.state.get("personal", default=clients.initial)
        clients.state["personal"] = self.alpha * personal + (1 - self.alpha) * local
        return {"theta": Mean(local, weight=clients.weights(self.weighting))}

    def personal_model(self, clients: Clients, server: ServerView) -> Tensor:
        return clients.state.get("personal", default=clients.initial)


class PFedMe(methods.PFedMe):
    """No pull: FedAvg with `inner_steps` steps on every mini-batch. The personal model is what is sent up."""

    def train(self, clients: Clients, theta: Tensor) -> dict[str, Mean]:
        personal: Tensor = per_client(theta.repeat(len(clients), 1))
        for batch in clients.minibatches():
            for _ in range(self.inner_steps):
                personal = batch.step(clients.loss, personal)
        clients.state["personal"] = personal
        return {"theta": Mean(personal, weight=clients.weights(self.weighting))}


class FedBN(FedAvg):
    """Batch norm is sent and averaged too, and the average is what a newcomer begins with."""

    def train(self, clients: Clients, theta: Tensor) -> dict[str, Mean]:
        trained = clients.sgd(clients.loss, self._with_own_norm(clients, theta))
        clients.state["norm"] = trained[:, clients.model.mask("batch norm")]
        return {"theta": Mean(trained, weight=clients.weights(self.weighting))}

    def personal_model(self, clients: Clients, server: ServerView) -> Tensor:
        return self._with_own_norm(clients, server["theta"])

    def _with_own_norm(self, clients: Clients, theta: Tensor) -> Tensor:
        norm = clients.model.mask("batch norm")
        norm_of_clients = clients.state.get("norm", default=theta[norm])
        return per_client(theta.repeat(len(clients), 1).masked_scatter(norm, torch.as_tensor(norm_of_clients)))
