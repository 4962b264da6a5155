"""Personal models from a proximal problem around the global one."""

from __future__ import annotations

from typing import Annotated, Any

import torch
from torch import Tensor

from raypfl.clients.clients import Clients
from raypfl.common.limits import FROM_ZERO, POSITIVE
from raypfl.common.messages import Mean, per_client
from raypfl.federation.method import METHODS, ServerView
from raypfl.methods.global_model.fedavg import FedAvg
from raypfl.methods.local_training import proximal


@METHODS.register("pfedme")
class PFedMe(FedAvg):
    """FedAvg of the clients' Moreau envelopes (T. Dinh et al. 2020, Algorithm 1).

    ``min_w sum_k min_{v_k} F_k(v_k) + lam/2 ||v_k - w||^2``. On every mini-batch, the local optimizer takes
    `inner_steps` steps of the personal model ``v_k`` on the inner problem; then ``w_k <- w_k - lr * lam * (w_k -
    v_k)``. A round starts with both at the received ``w``, which is sent both ways. Clients keep ``v_k`` for
    evaluation. The paper's ``beta`` is `server_lr`.

    Differences from the paper: clients are averaged by samples unless `weighting` says otherwise (the paper: equally);
    with ``training.momentum``, the inner steps use it and keep the velocity between mini-batches (the paper has plain
    gradient steps); clients that were never drawn are evaluated with the initial model. Only the cohort trains; in the
    paper all clients do, and some of them are averaged. On MNIST, the paper has ``{lam: 15, inner_steps: 5}``.

    Attributes
    ----------
    lam : weight of the proximal term, lambda. ``w_k`` moves the fraction ``lr * lam`` of the way to ``v_k``.
    inner_steps : number of steps on each mini-batch, K; with 0, ``w`` does not change.
    inner_lr : learning rate of the personal model; None: the round's.
    unseen_epochs : number of epochs on the inner problem of a client that was never trained, from the global model;
        None: as many as in one round.
    """

    lam: Annotated[float, FROM_ZERO] = 1.0
    inner_steps: Annotated[int, FROM_ZERO] = 3
    inner_lr: Annotated[float | None, POSITIVE] = None
    unseen_epochs: Annotated[int | None, FROM_ZERO] = None

    def train(self, clients: Clients, theta: Tensor) -> dict[str, Mean]:
        w: Tensor = per_client(theta.expand(len(clients), -1))
        personal = w
        penalty = proximal(self.lam)
        for batch in clients.minibatches():
            for _ in range(self.inner_steps):
                personal = batch.step(clients.loss, personal, penalty=penalty, lr=self.inner_lr, anchor=w)
            # Only for clients that still have a mini-batch.
            w = torch.where(batch.active, w - clients.lr * self.lam * (w - personal), w)

        clients.state["personal"] = personal
        return {"theta": Mean(w, weight=clients.weights(self.weighting))}

    def personal_model(self, clients: Clients, server: ServerView) -> Tensor:
        return clients.state.get("personal", default=clients.initial)

    def unseen_model(self, clients: Clients, server: ServerView) -> Tensor:
        theta = server["theta"]
        schedule: dict[str, Any] = {"epochs": self.unseen_epochs, "lr": self.inner_lr, "stream": "unseen"}
        return clients.sgd(clients.loss, theta, penalty=proximal(self.lam), anchor=theta, **schedule)
