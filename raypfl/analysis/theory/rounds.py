"""What a round of federated averaging does to the error if the kernel does not change: a linear map."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

LIMIT = 1_000_000
"""Rounds after which :meth:`RoundMap.rounds_to` gives up."""

ROUNDING = 1e-9
"""How far rounding may lift a spectral radius of 1, as a kernel with an eigenvalue of 0 has."""


@dataclass(frozen=True)
class RoundMap:
    """``e(t+1) = M e(t)`` for the error ``e = y(t) - y``, with ``M = I - server_rate H Phi``.

    A client's error follows ``e <- (I - rate H_cc) e`` in each local step, so Phi has a block for each client, ``weight
    rate sum_k (I - rate H_cc)^k``.

    Attributes
    ----------
    kernel, phi : H and Phi, ``[n, n]``.
    server_rate : of the server's step.
    """

    kernel: Tensor
    phi: Tensor
    server_rate: float

    @classmethod
    def of(
        cls,
        kernel: Tensor,
        parts: Sequence[Tensor],
        weights: Sequence[float],
        rates: Sequence[float],
        steps: Sequence[int],
        server_rate: float = 1.0,
    ) -> RoundMap:
        """The map of a round in which each client has its part of the samples, weight, rate and number of steps.

        Parameters
        ----------
        kernel : symmetric, ``[n, n]``.
        parts : samples of each client.
        weights : of the clients in the mean; of a client that is absent 0.
        rates : learning rates on the sum of a client's halved squared errors. For their mean, divide by its samples.
        """
        phi = torch.zeros_like(kernel)
        for part, weight, rate, count in zip(parts, weights, rates, steps, strict=True):
            values, vectors = torch.linalg.eigh(kernel[part][:, part])
            powers = (1 - rate * values)[:, None] ** torch.arange(count, dtype=kernel.dtype)
            phi[part[:, None], part] = weight * rate * (vectors * powers.sum(1)) @ vectors.T
        return cls(kernel, phi, server_rate)

    @property
    def matrix(self) -> Tensor:
        """M, ``[n, n]``, which is not symmetric."""
        return torch.eye(len(self.kernel), dtype=self.kernel.dtype) - self.server_rate * self.kernel @ self.phi

    @cached_property
    def steps(self) -> Tensor:
        """Eigenvalues of ``I - M``, ascending, ``[n]``: real, because ``H^(1/2) Phi H^(1/2)`` has the same ones."""
        values, vectors = torch.linalg.eigh(self.kernel)
        root = vectors * values.clamp_min(0).sqrt()
        inner = root.T @ self.phi @ root
        return torch.linalg.eigvalsh((inner + inner.T) / 2) * self.server_rate

    @property
    def spectral_radius(self) -> float:
        """The factor by which the error shrinks per round after many rounds; above 1 it grows."""
        return float((1 - self.steps).abs().max())

    @property
    def diverges(self) -> bool:
        """Whether part of the error grows without end."""
        return self.spectral_radius > 1 + ROUNDING

    @cached_property
    def norm(self) -> float:
        """The largest factor by which any error may change in one round."""
        return float(torch.linalg.matrix_norm(self.matrix, 2))

    def errors(self, error: Tensor, rounds: int) -> Tensor:
        """``||e(t)||^2`` before each of the rounds and after the last, ``[rounds + 1]``, from ``e(0)[n]``."""
        found, matrix = [error], self.matrix
        for _ in range(rounds):
            found.append(matrix @ found[-1])
        return torch.stack(found).square().sum(1)

    def rounds_to(self, error: Tensor, share: float) -> int | None:
        """Rounds until ``||e(t)||^2`` is at most this share of ``||e(0)||^2``.

        None: never, not in ``LIMIT``, or part of the error grows, however small it is when the share is reached. M is
        squared until it is enough, and the number found by bisection.
        """
        if self.diverges:
            return None
        goal = share * float(error.square().sum())
        powers = [self.matrix]
        while True:
            norm = float((powers[-1] @ error).square().sum())
            if norm <= goal:
                break
            if 2 ** len(powers) > LIMIT or not math.isfinite(norm):
                return None
            powers.append(powers[-1] @ powers[-1])
        at, count = error, 0
        for exponent in reversed(range(len(powers))):
            further = powers[exponent] @ at
            if float(further.square().sum()) > goal:
                at, count = further, count + 2**exponent
        return count + 1
