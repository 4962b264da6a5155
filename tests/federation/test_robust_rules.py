"""Robust rules and attacks, each beside loops over clients and coordinates in float64."""

from __future__ import annotations

import itertools
import statistics

import numpy as np
import pytest
import torch

from raypfl.common.errors import ConfigError
from raypfl.experiment import Experiment
from raypfl.federation.robustness import Aggregation, Updates
from raypfl.federation.robustness import rules as rules_module
from raypfl.federation.robustness.attacks import Boost, Gaussian, InnerProduct, LittleIsEnough, MinMax, SignFlip
from raypfl.federation.robustness.rules import Clipping, GeometricMedian, Krum, Median, RobustLearningRate, TrimmedMean

CLIENTS = [1, 2, 3, 6, 11]


@pytest.fixture(autouse=True)
def few_columns(monkeypatch):
    """Compute three columns at once, so that seven take several portions."""
    monkeypatch.setattr(rules_module, "_COLUMNS", 3)


def rows_of(clients: int, seed: int = 0) -> torch.Tensor:
    """Rows ``float64[clients, 7]`` that have much in common; one of them is far away."""
    draws = np.random.default_rng(seed)
    rows = 100 + draws.normal(size=(clients, 7))
    rows[-1] += 30
    return torch.from_numpy(rows)


def norm(vector: np.ndarray) -> float:
    return float(np.sqrt((vector**2).sum()))


@pytest.mark.parametrize("clients", CLIENTS)
def test_the_median_is_that_of_each_coordinate(clients):
    rows = rows_of(clients)
    expected = [statistics.median(column.tolist()) for column in rows.T]
    assert Median().combine(rows, rows[0]).tolist() == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("clients", CLIENTS)
def test_a_trimmed_mean_leaves_out_the_same_number_at_either_end(clients):
    rows = rows_of(clients)
    left_out = {1: 0, 2: 0, 3: 0, 6: 1, 11: 3}[clients]
    expected = []
    for column in rows.T:
        middle = sorted(column.tolist())[left_out : clients - left_out]
        expected.append(sum(middle) / len(middle))
    assert TrimmedMean(fraction=0.3).combine(rows, rows[0]).tolist() == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("clients", CLIENTS)
def test_a_robust_learning_rate_turns_around_where_too_few_clients_agree(clients):
    rows = rows_of(clients)
    before = 100 + torch.from_numpy(np.random.default_rng(1).normal(size=7))
    expected = []
    for coordinate in range(7):
        updates = [float(row[coordinate] - before[coordinate]) for row in rows]
        votes = sum(1 if update > 0 else -1 for update in updates)
        direction = 1 if abs(votes) >= 0.4 * clients - 1e-9 else -1
        expected.append(float(before[coordinate]) + direction * sum(updates) / clients)
    assert RobustLearningRate(threshold=0.4).combine(rows, before).tolist() == pytest.approx(expected, rel=1e-13)


@pytest.mark.parametrize("clients", CLIENTS)
@pytest.mark.parametrize("select", [1, 4])
def test_krum_averages_the_messages_with_the_nearest_neighbours(clients, select):
    rows = rows_of(clients)
    malicious = {1: 0, 2: 0, 3: 0, 6: 1, 11: 3}[clients]
    scores = []
    for i in range(clients):
        distances = [norm(rows[i].numpy() - rows[j].numpy()) ** 2 for j in range(clients) if j != i]
        scores.append(sum(sorted(distances)[: max(1, clients - malicious - 2)]))
    best = sorted(range(clients), key=lambda i: (scores[i], i))[:select]
    expected = rows[best].mean(0)
    assert torch.allclose(Krum(fraction=0.3, select=select).combine(rows, rows[0]), expected, rtol=1e-14)


@pytest.mark.parametrize("clients", CLIENTS)
def test_the_geometric_median_takes_weiszfelds_steps(clients):
    rows = rows_of(clients).numpy()
    centre = rows.mean(0)
    for _ in range(3):
        weights = [1 / max(1e-6, norm(row - centre)) for row in rows]
        centre = sum(weight * row for weight, row in zip(weights, rows, strict=True)) / sum(weights)
    combined = GeometricMedian().combine(torch.from_numpy(rows), torch.zeros(7))
    assert combined.numpy() == pytest.approx(centre, rel=1e-13)


def test_many_steps_of_the_geometric_median_reach_the_point_where_unit_vectors_to_all_messages_cancel():
    rows = rows_of(6)
    to_rows = rows - GeometricMedian(steps=2000).combine(rows, rows[0])
    assert (to_rows / to_rows.norm(dim=1, keepdim=True)).sum(0).norm() < 1e-9


@pytest.mark.parametrize("clients", CLIENTS)
@pytest.mark.parametrize("steps", [1, 3])
def test_clipping_moves_by_the_mean_of_differences_of_bounded_norm(clients, steps):
    rows = rows_of(clients).numpy()
    before = np.full(7, 99.0)
    centre = before
    for _ in range(steps):
        differences = [row - centre for row in rows]
        centre = centre + sum(d * min(1, 2.5 / norm(d)) for d in differences) / clients
    combined = Clipping(radius=2.5, steps=steps).combine(torch.from_numpy(rows), torch.from_numpy(before))
    assert combined.numpy() == pytest.approx(centre, rel=1e-13)


@pytest.mark.parametrize("rule", [Median(), TrimmedMean(), Krum(), GeometricMedian(steps=50)])
def test_a_far_message_moves_a_rule_less_than_the_mean(rule):
    rows = rows_of(11)
    honest = rows[:-1].mean(0)
    assert (rule.combine(rows, rows[0]) - honest).norm() < 0.25 * (rows.mean(0) - honest).norm()


# Attacks


def updates(honest: int = 5, malicious: int = 2) -> Updates:
    rows = rows_of(honest + malicious) - 100
    return Updates(rows[:honest], rows[honest:], torch.Generator().manual_seed(0))


def test_simple_attacks_multiply_the_clients_own_updates():
    case = updates()
    assert torch.equal(SignFlip(scale=3.0).forge(case), -3.0 * case.malicious)
    assert torch.equal(Boost().forge(case), 7.0 * case.malicious)
    assert torch.equal(Boost(factor=2.0).forge(case), 2.0 * case.malicious)


def test_gaussian_noise_has_the_standard_deviation_of_the_update_or_the_one_that_is_set():
    wide = torch.from_numpy(np.random.default_rng(0).normal(2.0, 5.0, size=(2, 20_000)))
    wide[1] *= 10
    case = Updates(wide[:0], wide, torch.Generator().manual_seed(0))
    forged = Gaussian().forge(case)
    assert forged.std(1).numpy() == pytest.approx(wide.std(1).numpy(), rel=0.02)
    assert forged.mean(1).abs().max() < 2.0
    fixed = Gaussian(std=0.5).forge(Updates(wide[:0], wide, torch.Generator().manual_seed(1)))
    assert fixed.std(1).numpy() == pytest.approx([0.5, 0.5], rel=0.02)


def test_attacks_that_know_all_updates_send_what_their_papers_say():
    case = updates()
    honest = case.honest.numpy()
    mean = honest.mean(0)
    std = np.sqrt(((honest - mean) ** 2).mean(0))
    for row in InnerProduct(scale=0.7).forge(case):
        assert row.numpy() == pytest.approx(-0.7 * mean, rel=1e-13)
    for row in LittleIsEnough(z=1.2).forge(case):
        assert row.numpy() == pytest.approx(mean + 1.2 * std, rel=1e-13)


def test_min_max_goes_as_far_as_the_two_honest_clients_that_are_farthest_apart():
    case = updates()
    honest = case.honest.numpy()
    forged = MinMax().forge(case)[0].numpy()
    diameter = max(norm(a - b) for a, b in itertools.combinations(honest, 2))
    assert max(norm(forged - row) for row in honest) == pytest.approx(diameter, rel=1e-12)
    # It lies on the ray from the mean against the standard deviations.
    gammas = (honest.mean(0) - forged) / honest.std(0)
    assert gammas == pytest.approx([gammas[0]] * 7, rel=1e-9) and gammas[0] > 0


@pytest.mark.parametrize("attack", [InnerProduct(), LittleIsEnough(), MinMax()])
def test_attacks_that_look_at_honest_updates_stay_finite_with_one_or_none(attack):
    alone = updates(honest=0)
    assert torch.equal(attack.forge(alone), alone.malicious)
    assert attack.forge(updates(honest=1)).isfinite().all()


def test_malicious_clients_are_a_share_of_the_trained_ones_that_only_the_seed_decides():
    trained = np.array([0, 2, 3, 5, 7, 8, 9, 11, 12, 14])
    chosen = SignFlip(fraction=0.3).malicious(trained, seed=1)
    assert len(chosen) == 3 and set(chosen) <= set(trained) and list(chosen) == sorted(chosen)
    assert set(chosen) <= set(SignFlip(fraction=0.5).malicious(trained, seed=1))
    assert len(SignFlip(fraction=0.01).malicious(trained, seed=1)) == 1
    choices = {tuple(SignFlip(fraction=0.3).malicious(trained, seed=seed)) for seed in range(20)}
    assert len(choices) > 10
    with pytest.raises(ConfigError, match=r"attack.fraction is 0.99, with which all of the 10"):
        SignFlip(fraction=0.99).malicious(trained, seed=1)


class MisspellsCombine(Aggregation):
    def combin(self, messages, counts):
        return messages.mean(0)


def test_a_rule_with_a_misspelt_function_is_refused_with_that_function():
    sentence = (
        r"define combine \(did you mean it by MisspellsCombine\.combin \(test_robust_rules\.py, line \d+\)\?\)\.$"
    )
    with pytest.raises(ConfigError, match=sentence):
        Experiment(aggregation=f"{__name__}:MisspellsCombine")
