"""Clients that train the first units of every layer, as many as fit their capacity."""

from __future__ import annotations

import torch
from torch import Tensor

from raypfl.clients.clients import Clients
from raypfl.common.messages import per_client
from raypfl.federation.method import METHODS
from raypfl.learning.objectives.batch import Batch
from raypfl.methods.sub_networks.slices import slices_of
from raypfl.methods.sub_networks.sub_networks import SubNetworks


@METHODS.register("heterofl")
class HeteroFL(SubNetworks):
    """Heterogeneous federated learning (Diao, Ding and Tarokh 2021): a client has the first units of each layer.

    With ``rates = [1]`` it is FedAvg with equal weights, bit for bit.

    Attributes
    ----------
    scaler : whether the outputs of hidden layers are divided by r in training.
    """

    scaler: bool = True

    def trained(self, clients: Clients, start: Tensor, level: Tensor) -> Tensor:
        if not self.scaler or min(self.rates) == 1:
            return clients.sgd(clients.loss, start)

        def scaled_loss(p: Tensor, batch: Batch, scale: Tensor) -> Tensor:
            return clients.loss(p * scale, batch)

        # Weights and biases that are divided by r divide the layer's output.
        rates = torch.tensor(self.rates, dtype=start.dtype, device=start.device)
        scale = torch.where(slices_of(clients.model).hidden, 1 / rates[level][:, None], 1.0)
        return clients.sgd(scaled_loss, start, scale=per_client(scale))
