"""One step of local training: clipping, weight decay, and the optimizer's rule."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from raypfl.optimizers.base import LocalOptimizer, Memory


@dataclass(frozen=True)
class Update:
    """A local optimizer's step at a learning rate, with clipping, weight decay and frozen entries.

    The order is that of PyTorch loops: gradients of frozen entries are set to 0, the rest is clipped as by
    ``clip_grad_norm_``, weight decay is added, and the optimizer takes its step.

    Attributes
    ----------
    clip_norm : largest norm of a gradient; None: no clipping.
    trained : ``bool[P]``, the entries that are trained; None: all.
    decayed : ``bool[P]``, the entries with weight decay; None: all trained ones.
    """

    optimizer: LocalOptimizer
    lr: float
    weight_decay: float = 0.0
    clip_norm: float | None = None
    trained: Tensor | None = None
    decayed: Tensor | None = None

    @property
    def plain(self) -> bool:
        """Whether a step is exactly ``theta - lr * grad``."""
        alone = self.weight_decay == 0 and self.clip_norm is None and self.trained is None
        return alone and self.optimizer.plain and not self.optimizer.per_sample

    def init(self, theta: Tensor) -> Memory:
        """The optimizer's state before the first step of ``theta[..., P]``."""
        return self.optimizer.init(theta)

    def step_(self, theta: Tensor, grad: Tensor, memory: Memory) -> None:
        """Update ``theta[..., P]`` in place; overwrites `grad` (same shape) and `memory`."""
        if self.trained is not None:
            grad.mul_(self.trained)
        if self.clip_norm is not None:
            norm = grad.norm(dim=-1, keepdim=True)
            grad.mul_((self.clip_norm / (norm + 1e-6)).clamp_max(1.0))
        if self.weight_decay:
            self._decay(theta, grad)
        self.optimizer.step_(theta, grad, memory, self.lr)

    def _decay(self, theta: Tensor, grad: Tensor) -> None:
        acts = self.trained if self.decayed is None else self.decayed
        decaying = theta if acts is None else theta * acts
        if self.optimizer.decoupled:
            theta.sub_(decaying, alpha=self.lr * self.weight_decay)
        else:
            grad.add_(decaying, alpha=self.weight_decay)
