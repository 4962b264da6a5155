"""Adam and AdamW."""

from __future__ import annotations

from typing import Annotated, ClassVar

import torch
from torch import Tensor

from raypfl.common.limits import BELOW_ONE, POSITIVE
from raypfl.learning.optimizers.base import OPTIMIZERS, LocalOptimizer, Memory, Number


@OPTIMIZERS.register("adam")
class Adam(LocalOptimizer):
    """Adam (Kingma and Ba 2015), as ``torch.optim.Adam``.

    Attributes
    ----------
    beta1, beta2 : decay rates of the first and of the second moment.
    eps : constant that is added to the root of the second moment.
    """

    beta1: Annotated[float, BELOW_ONE] = 0.9
    beta2: Annotated[float, BELOW_ONE] = 0.999
    eps: Annotated[float, POSITIVE] = 1e-8

    @property
    def takes_rates(self) -> bool:
        return type(self).step_ is Adam.step_

    def init(self, theta: Tensor) -> Memory:
        first = torch.zeros_like(theta, memory_format=torch.contiguous_format)
        second = torch.zeros_like(theta, memory_format=torch.contiguous_format)
        steps = torch.zeros((*theta.shape[:-1], 1), dtype=torch.float64, device=theta.device)
        return {"first": first, "second": second, "steps": steps}

    def step_(self, theta: Tensor, grad: Tensor, memory: Memory, lr: Number) -> None:
        steps = memory["steps"].add_(1)
        first = memory["first"].lerp_(grad, 1 - self.beta1)
        second = memory["second"].mul_(self.beta2).addcmul_(grad, grad, value=1 - self.beta2)

        # As torch.optim.Adam corrects the moments' bias towards zero; `grad` serves as scratch memory.
        correction = (1 - self.beta2**steps).sqrt().to(theta.dtype)
        step_size = (1 - self.beta1**steps).reciprocal().mul(lr).to(theta.dtype)
        denominator = grad.copy_(second).sqrt_().div_(correction).add_(self.eps)
        theta.sub_(torch.div(first, denominator, out=grad).mul_(step_size))


@OPTIMIZERS.register("adamw")
class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019), as ``torch.optim.AdamW``.

    The decay is ``training.weight_decay``, whose default is 0; torch's default is 0.01.
    """

    decoupled: ClassVar[bool] = True
