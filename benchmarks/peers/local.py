"""A client's local training as one writes it, for the contenders that leave it to their user."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.peers.order import Order


def fit(net: nn.Module, x: Tensor, y: Tensor, order: Order, anchor: Sequence[Tensor] | None = None) -> None:
    """SGD over freshly shuffled epochs; with Ditto's pull toward `anchor`, if there is one."""
    parameters = list(net.parameters())
    optimizer = torch.optim.SGD(parameters, lr=order.lr, momentum=order.momentum)
    for _ in range(order.epochs):
        for index in torch.randperm(len(y)).split(order.batch):
            optimizer.zero_grad()
            F.cross_entropy(net(x[index]), y[index]).backward()
            for p, a in zip(parameters, anchor or [], strict=False):
                p.grad.add_(p.detach() - a, alpha=order.lam)
            optimizer.step()
