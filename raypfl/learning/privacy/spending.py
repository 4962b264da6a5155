"""The record of the privacy that clients spend, written where noise is added."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

SPENDING = {
    "round": "int32",
    "phase": "text",
    "client": "int64",
    "branch": "text",
    "rate": "float64",
    "steps": "int32",
    "uses": "int32",
}
"""Columns of the table of spent privacy; see `Spending`. ``phase`` is ``training`` or ``prediction``."""


class Spending(NamedTuple):
    """The noisy steps of one of a client's models in one exchange.

    Attributes
    ----------
    branch : the name of the client function, and the number of the training in it.
    rate : the probability of a sample to be in a batch; 1 without sampling.
    uses : the number of noisy sums of the same batch in each step.
    """

    client: int
    branch: str
    rate: float
    steps: int
    uses: int


@dataclass
class PrivateTraining:
    """The noisy steps of a group's clients in one training.

    Attributes
    ----------
    name : the branch of `Spending`.
    ids : the numbers of the K clients.
    rates, steps : each client's sampling rate and number of steps, ``[K]``.
    uses : the number of noisy sums of the same batch in each step.
    """

    name: str
    ids: tuple[int, ...]
    rates: np.ndarray
    steps: np.ndarray
    uses: int = 1

    def rows(self) -> Iterator[Spending]:
        """Yield the spending of each client."""
        for client, rate, steps in zip(self.ids, self.rates.tolist(), self.steps.tolist(), strict=True):
            yield Spending(client, self.name, rate, steps, self.uses)
