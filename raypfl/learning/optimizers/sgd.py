"""Stochastic gradient descent."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from raypfl.common.limits import BELOW_ONE
from raypfl.learning.optimizers.base import OPTIMIZERS, LocalOptimizer, Memory, Number, add_scaled_


@OPTIMIZERS.register("sgd")
class SGD(LocalOptimizer):
    """SGD with momentum, as ``torch.optim.SGD``.

    Attributes
    ----------
    momentum : fraction of the velocity that each step keeps.
    nesterov : whether to use Nesterov momentum.
    """

    momentum: Annotated[float, BELOW_ONE] = 0.0
    nesterov: bool = False

    @property
    def plain(self) -> bool:
        return self.momentum == 0 and type(self).step_ is SGD.step_

    @property
    def takes_rates(self) -> bool:
        return type(self).step_ is SGD.step_

    def init(self, theta: Tensor) -> Memory:
        if not self.momentum:
            return {}
        return {"velocity": torch.zeros_like(theta, memory_format=torch.contiguous_format)}

    def step_(self, theta: Tensor, grad: Tensor, memory: Memory, lr: Number) -> None:
        if self.momentum:
            velocity = memory["velocity"].mul_(self.momentum).add_(grad)
            grad = grad.add_(velocity, alpha=self.momentum) if self.nesterov else velocity
        add_scaled_(theta, grad, -lr)
