"""Who takes part in each round, and what a run remembers for it from round to round."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from raypfl.devices import ClientTurns
from raypfl.federation.cohort import Cohort
from raypfl.federation.cohort_draw import CohortDraw, draw_cohort
from raypfl.federation.exchange.group_runner import GroupRunner
from raypfl.federation.logged import EarlierKinds
from raypfl.federation.selection.selector import Selector
from raypfl.federation.settings import CohortSettings
from raypfl.storage.states import StateTable


class Rounds(ABC):
    """Gives each round its cohort."""

    @abstractmethod
    def draw(self, round: int, turns: ClientTurns, time: float) -> CohortDraw:
        """Return who takes part in a round that may begin at `time`, in simulated seconds."""

    @abstractmethod
    def cohort(
        self, round: int, server: dict[str, Any], earlier_kinds: EarlierKinds, cohort_draw: CohortDraw
    ) -> Cohort:
        """Return the cohort of a round that was drawn, given the server's state after the round before."""

    @abstractmethod
    def update(self, cohort: Cohort, cohort_draw: CohortDraw) -> None:
        """Learn from what a cohort reported; it counts once the round is done."""

    @abstractmethod
    def commit(self, round: int) -> None:
        """Keep what was learned from a round, which has succeeded."""

    @abstractmethod
    def saved(self, round: int) -> dict[str, Any]:
        """Return what a checkpoint after a round needs, a tree of tensors and numbers."""

    def held_states(self) -> StateTable:
        """Return the states of clients whose replies a checkpoint keeps for rounds to come."""
        return StateTable()

    @abstractmethod
    def restore(self, saved: Mapping[str, Any]) -> None:
        """Go back to what :meth:`saved` returned; an empty mapping: to the start of the run."""

    @abstractmethod
    def refuse_other_rounds(self, round: int, time: float) -> None:
        """Raise a CheckpointError unless these rounds can follow one that ended at `time`, in simulated seconds."""


class SynchronousRounds(Rounds):
    """Draws each cohort when its round begins: uniformly, or by a selection."""

    def __init__(
        self,
        settings: CohortSettings,
        runner: GroupRunner,
        learning_rate: Callable[[int], float],
        turns: ClientTurns,
    ):
        self._settings = settings
        self._runner = runner
        self._learning_rate = learning_rate
        task = runner.task
        self._trained = task.trained if len(task.unseen) else None
        self._selector: Selector | None = None
        if settings.selection is not None:
            self._selector = Selector(settings.selection, turns, task.num_samples)

    def draw(self, round: int, turns: ClientTurns, time: float) -> CohortDraw:
        task = self._runner.task
        choose = None if self._selector is None else self._selector.choose
        return draw_cohort(self._settings, task.num_trained, task.seed, round, turns, self._trained, time, choose)

    def cohort(
        self, round: int, server: dict[str, Any], earlier_kinds: EarlierKinds, cohort_draw: CohortDraw
    ) -> Cohort:
        lr = self._learning_rate(round)
        return Cohort(self._runner, cohort_draw.clients, round, lr, earlier_kinds, cohort_draw.lost, cohort_draw.work)

    def update(self, cohort: Cohort, cohort_draw: CohortDraw) -> None:
        if self._selector is not None:
            self._selector.update(cohort, cohort_draw)

    def commit(self, round: int) -> None:
        if self._selector is not None:
            self._selector.commit()

    def refuse_other_rounds(self, round: int, time: float) -> None:
        """Do nothing: a cohort is drawn when its round begins, whatever came before."""

    def saved(self, round: int) -> dict[str, Any]:
        return {} if self._selector is None else {"selection": self._selector.saved()}

    def restore(self, saved: Mapping[str, Any]) -> None:
        if self._selector is not None:
            self._selector.restore(saved.get("selection", {}))
