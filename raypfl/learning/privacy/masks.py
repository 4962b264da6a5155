"""Secure aggregation, simulated: fixed-point numbers under masks that cancel in the sum over a cohort."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from raypfl.common import rng
from raypfl.common.errors import MethodError

FRACTION_BITS = 32
"""Of the 64 bits of a fixed-point number, those after the point."""


@dataclass(frozen=True)
class Masks:
    """The masks of one message of an exchange: a client's is its own random stream minus that of the next client.

    The clients form a ring, so that all masks add up to zero modulo 2^64 (Bonawitz et al. 2017 mask every pair of
    clients; Bell et al. 2020, neighbours). Sums are exact: they depend on no order.

    Attributes
    ----------
    cohort : all clients of the exchange, at least two.
    purpose, round : what keys the streams, with the seed.
    """

    cohort: tuple[int, ...]
    seed: int
    purpose: str
    round: int

    def sum_of(self, clients: tuple[int, ...], rows: Tensor) -> np.ndarray:
        """The sum ``uint64[...]`` of what these clients send in place of their ``rows[K, ...]``.

        Raises
        ------
        MethodError : if a number is too large.
        """
        most = 2.0 ** (63 - FRACTION_BITS) / len(self.cohort)
        if not bool((rows.abs() < most).all()):
            raise MethodError(
                f"{float(rows.abs().max()):.3g} is too large a number for privacy.secure_aggregation: with "
                f"{len(self.cohort)} clients, its fixed-point numbers end at {most:.3g}. Lower the learning rate, "
                "weight clients equally, or choose a smaller cohort."
            )
        fixed = (rows.double() * 2**FRACTION_BITS).round().to(torch.int64).cpu().numpy().view(np.uint64)
        places = np.searchsorted(self.cohort, clients)
        following = [self.cohort[(place + 1) % len(self.cohort)] for place in places.tolist()]
        flat = fixed.reshape(len(clients), -1)
        total = np.zeros(flat.shape[1], dtype=np.uint64)
        for client, after, row in zip(clients, following, flat, strict=True):
            total += row + self._stream(client, len(row)) - self._stream(after, len(row))
        return total.reshape(fixed.shape[1:])

    def _stream(self, client: int, numbers: int) -> np.ndarray:
        key = rng.keys(self.seed, self.purpose, self.round, [client])
        return rng.mix(key + np.arange(numbers, dtype=np.uint64))


def unmasked(total: np.ndarray, dtype: torch.dtype) -> Tensor:
    """The sum over a whole cohort, of which all masks have cancelled."""
    numbers = torch.from_numpy(np.asarray(total.view(np.int64).astype(np.float64) / 2**FRACTION_BITS))
    return (numbers if dtype.is_floating_point else numbers.round()).to(dtype)
