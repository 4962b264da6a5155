"""Points on the probability simplex."""

from __future__ import annotations

import torch
from torch import Tensor

SIZES = 1000
"""Number of sizes of the simplex that :func:`spread_points` tries."""


def principal_components(rows: Tensor, count: int) -> Tensor:
    """Return the coordinates ``[N, count]`` of ``rows[N, P]`` along their principal axes; zeros beyond N axes.

    The sign of an axis is arbitrary; here its largest loading is positive.
    """
    u, s, axes = torch.linalg.svd(rows - rows.mean(0), full_matrices=False)
    kept = min(count, len(s))
    largest = axes.abs().argmax(1, keepdim=True)
    signs = torch.where(axes.gather(1, largest)[:, 0] < 0, -1.0, 1.0).to(rows)
    coordinates = rows.new_zeros(len(rows), count)
    coordinates[:, :kept] = (u * s * signs)[:, :kept]
    return coordinates


def nearest_point(rows: Tensor, size: float) -> Tensor:
    """Return the points nearest to ``rows[N, M]`` with entries of 0 or more that sum to `size` (Duchi et al. 2008)."""
    descending = rows.sort(1, descending=True).values
    excess = descending.cumsum(1) - size
    position = torch.arange(1, rows.shape[1] + 1, device=rows.device)
    support = (descending * position > excess).sum(1, keepdim=True)
    return (rows - excess.gather(1, support - 1) / support).clamp_min(0)


def spread_points(rows: Tensor) -> Tensor:
    """Return points on the simplex for ``rows[N, M]``, as far apart as one of many sizes allows (Grinwald et al. 2024).

    For each of 1,000 sizes from 0.0001 to 1, rows are projected to the simplex of that size and divided by it; those
    with the least Riesz energy, the sum of ``1 / ||p_i - p_j||^2`` over all pairs, are returned.
    """
    first, second = torch.triu_indices(len(rows), len(rows), 1, device=rows.device)
    best = nearest_point(rows, 1.0)
    least = torch.inf
    for size in torch.linspace(1e-4, 1, SIZES, dtype=torch.float64).tolist():
        points = nearest_point(rows, size) / size
        energy = float((points[first] - points[second]).square().sum(1).reciprocal().sum())
        if energy < least:
            best = points
            least = energy
    return best
