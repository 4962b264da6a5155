"""The base class of local optimizers, and a step of local training: clipping, weight decay, the optimizer's rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from raypfl.common import device_rng
from raypfl.common.component import Component
from raypfl.common.errors import IncompleteError, MethodError
from raypfl.common.registry import Registry
from raypfl.common.user_code import refuse_result, where_defined

OPTIMIZERS = Registry("optimizer")

_NOISE = 0x6E6F697365
"""Sets the keys of noise apart from those of a network's dropout."""

Memory = dict[str, Tensor]
"""An optimizer's state between steps, by name."""

Number = float | Tensor
"""A number of a step: one for all vectors, or one for each, ``float64[..., 1]``."""


def add_scaled_(target: Tensor, added: Tensor, number: Number) -> None:
    """Add ``number * added`` to `target` in place, as ``target.add_(added, alpha=number)`` rounds it."""
    if isinstance(number, Tensor):
        # addcmul_ rounds once; a product that is added afterwards would be rounded twice.
        target.addcmul_(added, number.to(target.dtype))
    else:
        target.add_(added, alpha=number)


@dataclass(frozen=True)
class StepDraws:
    """Random numbers for an optimizer's step, which depend on the client and the step only.

    Attributes
    ----------
    keys : a key for each vector, ``int64[...]``; on the device of `like`, or one key in the host's memory.
    like : a tensor ``[..., P]`` with the shape, device and dtype of the draws.
    """

    keys: Tensor
    like: Tensor

    def normal(self) -> Tensor:
        """Return standard normal numbers ``[..., P]``; every call returns the same ones.

        On a GPU they are other numbers than on the CPU, and drawn without waiting for it.
        """
        if self.like.device.type != "cpu":
            return device_rng.normal(self.keys ^ _NOISE, self.like)
        # Not tolist(), which a recording of the step would not see.
        rows = [self._row(int(key)) for key in self.keys.reshape(-1)]
        return torch.stack(rows).reshape(self.like.shape)

    def _row(self, key: int) -> Tensor:
        generator = torch.Generator(self.like.device).manual_seed(key ^ _NOISE)
        return torch.randn(self.like.shape[-1], generator=generator, dtype=self.like.dtype, device=self.like.device)


class LocalOptimizer(Component):
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

    section: ClassVar[str] = "The optimizer's "

    decoupled: ClassVar[bool] = False
    per_sample: ClassVar[bool] = False

    @property
    def plain(self) -> bool:
        """Whether a step is exactly ``theta - lr * grad``; the engine then does not call `step_`."""
        return False

    @property
    def takes_rates(self) -> bool:
        """Whether `step_` also takes a learning rate for each vector, ``float64[..., 1]``, to the same bits."""
        return False

    def init(self, theta: Tensor) -> Memory:
        """Return the memory before the first step of vectors ``theta[..., P]``; by default empty.

        Every tensor has the leading axes of `theta` and one more, ``[..., P]`` or ``[..., 1]``, so that some of the
        rows can take a step with their part of the memory.
        """
        return {}

    def reduce(self, gradients: Tensor, weight: Tensor) -> Tensor:
        """Return the sum ``[..., P]`` of ``gradients[..., n, P]`` of some of a batch's samples, ``weight[..., n]``.

        It is called with as many samples as memory allows, and the results are added. Samples of weight 0 are padding.
        Gradients of frozen entries are 0.
        """
        return (gradients * weight[..., None]).sum(-2)

    def finish(self, total: Tensor, count: Tensor, draws: StepDraws) -> Tensor:
        """Return a batch's gradient ``[..., P]`` from the `total` of `reduce` over ``count[..., 1]`` samples."""
        return total / count.clamp_min(1)

    def step_(self, theta: Tensor, grad: Tensor, memory: Memory, lr: float) -> None:
        """Update ``theta[..., P]`` in place with `grad` of the same shape; overwrites `memory` and `grad`."""
        raise IncompleteError(f"{type(self).__name__} is not complete: define step_.")


def refuse_unusable_rule(optimizer: object, lr: object) -> None:
    """Raise a MethodError unless a method passes an optimizer and one learning rate, or None."""
    if optimizer is not None and not isinstance(optimizer, LocalOptimizer):
        kind = f"the class {optimizer.__name__}" if isinstance(optimizer, type) else f"a {type(optimizer).__name__}"
        raise MethodError(
            f"The optimizer of a training is {kind}; it must be an object such as Adam(), from "
            "raypfl.learning.optimizers or of a subclass of LocalOptimizer."
        )

    is_number = isinstance(lr, Real) or (isinstance(lr, Tensor) and lr.dim() == 0)
    if lr is not None and not is_number:
        kind = f"a tensor of shape {list(lr.shape)}" if isinstance(lr, Tensor) else f"a {type(lr).__name__}"
        raise MethodError(f"The learning rate lr of a training is {kind}; it must be one number for all clients.")


class SampleRule(Protocol):
    """A rule that combines per-sample gradients to a batch's gradient; see :class:`LocalOptimizer`."""

    def reduce(self, gradients: Tensor, weight: Tensor) -> Tensor:
        """See :meth:`LocalOptimizer.reduce`."""

    def finish(self, total: Tensor, count: Tensor, draws: StepDraws) -> Tensor:
        """See :meth:`LocalOptimizer.finish`."""


Perturb = Callable[[Tensor, Tensor], Tensor]
"""A function ``perturb(theta, gradient)`` of vectors ``[..., P]``: the offset from `theta` at which a step takes its
gradient."""


@dataclass(frozen=True)
class Update:
    """A local optimizer's step at a learning rate, with clipping, weight decay and frozen entries.

    The order is that of PyTorch loops: gradients of frozen entries are set to 0, the rest is clipped as by
    ``clip_grad_norm_``, weight decay is added, and the optimizer takes its step.

    Attributes
    ----------
    clip_norm : the largest norm of a gradient; None: no clipping.
    trained : the entries that are trained, ``bool[P]``; None: all.
    decayed : the entries with weight decay, ``bool[P]``; None: all trained ones.
    rule : a rule that combines per-sample gradients; None: the optimizer's, if it needs them.
    perturb : where the gradient of a step is taken, see `Perturb`; None: at the model itself.
    by_row : numbers of which each vector has its own, ``float64[..., 1]``, in place of the attributes of these names:
        `lr`, `weight_decay`, `clip_norm`.
    """

    optimizer: LocalOptimizer
    lr: float
    weight_decay: float = 0.0
    clip_norm: float | None = None
    trained: Tensor | None = None
    decayed: Tensor | None = None
    rule: SampleRule | None = None
    perturb: Perturb | None = None
    by_row: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def rate(self) -> Number:
        """The learning rate, or that of each vector."""
        return self.by_row.get("lr", self.lr)

    @property
    def sample_rule(self) -> SampleRule | None:
        """The rule that combines per-sample gradients; None: the step needs none."""
        if self.rule is not None:
            return self.rule
        return self.optimizer if self.optimizer.per_sample else None

    @property
    def separates_penalty(self) -> bool:
        """Whether a penalty that does not depend on the batch is differentiated apart from the batch's loss."""
        return self.sample_rule is not None or self.perturb is not None

    @property
    def plain(self) -> bool:
        """Whether a step is exactly ``theta - lr * grad``."""
        unmodified = self.weight_decay == 0 and self.clip_norm is None and self.trained is None
        return unmodified and self.optimizer.plain and self.sample_rule is None

    def of_rows(self, rows: slice | Tensor) -> Update:
        """Return the update of some of the vectors."""
        if not self.by_row:
            return self
        return replace(self, by_row={name: numbers[rows] for name, numbers in self.by_row.items()})

    def init(self, theta: Tensor) -> Memory:
        """Return the optimizer's memory before the first step of ``theta[..., P]``."""
        memory = self.optimizer.init(theta)
        tensors = list(memory.values()) if isinstance(memory, dict) else [None]
        if not all(isinstance(rows, Tensor) and rows.shape[:-1] == theta.shape[:-1] and rows.dim() for rows in tensors):
            must_return = "a dict of tensors [..., P] or [..., 1], with the leading axes of theta"
            refuse_result(self.optimizer.init, memory, must_return)
        return memory

    def perturbed(self, theta: Tensor, gradient: Tensor) -> Tensor:
        """Return where a step's gradient is taken, given the one at ``theta[..., P]``; frozen entries do not count."""
        assert self.perturb is not None
        with torch.no_grad():
            if self.trained is not None:
                gradient = gradient * self.trained
            return theta + self.perturb(theta, gradient)

    def step_(self, theta: Tensor, grad: Tensor, memory: Memory) -> None:
        """Update ``theta[..., P]`` in place; overwrites `grad` (same shape) and `memory`."""
        if self.trained is not None:
            grad.mul_(self.trained)

        if self.clip_norm is not None:
            norm = grad.norm(dim=-1, keepdim=True)
            clip_norm: Number = self.clip_norm
            if "clip_norm" in self.by_row:
                clip_norm = self.by_row["clip_norm"].to(norm.dtype)
            # PyTorch computes number / tensor as reciprocal() * number; the same here gives tensors the same bits.
            factor = (norm + 1e-6).reciprocal() * clip_norm
            grad.mul_(factor.clamp_max(1.0))

        if self.weight_decay:
            mask = self.trained if self.decayed is None else self.decayed
            decayed = theta if mask is None else theta * mask
            weight_decay = self.by_row.get("weight_decay", self.weight_decay)
            if self.optimizer.decoupled:
                add_scaled_(theta, decayed, -self.rate * weight_decay)
            else:
                add_scaled_(grad, decayed, weight_decay)

        # Typed Any: only optimizers with `takes_rates` get a tensor.
        rate: Any = self.rate
        before = dict(memory)
        # Typed Any: a rule of one's own may return something.
        returned: Any = self.optimizer.step_(theta, grad, memory, rate)  # type: ignore[func-returns-value]
        if returned is not None and returned is not theta:
            refuse_result(self.optimizer.step_, returned, "nothing, and change theta in place")

        if memory.keys() != before.keys():
            changed_name = min(memory.keys() ^ before.keys())
            raise MethodError(
                f"{where_defined(self.optimizer.step_)} adds or removes {changed_name!r} in the memory, which must "
                "keep the names that init(self, theta) returns."
            )
        # The memory may be views of the rows of some clients, so a new tensor in it would be lost. Cloned first, since
        # the new tensor of one name may be the old one of another.
        replaced = {name: memory[name].clone() for name, rows in before.items() if memory[name] is not rows}
        for name, rows in replaced.items():
            memory[name] = before[name].copy_(rows)
