"""A personal model beside the global one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from raypfl.common.messages import Mean
from raypfl.federation.method import METHODS, ServerView
from raypfl.methods.fedavg import FedAvg

if TYPE_CHECKING:
    from raypfl.clients.clients import Clients
    from raypfl.objectives.batch import Batch


@METHODS.register("ditto")
class Ditto(FedAvg):
    """A personal model per client, pulled toward the global one (Li et al. 2021).

    The global model is FedAvg's. In parallel client k minimises ``F_k(v_k) + lam/2 ||v_k - w_t||^2``, where ``w_t`` is
    the received model and ``v_k`` stays on the client from round to round, starting at the initial model; ``lam = 0``
    is training alone, bit for bit.

    Attributes
    ----------
    lam : strength of the pull, lambda.
    personal_epochs : epochs of the personal model a round; None: as for the global one.
    """

    lam: float = 0.75
    personal_epochs: int | None = None

    def train(self, clients: Clients, theta: Tensor) -> dict[str, Mean]:
        def pull(p: Tensor, batch: Batch, anchor: Tensor) -> Tensor:
            return self.lam / 2 * (p - anchor).square().sum()

        personal = clients.state.get("personal", default=clients.initial)
        clients.state["personal"] = clients.sgd(
            clients.loss, personal, penalty=pull, epochs=self.personal_epochs, anchor=theta
        )
        return super().train(clients, theta)

    def personal_model(self, clients: Clients, server: ServerView) -> Tensor:
        return clients.state.get("personal", default=clients.initial)
