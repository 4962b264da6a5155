"""Sets of images on which gradient descent takes the way of a trajectory of models (Cazenavette et al. 2022)."""

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
"""Of the steps of images and step sizes."""

LIMITS = (1e-4, 1.0)
"""Of a learned step size, which must not change its sign."""


class Step(NamedTuple):
    """Learning rates of one matching step: of the images, and of the step size."""

    images: float
    step_size: float


class Matched(NamedTuple):
    """What K clients' matching found.

    Attributes
    ----------
    images, step_size : ``[K, n, ...]`` and ``[K]``, the last ones whose loss is a finite number.
    first, last : ``[K]``, the loss before and after.
    ok : ``bool[K]``; False: the trajectory goes nowhere, or already the first loss or gradient was not finite.
    """

    images: Tensor
    step_size: Tensor
    first: Tensor
    last: Tensor
    ok: Tensor


@dataclass(frozen=True)
class Path:
    """Plain gradient descent of K models, each on all images of its own set, in evaluation mode.

    Attributes
    ----------
    labels : ``int64[n]``, the classes of the images.
    steps : how many.
    checkpointing : whether the steps are computed again for an unrolled gradient, in place of being stored.
    """

    model: FlatModel
    labels: Tensor
    steps: int
    checkpointing: bool = False

    def __call__(self, start: Tensor, images: Tensor, step_size: Tensor, unrolled: bool = False) -> Tensor:
        """The models ``[K, P]`` at the end of the paths.

        Parameters
        ----------
        start : ``[K, P]``. images : ``[K, n, ...]``. step_size : ``[K]``.
        unrolled : whether the result has a gradient, which goes through all steps.
        """
        w = start.detach().clone().requires_grad_()
        for _ in range(self.steps):
            if unrolled and self.checkpointing:
                w = checkpoint(self._step, w, images, step_size, True, use_reentrant=False)
            else:
                w = self._step(w, images, step_size, unrolled)
        return w if unrolled else w.detach()

    def distance(self, images: Tensor, step_size: Tensor, start: Tensor, end: Tensor, unrolled: bool = False) -> Tensor:
        """The matching loss ``[K]``: the squared distance of the paths' ends to `end`, relative to that of `start`."""
        whole = (end - start).square().sum(1)
        rest = (self(start, images, step_size, unrolled) - end).square().sum(1)
        return rest / torch.where(whole > 0, whole, 1)

    def _step(self, w: Tensor, images: Tensor, step_size: Tensor, unrolled: bool) -> Tensor:
        # The mode is set here, since a checkpointed step is computed again during the backward pass.
        with torch.enable_grad(), self.model.mode(train=False):
            losses = vmap(self._loss)(w, images) if len(w) > 1 else self._loss(w[0], images[0])
            (slope,) = torch.autograd.grad(losses.sum(), w, create_graph=unrolled)
            moved = w - step_size[:, None] * slope
        return moved if unrolled else moved.detach().requires_grad_()

    def _loss(self, w: Tensor, images: Tensor) -> Tensor:
        return F.cross_entropy(self.model(w, images), self.labels)


def match(path: Path, images: Tensor, step_size: Tensor, start: Tensor, end: Tensor, steps: Iterable[Step]) -> Matched:
    """Learn K sets of images and their step sizes, so that the path on each set leads from its start to its end.

    The arguments are as in :meth:`Path.__call__`; `end` is ``[K, P]``. None of them changes.
    """
    alive = (end - start).square().sum(1) > 0
    first = last = start.new_full((len(start),), torch.nan)
    kept = learned = images, step_size
    velocity = torch.zeros_like(images), torch.zeros_like(step_size)
    ok = torch.zeros_like(alive)
    for s, step in enumerate(steps):
        x, rate = (part.detach().requires_grad_() for part in learned)
        loss = path.distance(x, rate, start, end, unrolled=True)
        slopes = torch.autograd.grad(loss.sum(), (x, rate))
        alive = alive & torch.isfinite(loss.detach() + slopes[0].flatten(1).sum(1) + slopes[1])
        last = torch.where(alive, loss.detach(), last)
        if s == 0:
            first, ok = last, alive
        kept = _where(alive, learned, kept)
        velocity = MOMENTUM * velocity[0] + slopes[0], MOMENTUM * velocity[1] + slopes[1]
        moved = kept[0] - step.images * velocity[0], (kept[1] - step.step_size * velocity[1]).clamp(*LIMITS)
        learned = _where(alive, moved, kept)
    loss = path.distance(*learned, start, end)
    alive = alive & torch.isfinite(loss)
    return Matched(*_where(alive, learned, kept), first, torch.where(alive, loss, last), ok)


def _where(alive: Tensor, new: tuple[Tensor, Tensor], old: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    rows = alive.reshape(-1, *[1] * (new[0].dim() - 1))
    return torch.where(rows, new[0], old[0]), torch.where(alive, new[1], old[1])
