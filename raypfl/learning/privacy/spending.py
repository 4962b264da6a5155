"""What a run spends of its clients' privacy, as it is measured where noise is added."""

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
"""Columns of the table of what was spent; see `Spending`. ``phase`` is ``training`` or ``prediction``."""


class Spending(NamedTuple):
    """The noisy steps of one of a client's models in one exchange.

    Attributes
    ----------
    client : its number.
    branch : the client function, and the number of the training in it.
    rate : the chance of a sample to be in a batch; 1 where nothing is sampled.
    steps : how many steps there were.
    uses : noisy sums of the same batch in each step.
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
    ids : the K clients. rates, steps : of each, ``[K]``.
    name, uses : see `Spending`.
    """

    name: str
    ids: tuple[int, ...]
    rates: np.ndarray
    steps: np.ndarray
    uses: int = 1

    def rows(self) -> Iterator[Spending]:
        """What each client spent."""
        for client, rate, steps in zip(self.ids, self.rates.tolist(), self.steps.tolist(), strict=True):
            yield Spending(client, self.name, rate, steps, self.uses)
