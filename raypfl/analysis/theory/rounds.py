"""A round of federated averaging as a linear map of the error, which it is if the kernel does not change."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

LIMIT = 1_000_000
"""Number of rounds after which :meth:`RoundMap.rounds_to` gives up."""

ROUNDING = 1e-9
"""Largest excess by rounding of a spectral radius of 1, the radius for a kernel with an eigenvalue of 0."""


@dataclass(frozen=True)
class RoundMap:
    """``e(t+1) = M e(t)`` for the error ``e = y(t) - y``, with ``M = I - server_rate H Phi``.

    A client's error follows ``e <- (I - rate H_cc) e`` in each local step, so Phi has a block for each client, ``weight
    rate sum_k (I - rate H_cc)^k``.

    Attributes
    ----------
    kernel, phi : H and Phi, ``[n, n]``.
    server_rate : the rate of the server's step.
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
        """Return the map of a round, given each client's part of the samples, weight, rate and number of steps.

        Parameters
        ----------
        kernel : symmetric, ``[n, n]``.
        parts : samples of each client.
        weights : weights of the clients in the mean; 0 for a client that is absent.
        rates : learning rates on the sum of a client's halved squared errors. For their mean, divide by its samples.
        """
        phi = torch.zeros_like(kernel)
        for part, weight, rate, num_steps in zip(parts, weights, rates, steps, strict=True):
            # sum_k (I - rate H_cc)^k, by the eigenvalues of H_cc.
            values, vectors = torch.linalg.eigh(kernel[part][:, part])
            powers = (1 - rate * values)[:, None] ** torch.arange(num_steps, dtype=kernel.dtype)
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
        """Return ``||e(t)||^2`` before each of the rounds and after the last, ``[rounds + 1]``, from ``e(0)[n]``."""
        matrix = self.matrix
        trajectory = [error]
        for _ in range(rounds):
            trajectory.append(matrix @ trajectory[-1])
        return torch.stack(trajectory).square().sum(1)

    def rounds_to(self, error: Tensor, share: float) -> int | None:
        """Return the rounds until ``||e(t)||^2`` is at most this share of ``||e(0)||^2``.

        None: never, not in ``LIMIT``, or part of the error grows, however small it is when the share is reached.
        """
        if self.diverges:
            return None
        goal = share * float(error.square().sum())

        # M, M^2, M^4, ... until a power is enough.
        powers = [self.matrix]
        while True:
            norm = float((powers[-1] @ error).square().sum())
            if norm <= goal:
                break
            if 2 ** len(powers) > LIMIT or not math.isfinite(norm):
                return None
            powers.append(powers[-1] @ powers[-1])

        # Bisection: the largest number of rounds that is not enough, by its binary digits.
        current = error
        rounds = 0
        for exponent in reversed(range(len(powers))):
            further = powers[exponent] @ current
            if float(further.square().sum()) > goal:
                current = further
                rounds += 2**exponent
        return rounds + 1
