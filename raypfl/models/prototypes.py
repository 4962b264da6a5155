"""Points on the unit sphere that are as far apart as possible."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

RESTARTS = 8
STEPS = 3000
WORK = 2**22
"""Largest ``restarts * count^2 * dimension`` of a search with more than one start."""
SHARPEST = 300.0


def uniform_prototypes(count: int, dimension: int, seed: int) -> Tensor:
    """Unit rows ``float64[count, dimension]`` whose smallest distance is the largest possible (Dai et al. 2023, Eq. 2).

    Up to ``dimension + 1`` of them are a regular simplex: every two have the cosine ``-1 / (count - 1)``. Up to
    ``2 * dimension`` of them are axes and their opposites: the largest cosine is 0 (Rankin 1955). In the plane they are
    equally spaced. All these are rotated at random. Otherwise a search finds them.
    """
    draws = torch.Generator().manual_seed(seed)
    if count == 1:
        return F.normalize(torch.randn(1, dimension, generator=draws, dtype=torch.float64), dim=1)
    if count <= dimension + 1:
        return _simplex(count, dimension, draws)
    if dimension == 2:
        angles = torch.arange(count, dtype=torch.float64) * (2 * torch.pi / count) + torch.rand(1, generator=draws)
        return torch.stack([angles.cos(), angles.sin()], dim=1)
    if count <= 2 * dimension:
        turn = torch.linalg.qr(torch.randn(dimension, dimension, generator=draws, dtype=torch.float64)).Q
        return torch.cat([turn, -turn])[:count]
    return spread(count, dimension, draws, max(1, min(RESTARTS, WORK // (count**2 * dimension))))


def _simplex(count: int, dimension: int, draws: torch.Generator) -> Tensor:
    centred = torch.eye(count, dtype=torch.float64) - 1 / count
    axes = torch.linalg.eigh(centred).eigenvectors[:, 1:]
    turn = torch.linalg.qr(torch.randn(dimension, count - 1, generator=draws, dtype=torch.float64)).Q
    return (count / (count - 1)) ** 0.5 * axes @ turn.T


def spread(count: int, dimension: int, draws: torch.Generator, restarts: int = RESTARTS) -> Tensor:
    """The same by descent on a soft maximum of the cosines, which gets sharper; the best of several starts."""
    w = torch.randn(restarts, count, dimension, generator=draws, dtype=torch.float64)
    w = w / w.norm(dim=-1, keepdim=True)
    diagonal = torch.eye(count, dtype=torch.bool)
    for step in range(STEPS):
        sharpness = SHARPEST ** (step / (STEPS - 1))
        cosines = (w @ w.mT).masked_fill(diagonal, -torch.inf)
        pull = (sharpness * cosines).flatten(1).softmax(-1).reshape(cosines.shape)
        w = w - pull @ w * (count / (1 + sharpness))
        w = w / w.norm(dim=-1, keepdim=True)
    largest = (w @ w.mT).masked_fill(diagonal, -torch.inf).flatten(1).amax(-1)
    return w[largest.argmin()]
