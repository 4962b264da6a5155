"""Selection by the utility of clients."""

from __future__ import annotations

import math
from typing import Annotated

import numpy as np

from raypfl.common import rng
from raypfl.common.errors import ConfigError, MethodError
from raypfl.common.limits import CHANCE, COUNT, FROM_ZERO, POSITIVE, SHARE
from raypfl.federation.selection.base import SELECTIONS, Candidates, Reports, Selection, SelectionState


@SELECTIONS.register("oort")
class Oort(Selection):
    """Selection by large losses and short turns (Oort, Lai et al. 2021, Algorithm 1).

    In round R, a client with the samples B that last took part in round L, for t seconds, has the utility

        (|B| sqrt(mean of squared losses) + sqrt(0.1 log(R) / L)) (T/t)^penalty,    the last factor if t > T.

    Its first term is clipped at the 95th percentile. A share epsilon of the cohort explores clients that have never
    counted, with chances in proportion to the last factor. Of the others, all whose utility is at least `cut_off` times
    that of the last place are drawn from, in proportion to utility. T begins at `pacer_step` seconds, and grows by it
    in each round in which the utility of the last `window` rounds, summed over their clients, is below that of the
    `window` before.

    A client reports the mean training loss of its local steps, so all its samples count with that loss; in the paper,
    each has its own. FedScale's release differs from the paper: it scales the first term to [0, 1] before it adds the
    second, has T as a percentile of all durations, moves it both ways every 20 rounds, and explores clients with many
    samples first.

    Attributes
    ----------
    exploration : epsilon in the first round.
    exploration_decay : factor of epsilon after each round.
    exploration_min : smallest epsilon, unless `exploration` is smaller.
    pacer_step : simulated seconds by which the preferred duration T begins and grows; null: durations do not count.
    penalty : exponent of the factor for turns longer than T, alpha in the paper.
    window : number of rounds after which the utility is compared, W.
    cut_off : share of the last place's utility from which on clients are drawn, c.
    clip : quantile of the statistical utilities at which they are clipped; 1: none is.
    most_rounds : number of rounds after which a client is no longer selected, as long as there are others; null: none.
    """

    exploration: Annotated[float, CHANCE] = 0.9
    exploration_decay: Annotated[float, SHARE] = 0.98
    exploration_min: Annotated[float, CHANCE] = 0.2
    pacer_step: Annotated[float | None, POSITIVE] = None
    penalty: Annotated[float, FROM_ZERO] = 2.0
    window: Annotated[int, COUNT] = 20
    cut_off: Annotated[float, CHANCE] = 0.95
    clip: Annotated[float, CHANCE] = 0.95
    most_rounds: Annotated[int | None, COUNT] = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pacer_step is None and (self.penalty, self.window) != (Oort.penalty, Oort.window):
            raise ConfigError(
                "cohort.selection.penalty and cohort.selection.window have an effect on long turns only; set "
                "cohort.selection.pacer_step, in simulated seconds, or leave them out."
            )

    @property
    def needs_time(self) -> bool:
        return self.pacer_step is not None

    def epsilon(self, round: int) -> float:
        """Return the share of a round's cohort that explores; `round` counts from 1."""
        decayed = self.exploration * self.exploration_decay ** (round - 1)
        return max(decayed, min(self.exploration, self.exploration_min))

    def start(self, num_samples: np.ndarray, seconds: np.ndarray) -> SelectionState:
        return {
            "num_samples": num_samples.astype(np.float64),
            "seconds": seconds.astype(np.float64),
            "statistical": np.zeros(len(num_samples)),
            "last_round": np.zeros(len(num_samples), dtype=np.int64),
            "num_rounds": np.zeros(len(num_samples), dtype=np.int64),
            "utility_of_round": [],
            "preferred_seconds": self.pacer_step or 0.0,
        }

    def select(self, state: SelectionState, candidates: Candidates) -> np.ndarray:
        clients = candidates.clients
        is_listed = np.zeros(len(clients), dtype=bool)
        if self.most_rounds is not None:
            is_listed = state["num_rounds"][clients] >= self.most_rounds
        is_explored = state["last_round"][clients] > 0
        explored = clients[is_explored & ~is_listed]
        unexplored = clients[~is_explored]

        # If one kind has too few clients, the other gets its places.
        num_to_explore = math.floor(self.epsilon(candidates.round) * candidates.size + 1e-9)
        num_explored = min(candidates.size - num_to_explore, len(explored))
        num_unexplored = min(candidates.size - num_explored, len(unexplored))
        num_explored = min(candidates.size - num_unexplored, len(explored))

        selected = [
            self._exploit(state, candidates, explored, num_explored),
            _draw(candidates, "oort explores", unexplored, self._speed(state, unexplored), num_unexplored),
        ]
        num_missing = candidates.size - num_explored - num_unexplored
        listed = clients[is_explored & is_listed]
        selected.append(_draw(candidates, "oort runs out", listed, np.ones(len(listed)), num_missing))
        return np.concatenate(selected)

    def update(self, state: SelectionState, reports: Reports) -> None:
        is_known = np.isfinite(reports.losses)
        if len(reports.clients) and not is_known.any():
            raise MethodError(
                f"No client of round {reports.round} reported a training loss, which cohort.selection=oort needs; "
                "leave it out, or train with clients.sgd."
            )
        clients = reports.clients[is_known]
        squared_loss = reports.losses[is_known] ** 2
        state["statistical"][clients] = state["num_samples"][clients] * np.sqrt(squared_loss)
        state["seconds"][clients] = reports.seconds[is_known]
        state["last_round"][clients] = reports.round
        state["num_rounds"][clients] += 1

        utilities = state["utility_of_round"]
        utilities.append(float(state["statistical"][clients].sum()))
        del utilities[: -2 * self.window]
        has_both_windows = len(utilities) == 2 * self.window
        if has_both_windows and sum(utilities[: self.window]) > sum(utilities[self.window :]):
            state["preferred_seconds"] += self.pacer_step or 0.0

    def utilities(self, state: SelectionState, clients: np.ndarray, round: int) -> np.ndarray:
        """Return the utility of explored clients in a round, ``float64[n]``."""
        statistical = state["statistical"][clients]
        clipped = np.minimum(statistical, np.quantile(statistical, self.clip))
        uncertainty = np.sqrt(0.1 * math.log(round) / state["last_round"][clients])
        return (clipped + uncertainty) * self._speed(state, clients)

    def _speed(self, state: SelectionState, clients: np.ndarray) -> np.ndarray:
        """Return the factor (T/t)^penalty of clients whose turns are longer than T, and 1 of the others."""
        factors = np.ones(len(clients))
        if self.pacer_step is None:
            return factors
        preferred = state["preferred_seconds"]
        seconds = state["seconds"][clients]
        is_slow = seconds > preferred
        factors[is_slow] = (preferred / seconds[is_slow]) ** self.penalty
        return factors

    def _exploit(self, state: SelectionState, candidates: Candidates, explored: np.ndarray, size: int) -> np.ndarray:
        """Draw from the explored clients with most utility."""
        if not size:
            return explored[:0]
        utilities = self.utilities(state, explored, candidates.round)
        last_place = np.sort(utilities)[-size]
        is_admitted = utilities >= self.cut_off * last_place
        return _draw(candidates, "oort exploits", explored[is_admitted], utilities[is_admitted], size)


def _draw(candidates: Candidates, purpose: str, clients: np.ndarray, weights: np.ndarray, size: int) -> np.ndarray:
    """Draw clients one after the other, each in proportion to its weight among those that are left.

    They have the smallest of exponential draws whose rates are the weights (Efraimidis and Spirakis 2006).
    """
    uniform = rng.uniform(rng.keys(candidates.seed, purpose, candidates.round, clients))
    waits = -np.log1p(-uniform)
    with np.errstate(divide="ignore", invalid="ignore"):
        times = np.where(weights > 0, waits / weights, np.inf)
    # Clients without weight come last, in an order of their own.
    order = np.lexsort((waits, times))
    return clients[order[:size]]
