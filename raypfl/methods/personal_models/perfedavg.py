"""A global model from which a few steps lead to good personal ones."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from raypfl.clients.clients import Clients
from raypfl.common.errors import ConfigError
from raypfl.common.limits import FROM_ZERO
from raypfl.common.messages import Mean, Weighting, per_client, unmarked
from raypfl.federation.method import METHODS, ServerView
from raypfl.learning.objectives.batch import Batch
from raypfl.methods.global_model.fedavg import FedAvg
from raypfl.methods.local_training import finetuned
from raypfl.models.flat import FlatModel


@METHODS.register("per-fedavg")
class PerFedAvg(FedAvg):
    """Meta-learning in federated averaging (Fallah et al. 2020): ``min_w sum_k F_k(w - alpha grad F_k(w))``.

    A local step goes from ``w_k`` along the gradient at ``w_k - alpha grad F_k(w_k)``. The inner gradient is of a
    random batch, the outer one of the epoch's next mini-batch, and both have ``training.batch_size`` samples. ``w`` is
    sent both ways; clients keep nothing. The personal model, also of a client that was never trained, is ``w`` after
    `finetune_epochs` of steps of `alpha` on the client's samples. With ``alpha = 0`` it is FedAvg. The paper draws all
    batches independently.

    Attributes
    ----------
    alpha : learning rate of the inner step, and of fine-tuning.
    exact : multiply the outer gradient by ``I - alpha H``, with H the Hessian at ``w_k`` of a third batch; otherwise H
        is dropped (the first-order variant). With momentum, the whole step is multiplied, not the gradient.
    finetune_epochs : number of epochs of fine-tuning.
    weighting : weights of clients in the average: equal (``uniform``, as in the paper) or training ``samples``.
    """

    alpha: Annotated[float, FROM_ZERO] = 0.01
    exact: bool = False
    finetune_epochs: Annotated[int, FROM_ZERO] = 1
    weighting: Weighting = "uniform"

    def check(self, model: FlatModel) -> None:
        if self.exact and model.num_buffers:
            raise ConfigError(
                "method.exact needs second derivatives, which batch-norm statistics do not have; choose a network "
                "without batch norm (model.norm=group), or method.exact=false."
            )

    def train(self, clients: Clients, theta: Tensor) -> dict[str, Mean]:
        model: Tensor = per_client(theta.expand(len(clients), -1))
        for number, batch in enumerate(clients.minibatches()):
            # w_k - alpha grad F_k(w_k), on a batch of its own; its batch-norm statistics are those of w_k.
            gradient = clients.grad(clients.loss, model, self._batches(clients, f"inner {number}"))
            inner = clients.model.parameters(model) - self.alpha * gradient
            adapted = torch.cat([inner, clients.model.buffers(model)], dim=1)

            step = batch.step(clients.loss, adapted) - adapted
            if self.exact:
                third = self._batches(clients, f"third {number}")
                step = step - self.alpha * _hessian_product(clients, model, step, third)
            model = model + torch.where(batch.active, step, 0)
        return {"theta": Mean(model, weight=clients.weights(self.weighting))}

    def personal_model(self, clients: Clients, server: ServerView) -> Tensor:
        return finetuned(clients, server["theta"], self.finetune_epochs, self.alpha)

    def unseen_model(self, clients: Clients, server: ServerView) -> Tensor:
        return self.personal_model(clients, server)

    def _batches(self, clients: Clients, stream: str) -> list[Batch]:
        return clients.batches(clients.training.batch_size, stream)


def _hessian_product(clients: Clients, model: Tensor, vectors: Tensor, batches: list[Batch]) -> Tensor:
    """Return ``H_k vectors[k]``, ``[K, P]``, with the Hessian of each client's loss on a batch."""
    p = unmarked(model).detach().clone().requires_grad_()
    with torch.enable_grad():
        losses = unmarked(clients.map(clients.loss, p, batches))
        (gradient,) = torch.autograd.grad(losses.sum(), p, create_graph=True)
        (product,) = torch.autograd.grad((gradient * unmarked(vectors)).sum(), p)
    return per_client(product)
