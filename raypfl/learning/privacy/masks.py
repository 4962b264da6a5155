"""Secure aggregation, simulated: fixed-point numbers under masks that cancel in the sum over a cohort."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from raypfl.common import rng
from raypfl.common.errors import MethodError

FRACTION_BITS = 32
"""Number of bits after the point in a fixed-point number of 64 bits."""


@dataclass(frozen=True)
class Masks:
    """The masks of one message of an exchange; each is a client's random stream minus the next client's.

    The clients form a ring, so that all masks add up to zero modulo 2^64 (Bonawitz et al. 2017 mask every pair of
    clients; Bell et al. 2020, neighbours). Sums are exact, so they do not depend on the order of the terms.

    Attributes
    ----------
    cohort : all clients of the exchange, at least two.
    seed, purpose, round : the key of the random streams.
    """

    cohort: tuple[int, ...]
    seed: int
    purpose: str
    round: int

    def sum_of(self, clients: tuple[int, ...], rows: Tensor) -> np.ndarray:
        """Return the sum ``uint64[...]`` of these clients' masked ``rows[K, ...]``.

        Raises
        ------
        MethodError : if a number is too large.
        """
        limit = 2.0 ** (63 - FRACTION_BITS) / len(self.cohort)
        if not bool((rows.abs() < limit).all()):
            raise MethodError(
                f"{float(rows.abs().max()):.3g} is too large a number for privacy.secure_aggregation: with "
                f"{len(self.cohort)} clients, its fixed-point numbers end at {limit:.3g}. Lower the learning rate, "
                "weight clients equally, or choose a smaller cohort."
            )

        fixed = (rows.double() * 2**FRACTION_BITS).round().to(torch.int64).cpu().numpy().view(np.uint64)
        flat = fixed.reshape(len(clients), -1)
        positions = np.searchsorted(self.cohort, clients)
        next_clients = [self.cohort[(position + 1) % len(self.cohort)] for position in positions.tolist()]
        total = np.zeros(flat.shape[1], dtype=np.uint64)
        for client, next_client, row in zip(clients, next_clients, flat, strict=True):
            total += row + self._stream(client, len(row)) - self._stream(next_client, len(row))
        return total.reshape(fixed.shape[1:])

    def _stream(self, client: int, count: int) -> np.ndarray:
        key = rng.keys(self.seed, self.purpose, self.round, [client])
        return rng.mix(key + np.arange(count, dtype=np.uint64))


def unmasked(total: np.ndarray, dtype: torch.dtype) -> Tensor:
    """Decode the sum over a whole cohort, in which all masks have cancelled."""
    numbers = torch.from_numpy(np.asarray(total.view(np.int64).astype(np.float64) / 2**FRACTION_BITS))
    return (numbers if dtype.is_floating_point else numbers.round()).to(dtype)
