"""What a selection is: how clients of a round are chosen, and what may be looked at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from raypfl.common.component import Component
from raypfl.common.errors import IncompleteError
from raypfl.common.registry import Registry

SELECTIONS = Registry("selection")

SelectionState = dict[str, Any]
"""What a selection remembers: NumPy arrays, numbers, strings, and lists of them, by name."""


@dataclass(frozen=True)
class Candidates:
    """The clients that can take part in a round.

    Attributes
    ----------
    round : the round's number, from 1.
    seed : the run's seed; draws are keyed by it and the round, see :mod:`raypfl.common.rng`.
    clients : the numbers of the clients that are trained and can be reached, ascending, ``int64[n]``.
    size : how many of them to select, from 1 to n.
    """

    round: int
    seed: int
    clients: np.ndarray
    size: int


@dataclass(frozen=True)
class Reports:
    """What is known once a round is over.

    Attributes
    ----------
    round : the round's number, from 1.
    clients : the numbers of the clients that count, ``int64[n]``.
    losses : the mean training loss of each over its local steps, ``float64[n]``; NaN if it reported none.
    seconds : how long each was at work, in simulated seconds, ``float64[n]``; NaN without simulated time.
    late, dropped : the numbers of the clients that finished after the round, and of those that dropped out, ``int64``.
    """

    round: int
    clients: np.ndarray
    losses: np.ndarray
    seconds: np.ndarray
    late: np.ndarray
    dropped: np.ndarray


class Selection(Component):
    """Base class of selections. Its fields are options of ``cohort.selection``.

    An object holds options only. What is remembered is in `state`, which checkpoints keep.
    """

    section: ClassVar[str] = "cohort.selection."

    @property
    def needs_time(self) -> bool:
        """Whether the options need simulated time, that is, ``devices.hardware``."""
        return False

    def start(self, num_samples: np.ndarray, seconds: np.ndarray) -> SelectionState:
        """Return the state before the first round.

        Parameters
        ----------
        num_samples : training samples of each client, ``int64[num_clients]``.
        seconds : simulated seconds of each client's turn, ``float64[num_clients]``; NaN without simulated time.
        """
        return {}

    def select(self, state: SelectionState, candidates: Candidates) -> np.ndarray:
        """Return the numbers of ``candidates.size`` candidates; leave `state` as it is."""
        raise IncompleteError(f"{type(self).__name__} selects no clients: define select(self, state, candidates).")

    def update(self, state: SelectionState, reports: Reports) -> None:
        """Change `state` in place by what clients reported in a round; does nothing by default."""
