"""What a local optimizer is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, dataclass_transform

from torch import Tensor

from raypfl.registry import Registry

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
    """

    decoupled: ClassVar[bool] = False

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

    def step_(self, theta: Tensor, grad: Tensor, memory: Memory, lr: float) -> None:
        """Move ``theta[..., P]`` in place, down `grad` of the same shape; `memory` and `grad` are overwritten."""
        raise NotImplementedError(f"{type(self).__name__} does not say how it steps: define step_.")


LocalOptimizer = dataclass(frozen=True, kw_only=True)(LocalOptimizer)  # type: ignore[misc]
