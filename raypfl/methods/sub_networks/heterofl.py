"""Clients that train the first units of every layer, as many as fit their capacity."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from raypfl.clients.clients import Clients
from raypfl.common.messages import per_client
from raypfl.federation.method import METHODS
from raypfl.learning.objectives.batch import Batch
from raypfl.methods.sub_networks.slices import slices_of
from raypfl.methods.sub_networks.sub_networks import SubNetworks, loss_at


@METHODS.register("heterofl")
class HeteroFL(SubNetworks):
    """Heterogeneous federated learning (Diao, Ding and Tarokh 2021): a client has the first units of each layer.

    With ``rates = [1]`` it is FedAvg with equal weights, bit for bit.

    In the paper, the masked cross-entropy is the rule, also in local tests, and batch norm is measured after training,
    in a pass over all clients' data; here batch norm is refused.

    Attributes
    ----------
    scaler : whether the outputs of hidden layers are divided by r in training.
    """

    scaler: bool = True

    def trained(self, clients: Clients, start: Tensor, level: Tensor, owned: Tensor | None) -> Tensor:
        is_scaled = self.scaler and min(self.rates) < 1
        if not is_scaled and owned is None:
            return clients.sgd(clients.loss, start)

        def loss(p: Tensor, batch: Batch, scale: Tensor | None = None, owned: Tensor | None = None) -> Tensor:
            return loss_at(clients, p if scale is None else p * scale, batch, owned)

        extras: dict[str, Any] = {} if owned is None else {"owned": per_client(owned)}
        if is_scaled:
            # Weights and biases that are divided by r divide the layer's output.
            rates = torch.tensor(self.rates, dtype=start.dtype, device=start.device)
            scale = torch.where(slices_of(clients.model).hidden, 1 / rates[level][:, None], 1.0)
            extras["scale"] = per_client(scale)
        return clients.sgd(loss, start, **extras)
