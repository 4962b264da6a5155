"""Steps down gradients that come tensor by tensor, or sample by sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from raypfl.models.flat import FlatModel
from raypfl.optimizers import Draws, Memory, Update

ROOM = 2**24
"""Numbers of single samples' gradients that a group holds at a time; of one sample a client at least."""


class Descent:
    """Steps of ``theta[..., P]``, which gradients reach tensor by tensor.

    Parameters
    ----------
    tensors : views of `theta`, leaves by segment.
    gradient : of `theta`'s shape, or None where none is needed; :meth:`buffer` makes it.
    memory : of the optimizer.
    correction : of `theta`'s shape, or None; added to every gradient.
    """

    def __init__(
        self,
        model: FlatModel,
        update: Update,
        theta: Tensor,
        tensors: Sequence[Tensor],
        gradient: Tensor | None,
        memory: Memory,
        correction: Tensor | None = None,
    ):
        self.update = update
        self.theta = theta
        self.tensors = tensors
        self.gradient = gradient
        self.memory = memory
        self.correction = correction
        self.views = [] if gradient is None else segments(model, gradient)

    @staticmethod
    def buffer(update: Update, like: Tensor) -> Tensor | None:
        """A gradient for vectors `like` these, where `update` needs one."""
        return None if update.plain else torch.zeros_like(like)

    def step(self, grads: Sequence[Tensor | None], direct: Tensor | None) -> None:
        """Step down the gradients of `tensors`, and the `direct` one of `theta`; None stands for zero."""
        with torch.no_grad():
            if self.correction is not None:
                direct = self.correction if direct is None else direct + self.correction
            if self.gradient is None:
                self._descend(grads, direct)
            else:
                assemble(self.views, grads, direct, into=self.gradient)
                self.update.step_(self.theta, self.gradient, self.memory)

    def step_whole(self, gradient: Tensor) -> None:
        """Step down a gradient of `theta`'s shape, which is overwritten."""
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
    """Put the gradients of a vector's segments into `views` of a flat one, and add the vector's own."""
    for view, g in zip(views, grads, strict=True):
        view.zero_() if g is None else view.copy_(g)
    if direct is not None:
        into.add_(direct)


def by_samples(
    update: Update, at: Tensor, weight: Tensor, keys: Tensor, rows: Callable[[int, int], tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor]:
    """The gradient ``[..., P]`` that an optimizer makes of those of single samples, and the mean of what is reported.

    Parameters
    ----------
    at : ``[..., P]``. weight : ``[..., b]`` of the samples. keys : ``int64[...]``, of the step's draws.
    rows : ``rows(start, stop)`` gives gradients ``[..., n, P]`` and what is reported ``[..., n]`` of these samples.
    """
    optimizer, count = update.optimizer, weight.sum(-1, keepdim=True)
    total, reported = torch.zeros_like(at), torch.zeros_like(weight[..., 0])
    many, each = weight.shape[-1], max(1, ROOM // at.numel())
    with torch.no_grad():
        for start in range(0, many, each):
            with torch.enable_grad():
                gradients, values = rows(start, min(start + each, many))
            if update.trained is not None:
                gradients.mul_(update.trained)
            mine = weight[..., start : start + each]
            total += optimizer.reduce(gradients, mine)
            reported += (values * mine).sum(-1)
        return optimizer.finish(total, count, Draws(keys, at)), reported / count.squeeze(-1).clamp_min(1)


def sample_keys(keys: Tensor, start: int, stop: int) -> Tensor:
    """``int64[..., n]``: of the draws of single samples in a step whose keys are ``int64[...]``."""
    return (keys * 6364136223846793005)[..., None] + torch.arange(start, stop, device=keys.device)


def still_segments(model: FlatModel, update: Update) -> frozenset[str]:
    """Segments of which no entry moves. No gradient of theirs is computed, nor of what only they need."""
    if update.trained is None:
        return frozenset()
    parts = model.unflatten(update.trained)
    return frozenset(name for name in model.parameter_names if not bool(parts[name].any()))


def gradients_of(
    value: Tensor, tensors: Sequence[Tensor], theta: Tensor
) -> tuple[Sequence[Tensor | None], Tensor | None]:
    """Gradients of `value` for its leaves `tensors` and `theta`: None for what it does not use or what stands still."""
    if not value.requires_grad:
        return [None] * len(tensors), None
    moving = [t for t in tensors if t.requires_grad]
    *found, direct = torch.autograd.grad(value, [*moving, theta], allow_unused=True)
    if len(moving) == len(tensors):
        return found, direct
    rest = iter(found)
    return [next(rest) if t.requires_grad else None for t in tensors], direct
