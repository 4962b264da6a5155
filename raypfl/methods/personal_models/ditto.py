"""Personal models close to the global one."""

from __future__ import annotations

from typing import Annotated

from torch import Tensor

from raypfl.clients.clients import Clients
from raypfl.common.limits import FROM_ZERO
from raypfl.common.messages import Mean
from raypfl.federation.method import METHODS, ServerView
from raypfl.methods.global_model.fedavg import FedAvg
from raypfl.methods.local_training import proximal


@METHODS.register("ditto")
class Ditto(FedAvg):
    """FedAvg, and a personal model for each client that stays close to the global one (Li et al. 2021).

    Client k also minimises ``F_k(v_k) + lam/2 ||v_k - w_t||^2``, where ``w_t`` is the received model. ``v_k`` stays on
    the client and starts at the initial model; in the paper it starts at the model that the client first receives. With
    ``lam = 0`` it is local training, bit for bit. Clients that were never drawn are evaluated with the initial model.

    Attributes
    ----------
    lam : weight of the proximal term, lambda; 0.75 in Dai et al. 2023. The authors' code has 1, or chooses it for each
        step.
    personal_epochs : epochs of the personal model in each round; None: as many as for the global model.
    """

    lam: Annotated[float, FROM_ZERO] = 0.75
    personal_epochs: Annotated[int | None, FROM_ZERO] = None

    def train(self, clients: Clients, theta: Tensor) -> dict[str, Mean]:
        personal = clients.state.get("personal", default=clients.initial)
        clients.state["personal"] = clients.sgd(
            clients.loss, personal, penalty=proximal(self.lam), epochs=self.personal_epochs, anchor=theta
        )
        return super().train(clients, theta)

    def personal_model(self, clients: Clients, server: ServerView) -> Tensor:
        return clients.state.get("personal", default=clients.initial)
