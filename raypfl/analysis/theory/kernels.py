"""Neural tangent kernels of a two-layer ReLU network: infinite and finite width, two sets of weights, spectra.

Inputs are rows ``x[n, d]``, weights have a row for each neuron, ``u[m, d]``, and a neuron counts as active at 0 too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

EXACT = 2**24
"""Number of neurons that can be counted at once in float32 without rounding."""


def angle(x: Tensor, z: Tensor) -> Tensor:
    """Return the angles ``[p, q]`` between rows of ``x[p, d]`` and ``z[q, d]``; also accurate near 0 and pi (Kahan)."""
    x = x / x.norm(dim=1, keepdim=True)
    z = z / z.norm(dim=1, keepdim=True)
    rows = [torch.atan2((row - z).norm(dim=1), (row + z).norm(dim=1)) for row in x]
    return 2 * torch.stack(rows)


def infinite_width(x: Tensor, z: Tensor | None = None) -> Tensor:
    """Return H_inf ``[p, q]``: ``E x.z 1[w.x >= 0, w.z >= 0]`` over normal w, with `x` itself for `z` by default.

    It is the arc-cosine kernel of order 0, times x.z.
    """
    z = x if z is None else z
    return (x @ z.T) * (math.pi - angle(x, z)) / (2 * math.pi)


def positive(u: Tensor, x: Tensor) -> Tensor:
    """Return which neurons are active on which inputs, ``bool[n, m]``."""
    return x @ u.T >= 0


def count_common(rows: Tensor, columns: Tensor) -> Tensor:
    """Return the number of neurons that are active in both ``bool[p, m]`` and ``bool[q, m]``, ``int64[p, q]``."""
    counts = torch.zeros(len(rows), len(columns), dtype=torch.int64, device=rows.device)
    for a, b in zip(rows.split(EXACT, dim=1), columns.split(EXACT, dim=1), strict=True):
        counts += (a.float() @ b.float().T).long()
    return counts


def gram(x: Tensor, z: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Return the kernel ``[p, q]``: ``x.z / m`` times the number of neurons that are active on both inputs.

    It is the product of two networks' gradients: H(0) and H(t) with the server's weights on both sides, H(t, k) with
    the server's for rows and the client's after k steps for columns.

    Parameters
    ----------
    rows, columns : activations from :func:`positive`, ``bool[p, m]`` for x and ``bool[q, m]`` for z.
    """
    return (x @ z.T) * count_common(rows, columns) / rows.shape[1]


@dataclass(frozen=True)
class Spectrum:
    """Eigenvalues of a symmetric matrix, in ascending order."""

    values: Tensor

    @classmethod
    def of(cls, matrix: Tensor) -> Spectrum:
        return cls(torch.linalg.eigvalsh(matrix))

    @property
    def least(self) -> float:
        return float(self.values[0])

    @property
    def largest(self) -> float:
        return float(self.values[-1])

    @property
    def condition(self) -> float:
        """kappa; infinite if the least eigenvalue is not positive beyond rounding."""
        return self.largest / self.least if self.least > 1e-12 * self.largest else math.inf


@dataclass(frozen=True)
class Asymmetry:
    """How far a kernel is from a symmetric one.

    Attributes
    ----------
    fraction : norm of the antisymmetric part over that of the whole.
    least_symmetric : least eigenvalue of the symmetric part.
    """

    fraction: float
    least_symmetric: float


def asymmetry(kernel: Tensor) -> Asymmetry:
    """Return the asymmetry of a kernel ``[n, n]``."""
    symmetric = (kernel + kernel.T) / 2
    antisymmetric = (kernel - kernel.T) / 2
    return Asymmetry(float(antisymmetric.norm() / kernel.norm()), Spectrum.of(symmetric).least)
