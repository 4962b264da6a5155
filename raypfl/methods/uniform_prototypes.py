"""Points on the unit sphere that are as far apart as possible."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

RESTARTS = 8
"""Largest number of random starts of a search."""

STEPS = 3000
"""Number of steps of a search."""

MAX_WORK = 2**22
"""Largest ``restarts * count^2 * dimension`` of a search with more than one start."""

SHARPEST = 300.0
"""The sharpness of the soft maximum at the last step; at the first it is 1."""


def uniform_prototypes(count: int, dimension: int, seed: int) -> Tensor:
    """Return unit rows ``float64[count, dimension]`` whose smallest distance is as large as possible.

    This is Eq. 2 of Dai et al. 2023. Up to ``dimension + 1`` rows are a regular simplex: every two have the cosine
    ``-1 / (count - 1)``. Up to ``2 * dimension`` rows are axes and their opposites: the largest cosine is 0 (Rankin
    1955). In the plane they are equally spaced. All these are rotated at random. Otherwise a search finds them.
    """
    generator = torch.Generator().manual_seed(seed)
    if count == 1:
        return F.normalize(torch.randn(1, dimension, generator=generator, dtype=torch.float64), dim=1)
    if count <= dimension + 1:
        return _simplex(count, dimension, generator)

    if dimension == 2:
        angles = (
            torch.arange(count, dtype=torch.float64) * (2 * torch.pi / count)
            + torch.rand(1, generator=generator).double()
        )
        return torch.stack([angles.cos(), angles.sin()], dim=1)
    if count <= 2 * dimension:
        rotation = torch.linalg.qr(torch.randn(dimension, dimension, generator=generator, dtype=torch.float64)).Q
        return torch.cat([rotation, -rotation])[:count]

    restarts = max(1, min(RESTARTS, MAX_WORK // (count**2 * dimension)))
    return search_prototypes(count, dimension, generator, restarts)


def _simplex(count: int, dimension: int, generator: torch.Generator) -> Tensor:
    # The centred unit vectors are a simplex; `axes` gives their coordinates in the space that they span.
    centred = torch.eye(count, dtype=torch.float64) - 1 / count
    axes = torch.linalg.eigh(centred).eigenvectors[:, 1:]
    rotation = torch.linalg.qr(torch.randn(dimension, count - 1, generator=generator, dtype=torch.float64)).Q
    return (count / (count - 1)) ** 0.5 * axes @ rotation.T


def search_prototypes(count: int, dimension: int, generator: torch.Generator, restarts: int = RESTARTS) -> Tensor:
    """Search for the rows of :func:`uniform_prototypes` by descent on a soft maximum of their cosines.

    The maximum gets sharper from step to step. The best result of all restarts is returned.
    """
    w = torch.randn(restarts, count, dimension, generator=generator, dtype=torch.float64)
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
