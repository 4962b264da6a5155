"""How methods stand on one test: intervals, differences to the best, and ranks."""

from __future__ import annotations

from statistics import fmean

import numpy as np
import pytest

from raypfl.results.numbers import ClientScores, scores_of
from raypfl.results.pairing import bootstrap
from raypfl.results.ranking import standings as ranking
from raypfl.results.ranking.joint_draws import joint_draws
from raypfl.results.ranking.standings import Pairing, standings, standings_of_groups
from raypfl.results.run_groups import group_runs
from tests.results.test_differences import ISSUE, runs_at
from tests.support.tiers import with_quick


def scores(values, weights=None) -> ClientScores:
    values = np.asarray(values, dtype=float)
    return ClientScores(np.arange(len(values)), values, np.ones(len(values)) if weights is None else weights)


def nested_draws(values, weights, seed: int, draws: int) -> np.ndarray:
    """Draw seeds and then clients by their definition, one at a time: ``[draws, methods]``."""
    generator = np.random.default_rng(seed)
    rows = []
    for _ in range(draws):
        means = []
        for s in generator.integers(len(values), size=len(values)):
            clients = generator.integers(len(values[s]), size=len(values[s]))
            means.append(np.average(values[s][clients], axis=0, weights=weights[s][clients]))
        rows.append(np.mean(means, axis=0))
    return np.array(rows)


@pytest.mark.parametrize("clients", with_quick([6, 1200], {6}))
def test_joint_draws_are_those_of_seeds_and_then_of_clients(clients):
    generator = np.random.default_rng(1)
    values = [generator.normal(s, 1 + np.arange(3), (clients, 3)) for s in range(3)]
    weights = [np.repeat(generator.integers(1, 9, (clients, 1)), 3, axis=1).astype(float) for _ in range(3)]
    drawn = joint_draws(values, weights, same_clients=False)
    expected = nested_draws(values, weights, seed=2, draws=2000)
    assert drawn.shape == (bootstrap.DRAWS, 3)
    np.testing.assert_allclose(drawn.mean(0), expected.mean(0), atol=0.12)
    np.testing.assert_allclose(np.cov(drawn.T), np.cov(expected.T), rtol=0.15, atol=0.05)


def test_the_same_clients_in_every_seed_are_drawn_once_for_all_seeds():
    column = np.array([[0.0], [10.0]])
    drawn = joint_draws([column, column], [np.ones((2, 1))] * 2, same_clients=True)
    assert set(drawn[:, 0]) == {0.0, 5.0, 10.0}


def test_other_clients_in_every_seed_are_drawn_for_each_seed_though_there_are_as_many(monkeypatch):
    crossed = []

    def noted(values, weights, same_clients: bool) -> np.ndarray:
        crossed.append(same_clients)
        return joint_draws(values, weights, same_clients)

    monkeypatch.setattr(ranking, "joint_draws", noted)
    for second_seed in ([0, 1, 3], [0, 1, 2]):
        table = {}
        for name, level in (("a", 50.0), ("b", 60.0)):
            by_seed = [[0, 1, 2], second_seed]
            table[name] = {
                s: ClientScores(np.array(ids), np.full(3, level), np.ones(3)) for s, ids in enumerate(by_seed)
            }
        standings(table, Pairing(["a", "b"], [0, 1], True), higher_is_better=True)
    assert crossed == [False, True]


def test_a_methods_standing_is_of_its_own_score_its_distance_to_the_best_and_its_place():
    ease = np.random.default_rng(0).normal(0, 20, 12)
    seeds = range(4)
    levels = {"worse": 70.0, "good": 89.0, "best": 90.0, "twin": 90.0}
    table = {name: {s: scores(level + ease + s) for s in seeds} for name, level in levels.items()}
    rows = standings(table, Pairing(list(levels), list(seeds), False), higher_is_better=True)

    assert [rows[name].rank for name in levels] == [4, 3, 1, 1]
    assert rows["good"].difference == pytest.approx(-1) and rows["twin"].difference == 0
    # The clients' differences of 20 points are the same for both methods, so they cancel in every draw.
    assert rows["good"].difference_interval == pytest.approx((-1, -1))
    assert rows["good"].interval[1] - rows["good"].interval[0] > 5
    assert rows["good"].chance == 0 and rows["twin"].chance == 0.5
    assert rows["worse"].rank_interval == (4, 4) and rows["best"].rank_interval == (1, 1)

    # A client whose loss is infinite: without it, 0 times infinity is NaN.
    table["best"][0].values[0] = np.inf
    table["nan"] = {s: scores(np.full(12, np.nan)) for s in seeds}
    infinite = standings(table, Pairing(["best", "twin", "nan"], list(seeds), False), higher_is_better=False)
    assert [infinite[name].rank for name in ("twin", "best", "nan")] == [1, 2, 2]
    assert infinite["twin"].rank_interval == (1, 1) and infinite["nan"].rank_interval[0] > 1
    table["best"] = table["twin"]

    lower = standings(table, Pairing(list(levels), list(seeds), False), higher_is_better=False)
    assert [lower[name].rank for name in levels] == [1, 2, 3, 3]
    assert lower["good"].difference == pytest.approx(19)


def test_weights_count_clients_by_their_samples_and_one_model_on_one_test_set_counts_for_every_client():
    table = {
        "pooled": {0: scores([0.0, 100.0], np.array([3.0, 1.0])), 1: scores([0.0, 100.0], np.array([1.0, 1.0]))},
        "one model": {s: ClientScores(np.array([-1]), np.array([30.0]), np.ones(1)) for s in (0, 1)},
    }
    rows = standings(table, Pairing(list(table), [0, 1], False), higher_is_better=True)
    assert rows["pooled"].mean == pytest.approx((25 + 50) / 2)
    assert rows["one model"].interval == (30, 30) and rows["one model"].difference == pytest.approx(-7.5)
    assert 0 < rows["one model"].chance < 1


def test_clients_that_a_method_lacks_are_left_out():
    both = ClientScores(np.array([5, 2, 7]), np.array([1.0, 2.0, 3.0]), np.ones(3))
    some = ClientScores(np.array([7, 5]), np.array([30.0, 10.0]), np.ones(2))
    rows = standings({"a": {0: both}, "b": {0: some}}, Pairing(["a", "b"], [0], False), higher_is_better=True)
    assert {name: row.mean for name, row in rows.items()} == {"a": 2.0, "b": 20.0}
    assert standings({"a": {0: both}}, Pairing(["a"], [0], False), higher_is_better=True) == {}


def test_methods_are_compared_in_the_seeds_that_all_have_and_one_on_other_data_is_left_out():
    runs = runs_at({"fedavg": (91.0, 94.9, 94.3), "ditto": (93.3, 96.8), "local": (80.0, 81.0, 82.0)})
    for run in runs:
        seed = run.experiment.seed
        run.metadata["data"] = (
            f"{seed} with validation" if run.experiment.method == runs[-1].experiment.method else seed
        )
    rows = standings_of_groups(group_runs(runs), "local")
    assert set(rows) == {"fedavg", "ditto"} and {row.seeds for row in rows.values()} == {2}


def test_a_comparisons_standings_have_the_means_of_its_table_and_pair_its_methods():
    groups = group_runs(runs_at(ISSUE))
    rows = standings_of_groups(groups, "local")
    assert [row.rank for row in rows.values()] == [2, 1]
    for group in groups:
        assert rows[group.label].mean == pytest.approx(fmean(group.scores("local")))

    behind = next(row for row in rows.values() if not row.is_best)
    assert behind.difference == pytest.approx(-(2.3 + 1.9 + 3.1) / 3)
    low, high = behind.difference_interval
    assert low < behind.difference < high < 0 and behind.chance < 0.01


def test_scores_of_several_rounds_are_their_means():
    run = runs_at(ISSUE)[0]
    clients = scores_of(run, "local", "global", "weighted", [10])
    assert clients.values.mean() == pytest.approx(91.0) and set(clients.weights) == {9}
