"""Sets of images on which gradient descent follows a trajectory of models (Cazenavette et al. 2022)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, vmap
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from raypfl.models.flat import FlatModel

MOMENTUM = 0.5
"""Momentum of the updates of images and step sizes, as in the authors' code."""

STEP_SIZE_RANGE = (1e-4, 1.0)
"""Range of a learned step size, which must not change its sign."""


class Matched(NamedTuple):
    """Result of matching K sets of images.

    Attributes
    ----------
    images, step_size : ``[K, n, ...]`` and ``[K]``, the last ones with a finite loss.
    first, last : ``[K]``, the loss before and after matching.
    ok : ``bool[K]``; False: the trajectory does not move, or the very first loss or gradient was not finite.
    """

    images: Tensor
    step_size: Tensor
    first: Tensor
    last: Tensor
    ok: Tensor


@dataclass(frozen=True)
class StudentTrajectory:
    """Plain gradient descent of K models, each on all images of its own set, in evaluation mode.

    Attributes
    ----------
    labels : ``int64[n]``, the classes of the images.
    checkpointing : compute the steps again for an unrolled gradient, instead of storing them.
    """

    model: FlatModel
    labels: Tensor
    steps: int
    checkpointing: bool = False

    def __call__(self, start: Tensor, images: Tensor, step_size: Tensor, unrolled: bool = False) -> Tensor:
        """Return the models ``[K, P]`` at the end of the trajectories.

        Parameters
        ----------
        start : ``[K, P]``, the models at the start.
        images : ``[K, n, ...]``.
        step_size : ``[K]``.
        unrolled : give the result a gradient, which goes through all steps.
        """
        w = start.detach().clone().requires_grad_()
        for _ in range(self.steps):
            if unrolled and self.checkpointing:
                w = checkpoint(self._step, w, images, step_size, True, use_reentrant=False)
            else:
                w = self._step(w, images, step_size, unrolled)
        return w if unrolled else w.detach()

    def distance(self, images: Tensor, step_size: Tensor, start: Tensor, end: Tensor, unrolled: bool = False) -> Tensor:
        """Return the matching loss ``[K]``: ``||w_R - end||^2 / ||start - end||^2`` for the trajectories' ends w_R."""
        initial = (end - start).square().sum(1)
        remaining = (self(start, images, step_size, unrolled) - end).square().sum(1)
        return remaining / torch.where(initial > 0, initial, 1)

    def _step(self, w: Tensor, images: Tensor, step_size: Tensor, unrolled: bool) -> Tensor:
        # The mode is set here because a checkpointed step is computed again during the backward pass.
        with torch.enable_grad(), self.model.mode(train=False):
            losses = vmap(self._loss)(w, images) if len(w) > 1 else self._loss(w[0], images[0])
            (gradient,) = torch.autograd.grad(losses.sum(), w, create_graph=unrolled)
            stepped = w - step_size[:, None] * gradient
        return stepped if unrolled else stepped.detach().requires_grad_()

    def _loss(self, w: Tensor, images: Tensor) -> Tensor:
        return F.cross_entropy(self.model(w, images), self.labels)


def match(
    trajectory: StudentTrajectory,
    images: Tensor,
    step_size: Tensor,
    start: Tensor,
    end: Tensor,
    image_lr: float,
    step_lr: float,
    steps: Iterable[int],
) -> Matched:
    """Learn K sets of images and their step sizes, so that descent on each set leads from its start to its end.

    A set whose loss or gradient is no longer finite keeps its last good values. No argument changes.

    Parameters
    ----------
    images, step_size, start : as in :meth:`StudentTrajectory.__call__`.
    end : ``[K, P]``.
    image_lr, step_lr : the learning rates of the images and of the step sizes.
    steps : the numbers of the steps, from 0.
    """
    alive = (end - start).square().sum(1) > 0
    ok = torch.zeros_like(alive)
    first = last = start.new_full((len(start),), torch.nan)

    # Pairs of images and step sizes: the last ones with a finite loss, and those to try next.
    good = candidate = images, step_size
    velocity = torch.zeros_like(images), torch.zeros_like(step_size)
    for step in steps:
        x, beta = (tensor.detach().requires_grad_() for tensor in candidate)
        loss = trajectory.distance(x, beta, start, end, unrolled=True)
        x_gradient, beta_gradient = torch.autograd.grad(loss.sum(), (x, beta))

        alive = alive & torch.isfinite(loss.detach() + x_gradient.flatten(1).sum(1) + beta_gradient)
        last = torch.where(alive, loss.detach(), last)
        if step == 0:
            first = last
            ok = alive
        good = _where(alive, candidate, good)

        velocity = MOMENTUM * velocity[0] + x_gradient, MOMENTUM * velocity[1] + beta_gradient
        moved = good[0] - image_lr * velocity[0]
        moved_step_size = (good[1] - step_lr * velocity[1]).clamp(*STEP_SIZE_RANGE)
        candidate = _where(alive, (moved, moved_step_size), good)

    loss = trajectory.distance(*candidate, start, end)
    alive = alive & torch.isfinite(loss)
    return Matched(*_where(alive, candidate, good), first, torch.where(alive, loss, last), ok)


def _where(alive: Tensor, new: tuple[Tensor, Tensor], old: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the new images and step sizes of the sets that are alive, the old ones of the others."""
    rows = alive.reshape(-1, *[1] * (new[0].dim() - 1))
    return torch.where(rows, new[0], old[0]), torch.where(alive, new[1], old[1])
