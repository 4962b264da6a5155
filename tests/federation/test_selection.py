"""Clients are selected by what they report: Oort against a plain loop, its limiting cases, and exact resumes."""

from __future__ import annotations

import math

import numpy as np
import pytest

import raypfl
from raypfl.common import rng
from raypfl.common.errors import ConfigError
from raypfl.federation.selection import Candidates, Oort, Reports, Selection
from raypfl.runs.planning.plan import plan
from tests.support.runs import TIMED, Interrupt, experiment, same_tables

NUM_CLIENTS = 40
SIZES = 5 + 3 * np.arange(NUM_CLIENTS) % 17
SECONDS = 1.0 + (7 * np.arange(NUM_CLIENTS) % 13)


def loss_of(client: int, round: int) -> float:
    return (1.0 + client % 5) * 0.97**round


def first_to_arrive(purpose: str, round: int, weight_of_client: dict[int, float], size: int) -> list[int]:
    """Sample without replacement, in proportion to weights, by exponential waiting times."""
    arrivals = []
    for client, weight in weight_of_client.items():
        uniform = float(rng.uniform(rng.keys(0, purpose, round, [client]))[0])
        arrivals.append((-math.log1p(-uniform) / weight, client))
    return [client for _, client in sorted(arrivals)[:size]]


def cohorts_of_plain_loop(rounds: int, size: int, step: float, window: int, most: int) -> list[list[int]]:
    """Oort's Algorithm 1, client by client, with dictionaries."""
    utility: dict[int, float] = {}
    last: dict[int, int] = {}
    times: dict[int, int] = {}
    history: list[float] = []
    preferred = step
    cohorts = []
    for round in range(1, rounds + 1):
        penalty = {}
        for client in range(NUM_CLIENTS):
            penalty[client] = (preferred / SECONDS[client]) ** 2 if SECONDS[client] > preferred else 1.0

        epsilon = max(0.9 * 0.98 ** (round - 1), 0.2)
        new = [client for client in range(NUM_CLIENTS) if client not in last]
        old = [client for client in last if times[client] < most]
        places = min(size - int(epsilon * size), len(old))
        explored = min(size - places, len(new))
        places = min(size - explored, len(old))

        cohort = []
        if places:
            bound = float(np.percentile([utility[client] for client in old], 95))
            score = {}
            for client in sorted(old):
                uncertainty = math.sqrt(0.1 * math.log(round) / last[client])
                score[client] = (min(utility[client], bound) + uncertainty) * penalty[client]
            cut = 0.95 * sorted(score.values(), reverse=True)[places - 1]
            pool = {client: value for client, value in score.items() if value >= cut}
            cohort += first_to_arrive("oort exploits", round, pool, places)
        cohort += first_to_arrive("oort explores", round, {client: penalty[client] for client in new}, explored)
        cohorts.append(sorted(cohort))

        for client in cohort:
            loss = loss_of(client, round)
            utility[client] = float(SIZES[client]) * math.sqrt(loss**2)
            last[client] = round
            times[client] = times.get(client, 0) + 1
        history.append(sum(utility[client] for client in sorted(cohort)))
        if len(history) >= 2 * window and sum(history[-2 * window : -window]) > sum(history[-window:]):
            preferred += step
    return cohorts


def selected(selection: Selection, rounds: int, size: int, seconds: np.ndarray = SECONDS) -> tuple[list, dict]:
    """The cohorts of rounds in which all clients report their loss, and the state at the end."""
    state = selection.start(SIZES, seconds)
    cohorts = []
    for round in range(1, rounds + 1):
        candidates = Candidates(round, 0, np.arange(NUM_CLIENTS), size)
        cohort = np.sort(selection.select(state, candidates))
        losses = np.array([loss_of(client, round) for client in cohort.tolist()])
        nobody = np.zeros(0, dtype=np.int64)
        selection.update(state, Reports(round, cohort, losses, seconds[cohort], nobody, nobody))
        cohorts.append(cohort.tolist())
    return cohorts, state


def test_oort_is_its_algorithm_client_by_client():
    oort = Oort(pacer_step=3.0, window=3, most_rounds=6)
    cohorts, state = selected(oort, rounds=25, size=8)
    assert cohorts == cohorts_of_plain_loop(25, 8, step=3.0, window=3, most=6)
    # The pacer, the list of those that took part enough, and both kinds of draw were in use.
    assert state["preferred_seconds"] > 3.0 and (state["num_rounds"] == 6).any()
    assert (state["last_round"] > 0).all() and max(SECONDS) > 3.0


def test_oort_that_only_explores_draws_unseen_clients_uniformly_whatever_they_report():
    explorer = Oort(exploration=1.0, exploration_min=1.0, exploration_decay=1.0, pacer_step=2.0, penalty=0.0)
    cohorts, _ = selected(explorer, rounds=5, size=8)
    assert sorted(client for cohort in cohorts for client in cohort) == list(range(NUM_CLIENTS))

    candidates = [Candidates(1, seed, np.arange(NUM_CLIENTS), 8) for seed in range(2000)]
    state = explorer.start(SIZES, SECONDS)
    selections = [explorer.select(state, of_seed) for of_seed in candidates]
    counts = np.bincount(np.concatenate(selections), minlength=NUM_CLIENTS)
    # Each count is binomial: 2000 draws with a chance of 1/5.
    assert abs(counts - 400).max() < 4.5 * math.sqrt(400 * 0.8)


def test_exploration_prefers_short_turns_and_exploitation_large_losses():
    first, _ = selected(Oort(pacer_step=1.0, penalty=20.0, exploration=1.0), rounds=1, size=3)
    assert set(first[0]) <= set(np.flatnonzero(SECONDS == 1.0))

    greedy = Oort(exploration=0.0, cut_off=1.0, clip=1.0, most_rounds=None)
    state = greedy.start(SIZES, SECONDS)
    state["last_round"][:] = 1
    state["statistical"] = np.arange(NUM_CLIENTS, dtype=float)
    assert sorted(greedy.select(state, Candidates(2, 0, np.arange(NUM_CLIENTS), 4))) == [36, 37, 38, 39]


def test_clients_that_took_part_enough_are_selected_only_if_nobody_else_is_left():
    cohorts, state = selected(Oort(most_rounds=2), rounds=12, size=10)
    assert all(len(set(cohort)) == 10 for cohort in cohorts)
    assert max(np.bincount(np.concatenate(cohorts[:8]))) == 2 and state["num_rounds"].sum() == 120


SELECTED = {**TIMED, "cohort__size": 3, "cohort__selection": "{name: oort, pacer_step: 0.2, window: 1}"}


def test_a_stopped_run_selects_after_its_resume_what_it_would_have(tmp_path):
    changes = {**SELECTED, "cohort__over_selection": 1.4, "devices__dropout": 0.1, "rounds": 8, "checkpoint__every": 0}
    whole = raypfl.run(experiment(tmp_path / "whole", **changes))
    at_random = raypfl.run(experiment(tmp_path / "random", **changes | {"cohort__selection": "null"}))
    assert whole.rounds["cohort"] != at_random.rounds["cohort"]

    stopped = raypfl.run(experiment(tmp_path / "stopped", **changes), listeners=[Interrupt(5)])
    assert stopped.status == "stopped" and stopped.round == 5
    resumed = raypfl.resume(stopped.run_dir)
    assert resumed.weights_hash == whole.weights_hash and same_tables(resumed, whole)


class RoundRobin(Selection):
    """Selects the clients whose turn it is."""

    def start(self, num_samples, seconds):
        return {"next": 0}

    def select(self, state, candidates):
        places = (state["next"] + np.arange(candidates.size)) % len(candidates.clients)
        return candidates.clients[places]

    def update(self, state, reports):
        state["next"] += len(reports.clients)


class Repeats(Selection):
    """Selects one client again and again."""

    def select(self, state, candidates):
        return np.full(candidates.size, candidates.clients[0])


def test_a_selection_of_ones_own_selects_and_what_it_cannot_select_is_refused(tmp_path):
    round_robin = f"{__name__}:RoundRobin"
    result = raypfl.run(experiment(tmp_path, cohort__size=5, cohort__selection=round_robin, rounds=3))
    assert result.rounds["cohort"].to_pylist() == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [0, 1, 2, 10, 11]]
    with pytest.raises(raypfl.RaypflError, match=r"must return the numbers of 5 different candidates in round 1"):
        raypfl.run(experiment(tmp_path, cohort__size=5, cohort__selection=f"{__name__}:Repeats"))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"cohort__selection": "oort", "cohort__size": "null"}, "has no effect, since all clients are drawn"),
        ({"cohort__selection": "{name: oort, pacer_step: 2.0}"}, "without devices.hardware there are none"),
        ({"cohort__selection": "{name: oort, window: 5}"}, "set cohort.selection.pacer_step"),
        ({"cohort__selection": "oort", "privacy__noise": 1.0}, "cohort.selection may look at losses"),
        ({"cohort__selection": "ort"}, "did you mean 'oort'"),
    ],
    ids=["everyone", "no-clock", "no-pacer", "privacy", "unknown"],
)
def test_a_selection_that_could_not_select_is_refused(tmp_path, changes, problem):
    with pytest.raises(ConfigError, match=problem):
        experiment(tmp_path, **changes)


def test_a_plan_with_a_selection_by_losses_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no plan can know who takes part"):
        plan(experiment(tmp_path, **SELECTED), lambda event: None)
