"""Gradient steps from gradients of segments, or of single samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from raypfl.learning.loss import LocalLoss
from raypfl.learning.optimizers import Memory, StepDraws, Update
from raypfl.learning.optimizers.base import add_scaled_
from raypfl.models.flat import FlatModel
from raypfl.models.rows import empty_rows

MAX_GRADIENT_NUMBERS = 2**24
"""Most numbers in a group's per-sample gradients at a time; each client always computes at least one sample's."""


class Descent:
    """Gradient steps that update ``theta[..., P]`` in place.

    Parameters
    ----------
    tensors : views of `theta`, a leaf per segment.
    correction : a tensor of `theta`'s shape that is added to every gradient; None: none.
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
        self._gradient = None if update.plain else empty_rows(theta.shape, theta)
        self._views = [] if self._gradient is None else segments(model, self._gradient)

    @property
    def gradients(self) -> list[Tensor]:
        """The memory for gradients and its segments; empty if a step needs none."""
        return [] if self._gradient is None else [self._gradient, *self._views]

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
        tensors = []
        gradients = []
        for tensor, gradient in zip(self.tensors, grads, strict=True):
            if gradient is not None:
                tensors.append(tensor)
                gradients.append(gradient)
        rate = self.update.rate
        if isinstance(rate, Tensor):
            for tensor, gradient in zip(tensors, gradients, strict=True):
                rate_of_segment = rate.view(-1, *[1] * (tensor.dim() - 1))
                add_scaled_(tensor, gradient, -rate_of_segment)
        elif tensors:
            torch._foreach_add_(tensors, gradients, alpha=-rate)
        if direct is not None:
            add_scaled_(self.theta, direct, -rate)


def segments(model: FlatModel, flat: Tensor) -> list[Tensor]:
    """Return views of parameters ``[..., P]``, segment by segment."""
    return list(model.unflatten(flat).values())


def assemble(views: Sequence[Tensor], grads: Sequence[Tensor | None], direct: Tensor | None, *, into: Tensor) -> None:
    """Write the gradients of segments into the `views` of a flat gradient, and add the `direct` one."""
    for view, gradient in zip(views, grads, strict=True):
        if gradient is None:
            view.zero_()
        else:
            view.copy_(gradient)
    if direct is not None:
        into.add_(direct)


def gradient_by_sample(
    update: Update,
    at: Tensor,
    weight: Tensor,
    keys: Tensor,
    gradients_of_samples: Callable[[int, int], tuple[Tensor, Tensor]],
) -> tuple[Tensor, Tensor]:
    """Return the gradient ``[..., P]`` by the update's rule for samples, and the mean reported loss ``[...]``.

    Parameters
    ----------
    at : the parameters, ``[..., P]``.
    weight : the samples' weights, ``[..., b]``.
    keys : the keys of the step's draws, ``int64[...]``.
    gradients_of_samples : the function ``(start, stop)`` that returns gradients ``[..., n, P]`` and reported losses
        ``[..., n]`` of these samples.
    """
    rule = update.sample_rule
    assert rule is not None
    count = weight.sum(-1, keepdim=True)
    total = torch.zeros_like(at)
    reported = torch.zeros_like(count[..., 0])

    # All per-sample gradients at once might not fit into memory.
    num_samples = weight.shape[-1]
    chunk = max(1, MAX_GRADIENT_NUMBERS // at.numel())
    with torch.no_grad():
        for start in range(0, num_samples, chunk):
            with torch.enable_grad():
                gradients, losses = gradients_of_samples(start, min(start + chunk, num_samples))
            if update.trained is not None:
                gradients.mul_(update.trained)
            chunk_weight = weight[..., start : start + chunk]
            total += rule.reduce(gradients, chunk_weight)
            reported += (losses * chunk_weight).sum(-1)

        gradient = rule.finish(total, count, StepDraws(keys, at))
        return gradient, reported / count.squeeze(-1).clamp_min(1)


def sample_keys(keys: Tensor, start: int, stop: int) -> Tensor:
    """Derive keys of single samples, ``int64[..., n]``, from the step's keys ``int64[...]``."""
    return (keys * 6364136223846793005)[..., None] + torch.arange(start, stop, device=keys.device)


def frozen_segments(model: FlatModel, update: Update) -> frozenset[str]:
    """Return names of the segments without a trained entry, whose gradients need not be computed."""
    if update.trained is None:
        return frozenset()
    # One transfer from a GPU, not one for each segment.
    trained = model.unflatten(update.trained.cpu())
    return frozenset(name for name in model.parameter_names if not bool(trained[name].any()))


def gradients_of(
    loss: LocalLoss, value: Tensor, reported: Tensor, tensors: Sequence[Tensor], theta: Tensor
) -> tuple[Sequence[Tensor | None], Tensor | None]:
    """Gradients of a loss's `value` for `tensors` and `theta`; None for unused tensors and for frozen ones.

    If there is none although something is trained, the user is warned of the loss.
    """
    trained = [tensor for tensor in tensors if tensor.requires_grad]
    all_are_frozen = bool(tensors) and not trained
    if not all_are_frozen and loss.lacks_gradient(value, reported):
        loss.warn_of_no_gradient()
    if not value.requires_grad:
        return [None] * len(tensors), None

    all_gradients: Sequence[Tensor | None] = torch.autograd.grad(value, [*trained, theta], allow_unused=True)
    *gradients, direct = all_gradients
    if not all_are_frozen and all(gradient is None for gradient in all_gradients):
        loss.warn_of_no_gradient()
    if len(trained) == len(tensors):
        return gradients, direct

    remaining = iter(gradients)
    return [next(remaining) if tensor.requires_grad else None for tensor in tensors], direct
