"""A run's selection and what it remembers."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import numpy as np
import torch

from raypfl.common.errors import MethodError
from raypfl.common.user_code import where_defined
from raypfl.devices import ClientTurns
from raypfl.federation.cohort import Cohort, round_record
from raypfl.federation.cohort_draw import CohortDraw
from raypfl.federation.selection.base import Candidates, Reports, Selection, SelectionState


class Selector:
    """Selects the clients of each round, and tells the selection what they reported.

    `num_samples` : training samples of each client, ``int64[num_clients]``.
    """

    def __init__(self, selection: Selection, turns: ClientTurns, num_samples: np.ndarray):
        self._selection = selection
        self._turns = turns
        self._num_samples = num_samples
        self._state: SelectionState = {}
        self._next: SelectionState | None = None
        self.restore({})

    def choose(self, clients: np.ndarray, size: int, round: int) -> np.ndarray:
        """Return `size` of the clients that can be reached, or all if there are no more, ascending.

        Raises
        ------
        MethodError : if the selection returns anything else.
        """
        self._next = None
        if len(clients) <= size:
            return clients
        candidates = Candidates(round, self._turns.seed, clients, size)
        selected = np.unique(self._selection.select(self._state, candidates))
        if len(selected) != size or not np.isin(selected, clients).all():
            raise MethodError(
                f"{where_defined(self._selection.select)} must return the numbers of {size} different candidates in "
                f"round {round}, but returned {len(selected)} different numbers, of which "
                f"{int(np.isin(selected, clients).sum())} are candidates'."
            )
        return selected

    def update(self, cohort: Cohort, cohort_draw: CohortDraw) -> None:
        """Tell the selection what the cohort of a round reported; it counts once the round is done."""
        losses, _ = round_record(cohort)
        clients = np.array(cohort.ids, dtype=np.int64)
        seconds = np.full(len(clients), np.nan)
        if self._turns.has_clock:
            seconds = self._turns.turn_seconds(clients, 1.0 if cohort_draw.work is None else cohort_draw.work)
        reports = Reports(
            round=cohort.round,
            clients=clients[cohort.present],
            losses=np.array([losses.get(client, np.nan) for client in clients[cohort.present].tolist()], dtype=float),
            seconds=seconds[cohort.present],
            late=np.array(cohort_draw.late, dtype=np.int64),
            dropped=np.array(cohort_draw.dropped, dtype=np.int64),
        )
        state = deepcopy(self._state)
        self._selection.update(state, reports)
        self._next = state

    def commit(self) -> None:
        """Keep what the selection learned from the round, which has succeeded."""
        if self._next is not None:
            self._state = self._next

    def saved(self) -> dict[str, Any]:
        """Return what a checkpoint needs, a tree of tensors and numbers."""
        return {name: _saved(value) for name, value in self._state.items()}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Go back to what :meth:`saved` returned; an empty mapping: to the start of the run."""
        self._state = {name: _restored(value) for name, value in saved.items()}
        if not self._state:
            seconds = np.full(len(self._num_samples), np.nan)
            if self._turns.has_clock:
                seconds = self._turns.turn_seconds(np.arange(len(seconds)))
            self._state = self._selection.start(self._num_samples, seconds)


def _saved(value: Any) -> Any:
    return torch.from_numpy(value.copy()) if isinstance(value, np.ndarray) else deepcopy(value)


def _restored(value: Any) -> Any:
    return value.cpu().numpy().copy() if isinstance(value, torch.Tensor) else deepcopy(value)
