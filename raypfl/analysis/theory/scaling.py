"""Predicted rounds of a run with other numbers of clients and of local steps, its kernel frozen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from raypfl.analysis.theory.flntk import TheoremSetting


@dataclass(frozen=True)
class Scaling:
    """Rounds until the squared error is a share of the first one, by the numbers of clients and of local steps.

    FL-NTK's Theorem 4.1 has them grow with clients / steps, as long as local steps are small.

    Attributes
    ----------
    clients, steps : numbers of clients and of local steps, ascending.
    rounds : rounds for each number of clients, then of steps; None: never.
    """

    clients: Sequence[int]
    steps: Sequence[int]
    rounds: Sequence[Sequence[int | None]]

    @classmethod
    def of(
        cls,
        setting: TheoremSetting,
        kernel: Tensor,
        error: Tensor,
        share: float,
        clients: Sequence[int],
        steps: Sequence[int],
    ) -> Scaling:
        """Predict the rounds with the samples dealt at random to each number of clients, in equal parts.

        Parameters
        ----------
        kernel : H(0), ``[n, n]``.
        error : ``y(0) - y``, ``[n]``.
        share : share of the first squared error, until which rounds are counted.
        """
        order = torch.randperm(len(error), generator=torch.Generator().manual_seed(0))
        rounds = []
        for num_clients in clients:
            dealt = replace(setting, parts=order.tensor_split(num_clients))
            rounds.append([replace(dealt, steps=k).map(kernel).rounds_to(error, share) for k in steps])
        return cls(clients, steps, rounds)


def numbers_around(count: int, most: int) -> list[int]:
    """Return ``count`` times 1/4, 1/2, 1, 2 and 4, as whole numbers from 1 to `most`."""
    numbers = {max(round(count * factor), 1) for factor in (0.25, 0.5, 1, 2, 4)}
    return sorted(number for number in numbers if number <= most)
