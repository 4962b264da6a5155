"""Weights that are not negative and sum to 1: projections onto them, and quadratic problems over them."""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDING = 1e-12
"""What is added to the diagonal of a quadratic form, relative to its mean: then there is one minimum."""


def on_simplex(rows: Tensor) -> Tensor:
    """Return the points of the simplex that are closest to ``rows[..., n]`` (Duchi et al. 2008, Figure 1)."""
    largest_first = rows.sort(dim=-1, descending=True).values
    count = torch.arange(1, rows.shape[-1] + 1, dtype=rows.dtype, device=rows.device)
    shifts = (largest_first.cumsum(-1) - 1) / count
    num_positive = (largest_first > shifts).sum(-1, keepdim=True)
    return (rows - shifts.gather(-1, num_positive - 1)).clamp_min(0)


def least_quadratic(form: Tensor) -> Tensor:
    """Return the weights ``a[n]`` on the simplex with the least ``a @ form @ a``, for a positive semidefinite form.

    On the support of the minimum, all entries of ``form @ a`` are equal, and elsewhere they are not smaller. So a is in
    proportion to the x >= 0 with ``form @ x = 1`` on its support and ``>= 1`` elsewhere, which is a least-squares
    problem: its support is found as by Lawson and Hanson 1974, exactly and in few steps.
    """
    q = form.double()
    scale = q.diagonal().mean()
    if not scale > 0:
        return torch.full_like(form[0], 1 / len(form))
    q = q / scale + ROUNDING * torch.eye(len(q), dtype=q.dtype, device=q.device)

    x = torch.zeros_like(q[0])
    support = torch.zeros_like(x, dtype=torch.bool)
    for _ in range(10 * len(q)):
        slack = (1 - q @ x).masked_fill(support, -torch.inf)
        if slack.max() <= 1e-9:
            break
        support[slack.argmax()] = True

        solution = _solve(q, support)
        while (solution[support] <= 0).any():
            # Step toward the solution until an entry becomes zero, and drop that one.
            falling = support & (solution <= 0)
            step = (x[falling] / (x[falling] - solution[falling])).min()
            x = x + step * (solution - x)
            support = support & (x > 1e-15 * x.max())
            x = x * support
            solution = _solve(q, support)
        x = solution
    return (x / x.sum()).to(form.dtype)


def _solve(q: Tensor, support: Tensor) -> Tensor:
    """Return the x with ``q @ x = 1`` on the support, and zeros elsewhere."""
    x = torch.zeros_like(q[0])
    x[support] = torch.linalg.solve(q[support][:, support], torch.ones_like(x[support]))
    return x
