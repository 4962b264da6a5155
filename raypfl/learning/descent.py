"""Steps down gradients that come segment by segment, or sample by sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from raypfl.learning.optimizers import Memory, StepDraws, Update
from raypfl.models.flat import FlatModel

ROOM = 2**24
"""Numbers in the per-sample gradients that a group holds at a time, of one sample per client at least."""


class Descent:
    """Steps of ``theta[..., P]`` in place, down gradients that come segment by segment.

    Parameters
    ----------
    tensors : views of `theta`, a leaf per segment.
    memory : of the optimizer.
    correction : of `theta`'s shape, added to every gradient; or None.
    """

    def __init__(
        self,
        model: FlatModel,
        update: Update,
        theta: Tensor,
        tensors: Sequence[Tensor],
        memory: Memory,
        correction: Tensor | None = None,
    ):
        self.update = update
        self.theta = theta
        self.tensors = tensors
        self.memory = memory
        self.correction = correction
        self._gradient = None if update.plain else torch.empty_like(theta)
        self._views = [] if self._gradient is None else segments(model, self._gradient)

    def step(self, grads: Sequence[Tensor | None], direct: Tensor | None) -> None:
        """Step down the gradients of `tensors` plus the `direct` one of `theta`; None is zero."""
        with torch.no_grad():
            if self.correction is not None:
                direct = self.correction if direct is None else direct + self.correction
            if self._gradient is None:
                self._descend(grads, direct)
            else:
                assemble(self._views, grads, direct, into=self._gradient)
                self.update.step_(self.theta, self._gradient, self.memory)

    def step_whole(self, gradient: Tensor) -> None:
        """Step down a gradient of `theta`'s shape; it is overwritten."""
        with torch.no_grad():
            if self.correction is not None:
                gradient.add_(self.correction)
            self.update.step_(self.theta, gradient, self.memory)

    def _descend(self, grads: Sequence[Tensor | None], direct: Tensor | None) -> None:
        moved = [(t, g) for t, g in zip(self.tensors, grads, strict=True) if g is not None]
        if moved:
            torch._foreach_add_([t for t, _ in moved], [g for _, g in moved], alpha=-self.update.lr)
        if direct is not None:
            self.theta.sub_(direct, alpha=self.update.lr)


def segments(model: FlatModel, flat: Tensor) -> list[Tensor]:
    """Views of parameters ``[..., P]``, segment by segment."""
    return list(model.unflatten(flat).values())


def assemble(views: Sequence[Tensor], grads: Sequence[Tensor | None], direct: Tensor | None, *, into: Tensor) -> None:
    """Write the gradients of segments into the `views` of a flat gradient, and add the `direct` one."""
    for view, g in zip(views, grads, strict=True):
        view.zero_() if g is None else view.copy_(g)
    if direct is not None:
        into.add_(direct)


def by_samples(
    update: Update, at: Tensor, weight: Tensor, keys: Tensor, rows: Callable[[int, int], tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor]:
    """The gradient ``[..., P]`` that an update makes of per-sample gradients, and the mean of what is reported.

    Parameters
    ----------
    at : ``[..., P]``. weight : ``[..., b]`` of the samples. keys : ``int64[...]``, of the step's draws.
    rows : ``rows(start, stop)`` gives gradients ``[..., n, P]`` and reported losses ``[..., n]`` of these samples.
    """
    rule, count = update.sample_rule, weight.sum(-1, keepdim=True)
    assert rule is not None
    total, reported = torch.zeros_like(at), torch.zeros_like(weight[..., 0])
    many, each = weight.shape[-1], max(1, ROOM // at.numel())
    with torch.no_grad():
        for start in range(0, many, each):
            with torch.enable_grad():
                gradients, values = rows(start, min(start + each, many))
            if update.trained is not None:
                gradients.mul_(update.trained)
            mine = weight[..., start : start + each]
            total += rule.reduce(gradients, mine)
            reported += (values * mine).sum(-1)
        return rule.finish(total, count, StepDraws(keys, at)), reported / count.squeeze(-1).clamp_min(1)


def sample_keys(keys: Tensor, start: int, stop: int) -> Tensor:
    """``int64[..., n]``: keys of single samples, from the step's keys ``int64[...]``."""
    return (keys * 6364136223846793005)[..., None] + torch.arange(start, stop, device=keys.device)


def still_segments(model: FlatModel, update: Update) -> frozenset[str]:
    """Segments in which no entry moves, so that their gradients need not be computed."""
    if update.trained is None:
        return frozenset()
    parts = model.unflatten(update.trained)
    return frozenset(name for name in model.parameter_names if not bool(parts[name].any()))


def gradients_of(
    value: Tensor, tensors: Sequence[Tensor], theta: Tensor
) -> tuple[Sequence[Tensor | None], Tensor | None]:
    """Gradients of `value` for `tensors` and `theta`; None for what it does not use and what does not move."""
    if not value.requires_grad:
        return [None] * len(tensors), None
    moving = [t for t in tensors if t.requires_grad]
    *found, direct = torch.autograd.grad(value, [*moving, theta], allow_unused=True)
    if len(moving) == len(tensors):
        return found, direct
    rest = iter(found)
    return [next(rest) if t.requires_grad else None for t in tensors], direct
