"""Mixtures of a personal and a global model."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from raypfl.clients.clients import Clients
from raypfl.common.conditions import needs
from raypfl.common.limits import CHANCE, POSITIVE
from raypfl.common.messages import Mean, per_client
from raypfl.federation.method import METHODS, ServerView
from raypfl.learning.objectives.batch import Batch
from raypfl.methods.global_model.fedavg import FedAvg


@METHODS.register("apfl")
class APFL(FedAvg):
    """Adaptive personalized federated learning (Deng et al. 2020, Algorithm 1).

    Client k predicts with ``alpha_k v_k + (1 - alpha_k) w_k``. On every mini-batch, ``w_k`` (which starts at the
    received model) takes a step on ``F_k(w_k)``, and ``v_k`` one on ``F_k(alpha_k v_k + (1 - alpha_k) w_k)`` with
    ``w_k`` fixed. ``w`` is sent both ways; clients keep ``v_k``, ``w_k`` and ``alpha_k``. The global model is FedAvg's:
    clients are weighted by samples unless `weighting` says otherwise; the paper weights them equally. With ``alpha =
    0`` it predicts like FedAvg's local models; with ``alpha = 1`` it is local training.

    Attributes
    ----------
    alpha : weight of the personal model, at the start or, without `adaptive`, always.
    adaptive : start each round with a gradient step of ``alpha_k`` on the mixture's loss for one mini-batch. Its
        gradient is ``<v_k - w, grad F_k(mixture)>``, and the result is clipped to [0, 1].
    alpha_lr : learning rate of alpha; None: the round's.
    """

    alpha: Annotated[float, CHANCE] = 0.5
    adaptive: bool = True
    alpha_lr: Annotated[float | None, POSITIVE, needs("adaptive", True)] = None

    def train(self, clients: Clients, theta: Tensor) -> dict[str, Mean]:
        def mixed(p: Tensor, batch: Batch, local: Tensor, alpha: Tensor) -> Tensor:
            return clients.loss(alpha * p + (1 - alpha) * local, batch)

        local: Tensor = per_client(theta.expand(len(clients), -1))
        personal = clients.state.get("personal", default=clients.initial)
        alpha = self._alpha(clients)
        if self.adaptive:
            alpha = self._adapt_alpha(clients, alpha, personal, local)

        for batch in clients.minibatches():
            # Both steps are at the same w_k: v_k's comes first, with w_k before its own step.
            personal = batch.step(mixed, personal, of="personal", local=local, alpha=alpha)
            local = batch.step(clients.loss, local, of="local")

        clients.state["personal"] = personal
        clients.state["local"] = local
        clients.state["alpha"] = alpha
        return {"theta": Mean(local, weight=clients.weights(self.weighting))}

    def personal_model(self, clients: Clients, server: ServerView) -> Tensor:
        personal = clients.state.get("personal", default=clients.initial)
        local = clients.state.get("local", default=clients.initial)
        return self._mixture(clients, self._alpha(clients), personal, local)

    def _alpha(self, clients: Clients) -> Tensor:
        return clients.state.get("alpha", default=torch.tensor(self.alpha, dtype=clients.model.dtype))

    def _adapt_alpha(self, clients: Clients, alpha: Tensor, personal: Tensor, local: Tensor) -> Tensor:
        """Return ``alpha[K]`` after a gradient step on the mixture's loss for one mini-batch of each client."""
        batches = clients.batches(clients.training.batch_size, stream="alpha")
        gradient = clients.grad(clients.loss, self._mixture(clients, alpha, personal, local), batches)
        slope = (clients.model.parameters(personal - local) * gradient).sum(1)
        lr = clients.lr if self.alpha_lr is None else self.alpha_lr
        return (alpha - lr * slope).clamp(0, 1)

    def _mixture(self, clients: Clients, alpha: Tensor, personal: Tensor, local: Tensor) -> Tensor:
        """Return the clients' mixtures ``[K, P+B]``.

        The batch-norm statistics are the personal model's, which come from the mixture's activations.
        """
        mixed = alpha[:, None] * personal + (1 - alpha[:, None]) * local
        return torch.cat([clients.model.parameters(mixed), clients.model.buffers(personal)], dim=1)
