"""PeFLL's bound and rate: values computed by hand, and the limits of the theorems."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.distributions import Independent, Normal, kl_divergence

from raypfl.analysis.theory.pefll import Smoothness, client_term, gaussian_kl, gradient_bound, meta_term, risk_bound
from raypfl.common.errors import ConfigError

CONSTANTS = Smoothness(b1=2, b2=0.5, l1=0.3, l2=0.2, l3=0.1)


@pytest.mark.parametrize(("clients", "samples", "meta"), [(90, 400, 0.181640), (900, 40, 0.0627608)])
def test_the_terms_without_divergence_have_their_reference_values(clients, samples, meta):
    assert meta_term(clients, 0.05) == pytest.approx(meta, rel=1e-5)
    assert client_term(clients, samples, 0.05) == pytest.approx(0.0151687, rel=1e-5)


def test_the_divergence_equals_torchs():
    mean = torch.randn(7, generator=torch.Generator().manual_seed(0))
    of_mean, of_zero = (Independent(Normal(m, 0.3), 1) for m in (mean, torch.zeros(7)))
    assert gaussian_kl(float(mean.square().sum()), 0.09) == pytest.approx(float(kl_divergence(of_mean, of_zero)))


def test_with_many_clients_the_meta_term_vanishes_and_the_clients_term_depends_on_their_norms():
    assert meta_term(10**8, 0.05, kl=50) < 1e-3 < meta_term(10**3, 0.05, kl=50)
    norm = 3.0
    variance = 0.5
    samples = 40
    many = client_term(10**9, samples, 0.05, kl=10**9 * gaussian_kl(norm, variance))
    assert many == pytest.approx((norm / (4 * variance * samples)) ** 0.5, rel=1e-4)
    assert client_term(90, 4000, 0.05) < client_term(90, 400, 0.05) < client_term(90, 400, 0.05, kl=1)


def test_the_bound_scales_with_the_largest_loss_and_refuses_what_it_does_not_hold_for():
    assert risk_bound(0.2, 0.1, 0.05) == pytest.approx(0.35)
    assert risk_bound(0.4, 0.1, 0.05, largest_loss=2) == pytest.approx(0.7)
    with pytest.raises(ConfigError, match="a loss from 0 to 1"):
        risk_bound(2.3, 0.1, 0.05)
    with pytest.raises(ConfigError, match="0 < delta < 1"):
        meta_term(90, 0.0)


def test_the_rate_falls_with_rounds_to_a_floor_that_falls_with_the_descriptors_batch():
    noisy = replace(CONSTANTS, gradient_variance=1, dissimilarity=0.5, hyper_variance=2, model_variance=3)
    assert CONSTANTS.of_objective == pytest.approx(2 * 0.2 + 0.25 * 0.3 + 0.1)

    def at(rounds: int, batch: int | None) -> float:
        return gradient_bound(noisy, 1.0, lr=1 / rounds**0.5, steps=1, rounds=rounds, cohort=5, batch=batch)

    whole = [at(rounds, None) for rounds in (10**6, 10**8, 10**10)]
    assert whole[0] / whole[1] == pytest.approx(10, rel=0.01) == pytest.approx(whole[1] / whole[2], rel=0.01)
    floors = [at(10**14, batch) for batch in (1, 8)]
    assert floors[0] == pytest.approx(8 * floors[1], rel=1e-4)
    assert floors[0] == pytest.approx(8 * 4 * 2 + 14 * 0.09 * 0.25 * 3, rel=1e-4)


def test_the_rate_is_that_of_its_four_terms_and_refuses_a_learning_rate_that_the_proof_does_not_allow():
    noisy = replace(CONSTANTS, gradient_variance=1.5, dissimilarity=0.7)
    value = gradient_bound(noisy, 2.0, lr=0.001, steps=10, rounds=100, cohort=4)
    smooth = noisy.of_objective

    assert value == pytest.approx(
        2 * 2.0 / (0.001 * 10 * 100)
        + 56 * 0.3**2 * 2**2 * 0.5**2 * 0.001**2 * 10**2
        + 6 * smooth * 0.001 / 4 * 1.5
        + 4 * smooth * 0.001 * 10 / 4 * 0.7
    )
    with pytest.raises(ConfigError, match=r"needs a smaller learning rate than 0.1"):
        gradient_bound(noisy, 2.0, lr=0.1, steps=10, rounds=100, cohort=4)
