"""Stochastic gradient descent."""

from __future__ import annotations

import torch
from torch import Tensor

from raypfl.common.errors import ConfigError
from raypfl.learning.optimizers.base import OPTIMIZERS, LocalOptimizer, Memory, Number, add_scaled_


@OPTIMIZERS.register("sgd")
class SGD(LocalOptimizer):
    """SGD with momentum, as ``torch.optim.SGD``.

    Attributes
    ----------
    momentum : fraction of the velocity that each step keeps.
    nesterov : whether to use Nesterov momentum.
    """

    momentum: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"momentum of SGD is {self.momentum}; it must be at least 0 and below 1.")

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
