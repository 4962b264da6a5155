"""A mixture of a personal and a global model on each client."""

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


@METHODS.register("apfl")
class APFL(FedAvg):
    """Adaptive personalized federated learning (Deng et al. 2020, Algorithm 1).

    Client k predicts with ``alpha_k v_k + (1 - alpha_k) w_k``. On every mini-batch ``w_k``, which starts at the
    received model, steps down ``F_k(w_k)``, and ``v_k`` down ``F_k(alpha_k v_k + (1 - alpha_k) w_k)``, of which only
    ``v_k`` is varied. Sent, both ways: ``w``; kept: ``v_k``, ``w_k`` and ``alpha_k``. The global model is FedAvg's.
    With ``alpha = 0`` it predicts as FedAvg's local models do; with ``alpha = 1`` it is training alone, bit for bit.

    Attributes
    ----------
    alpha : the share of the personal model, at first or for good.
    adaptive : each round begins with a step of ``alpha_k`` down the mixture's loss on one mini-batch, of which the
        slope is ``<v_k - w, grad F_k(mixture)>``, clipped to [0, 1].
    alpha_lr : of that step; None: training.lr.
    """

    alpha: float = 0.5
    adaptive: bool = True
    alpha_lr: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise ConfigError(f"method.alpha is {self.alpha}; it must be between 0 and 1.")

    def train(self, clients: Clients, theta: Tensor) -> dict[str, Mean]:
        def mixed(p: Tensor, batch: Batch, local: Tensor, alpha: Tensor) -> Tensor:
            return clients.loss(alpha * p + (1 - alpha) * local, batch)

        local: Tensor = per_client(theta.repeat(len(clients), 1))
        personal = clients.state.get("personal", default=clients.initial)
        alpha = self._alpha(clients)
        if self.adaptive:
            alpha = self._adapted(clients, alpha, personal, local)
        for batch in clients.minibatches():
            personal, local = (
                batch.step(mixed, personal, of="personal", local=local, alpha=alpha),
                batch.step(clients.loss, local, of="local"),
            )
        clients.state["personal"], clients.state["local"], clients.state["alpha"] = personal, local, alpha
        return {"theta": Mean(local, weight=self.weights(clients))}

    def personal_model(self, clients: Clients, server: ServerView) -> Tensor:
        personal, local = (clients.state.get(name, default=clients.initial) for name in ("personal", "local"))
        return self._mixture(clients, self._alpha(clients), personal, local)

    def _alpha(self, clients: Clients) -> Tensor:
        return clients.state.get("alpha", default=torch.tensor(self.alpha, dtype=clients.model.dtype))

    def _adapted(self, clients: Clients, alpha: Tensor, personal: Tensor, local: Tensor) -> Tensor:
        """``alpha[K]`` after a step down the mixture's loss on one mini-batch of each client."""
        batches = clients.batches(clients.training.batch_size, stream="alpha")
        gradient = clients.grad(clients.loss, self._mixture(clients, alpha, personal, local), batches)
        slope = (clients.model.parameters(personal - local) * gradient).sum(1)
        lr = clients.lr if self.alpha_lr is None else self.alpha_lr
        return (alpha - lr * slope).clamp(0, 1)

    def _mixture(self, clients: Clients, alpha: Tensor, personal: Tensor, local: Tensor) -> Tensor:
        """``[K, P+B]``; the statistics are those of the personal model, which saw the mixture's activations."""
        mixed = alpha[:, None] * personal + (1 - alpha[:, None]) * local
        return torch.cat([clients.model.parameters(mixed), clients.model.buffers(personal)], dim=1)
