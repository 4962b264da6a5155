"""Personal models as solutions of a proximal problem around the global one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from raypfl.common.errors import ConfigError
from raypfl.common.messages import Mean, per_client
from raypfl.federation.method import METHODS, ServerView
from raypfl.methods.fedavg import FedAvg

if TYPE_CHECKING:
    from raypfl.clients.clients import Clients
    from raypfl.objectives.batch import Batch


@METHODS.register("pfedme")
class PFedMe(FedAvg):
    """FedAvg of the clients' Moreau envelopes (T. Dinh et al. 2020, Algorithm 1).

    ``min_w sum_k min_{v_k} F_k(v_k) + lam/2 ||v_k - w||^2``. For every mini-batch, `inner_steps` steps of SGD on the
    inner problem move the personal model ``v_k``, and then ``w_k <- w_k - lr * lam * (w_k - v_k)``. A round begins with
    both at the received ``w``. Sent, both ways: ``w``; kept: ``v_k``, only to be judged. The paper's ``beta`` is
    `server_lr`.

    Attributes
    ----------
    lam : strength of the pull, lambda. ``training.lr * lam`` is the share of the way to ``v_k`` that ``w_k`` goes.
    inner_steps : on each mini-batch, K; 0 leaves ``w`` as it is.
    inner_lr : of the personal model; None: training.lr.
    """

    lam: float = 1.0
    inner_steps: int = 3
    inner_lr: float | None = None

    def __post_init__(self) -> None:
        if self.inner_steps < 0:
            raise ConfigError(f"method.inner_steps is {self.inner_steps}; it must be 0 or more.")

    def train(self, clients: Clients, theta: Tensor) -> dict[str, Mean]:
        def pull(p: Tensor, batch: Batch, center: Tensor) -> Tensor:
            return self.lam / 2 * (p - center).square().sum()

        center: Tensor = per_client(theta.repeat(len(clients), 1))
        personal = center
        for batch in clients.minibatches():
            for _ in range(self.inner_steps):
                personal = batch.step(clients.loss, personal, penalty=pull, lr=self.inner_lr, center=center)
            center = torch.where(batch.active, center - clients.lr * self.lam * (center - personal), center)
        clients.state["personal"] = personal
        return {"theta": Mean(center, weight=self.weights(clients))}

    def personal_model(self, clients: Clients, server: ServerView) -> Tensor:
        return clients.state.get("personal", default=clients.initial)
