"""Points on the unit sphere that are as far apart as possible."""

from __future__ import annotations

import torch
from torch import Tensor

RESTARTS = 8
STEPS = 3000
SHARPEST = 300.0


def uniform_prototypes(count: int, dimension: int, seed: int) -> Tensor:
    """Unit rows ``float64[count, dimension]`` whose smallest distance is the largest possible (Dai et al. 2023, Eq. 2).

    Up to ``dimension + 1`` of them are a regular simplex, turned at random: every two have the cosine
    ``-1 / (count - 1)``. In the plane they are equally spaced. Otherwise they are searched for.
    """
    draws = torch.Generator().manual_seed(seed)
    if 1 < count <= dimension + 1:
        return _simplex(count, dimension, draws)
    if dimension == 2:
        angles = torch.arange(count, dtype=torch.float64) * (2 * torch.pi / count) + torch.rand(1, generator=draws)
        return torch.stack([angles.cos(), angles.sin()], dim=1)
    return spread(count, dimension, draws)


def _simplex(count: int, dimension: int, draws: torch.Generator) -> Tensor:
    centred = torch.eye(count, dtype=torch.float64) - 1 / count
    axes = torch.linalg.eigh(centred).eigenvectors[:, 1:]
    turn = torch.linalg.qr(torch.randn(dimension, count - 1, generator=draws, dtype=torch.float64)).Q
    return (count / (count - 1)) ** 0.5 * axes @ turn.T


def spread(count: int, dimension: int, draws: torch.Generator, restarts: int = RESTARTS) -> Tensor:
    """The same by descent of a soft maximum of the cosines, ever sharper, on the sphere; the best of several starts."""
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
