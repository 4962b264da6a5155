"""What a local optimizer is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, dataclass_transform

from torch import Tensor

from raypfl.common.registry import Registry
from raypfl.optimizers.draws import Draws

OPTIMIZERS = Registry("optimizer")

Memory = dict[str, Tensor]
"""What an optimizer remembers from step to step, by name."""


@dataclass_transform(frozen_default=True, kw_only_default=True)
class LocalOptimizer:
    """A rule by which steps move flat vectors: a frozen dataclass of its hyperparameters, without the learning rate.

    Subclasses become dataclasses by themselves. One of your own overrides `step_` and, if it remembers anything,
    `init`; it is named as ``my_module:MyOptimizer``. Weight decay, clipping and what stands still are no part of a
    rule: see :class:`Update`.

    Attributes
    ----------
    decoupled : whether weight decay shrinks the vectors themselves (as AdamW's), instead of being added to gradients.
    per_sample : whether it asks for the gradient of each sample's loss, to clip it or to add noise: they go through
        `reduce` and `finish`, which give the gradient that `step_` is given. The network can have no batch norm.
    """

    decoupled: ClassVar[bool] = False
    per_sample: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        dataclass(frozen=True, kw_only=True)(cls)

    @property
    def plain(self) -> bool:
        """Whether a step is ``theta - lr * grad`` and nothing else; the engine then leaves `step_` out."""
        return False

    def init(self, theta: Tensor) -> Memory:
        """What it remembers before the first step of vectors ``theta[..., P]``: nothing, if not overridden.

        Every tensor has the leading axes of `theta` and one more, so that a part of the rows is stepped with a part of
        the memory: ``[..., P]``, or ``[..., 1]`` for a number a row.
        """
        return {}

    def reduce(self, gradients: Tensor, weight: Tensor) -> Tensor:
        """Of ``gradients[..., n, P]`` of some of a batch's samples, the sum ``[..., P]``, by ``weight[..., n]``.

        So many come at a time as there is memory for; the results are added up. Samples of weight 0 are padding. What
        stands still has gradients of 0.
        """
        return (gradients * weight[..., None]).sum(-2)

    def finish(self, total: Tensor, count: Tensor, draws: Draws) -> Tensor:
        """A batch's gradient ``[..., P]`` from the `total` of what `reduce` gave, of ``count[..., 1]`` samples."""
        return total / count.clamp_min(1)

    def step_(self, theta: Tensor, grad: Tensor, memory: Memory, lr: float) -> None:
        """Move ``theta[..., P]`` in place, down `grad` of the same shape; `memory` and `grad` are overwritten."""
        raise NotImplementedError(f"{type(self).__name__} does not say how it steps: define step_.")


LocalOptimizer = dataclass(frozen=True, kw_only=True)(LocalOptimizer)  # type: ignore[misc]
