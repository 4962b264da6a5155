"""The base class of local optimizers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, dataclass_transform

from torch import Tensor

from raypfl.common.registry import Registry
from raypfl.optimizers.draws import Draws

OPTIMIZERS = Registry("optimizer")

Memory = dict[str, Tensor]
"""An optimizer's state between steps, by name."""


@dataclass_transform(frozen_default=True, kw_only_default=True)
class LocalOptimizer:
    """An update rule on flat vectors: a frozen dataclass of its hyperparameters, without the learning rate.

    Subclasses become dataclasses automatically. An optimizer of your own overrides `step_` and, if it has a state,
    `init`; name it as ``my_module:MyOptimizer``. Weight decay, clipping and frozen entries are not part of the rule:
    see :class:`Update`.

    Attributes
    ----------
    decoupled : whether weight decay shrinks the vectors directly (as in AdamW) and is not added to gradients.
    per_sample : whether the optimizer needs the gradient of each sample's loss, to clip it or to add noise. `reduce`
        and `finish` then compute the gradient that `step_` gets. The network cannot have batch norm.
    """

    decoupled: ClassVar[bool] = False
    per_sample: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        dataclass(frozen=True, kw_only=True)(cls)

    @property
    def plain(self) -> bool:
        """Whether a step is exactly ``theta - lr * grad``; the engine then does not call `step_`."""
        return False

    def init(self, theta: Tensor) -> Memory:
        """The state before the first step of vectors ``theta[..., P]``; by default empty.

        Every tensor has the leading axes of `theta` and one more, ``[..., P]`` or ``[..., 1]``, so that some of the
        rows can take a step with their part of the state.
        """
        return {}

    def reduce(self, gradients: Tensor, weight: Tensor) -> Tensor:
        """The sum ``[..., P]`` of ``gradients[..., n, P]`` of some of a batch's samples, with ``weight[..., n]``.

        It is called with as many samples as memory allows, and the results are added. Samples of weight 0 are padding.
        Gradients of frozen entries are 0.
        """
        return (gradients * weight[..., None]).sum(-2)

    def finish(self, total: Tensor, count: Tensor, draws: Draws) -> Tensor:
        """A batch's gradient ``[..., P]`` from the `total` of `reduce` over ``count[..., 1]`` samples."""
        return total / count.clamp_min(1)

    def step_(self, theta: Tensor, grad: Tensor, memory: Memory, lr: float) -> None:
        """Update ``theta[..., P]`` in place with `grad` of the same shape; overwrites `memory` and `grad`."""
        raise NotImplementedError(f"{type(self).__name__} is not complete: define step_.")


LocalOptimizer = dataclass(frozen=True, kw_only=True)(LocalOptimizer)  # type: ignore[misc]
