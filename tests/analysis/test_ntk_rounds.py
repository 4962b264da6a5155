"""The error after a round of federated averaging, exactly and with a frozen kernel (FL-NTK, section 8.3)."""

from __future__ import annotations

import math

import pytest
import torch

from raypfl.analysis.theory.flntk import TheoremSetting
from raypfl.analysis.theory.kernels import Spectrum
from raypfl.analysis.theory.rounds import RoundMap
from raypfl.analysis.theory.scaling import Scaling, numbers_around
from raypfl.analysis.theory.two_layer import Terms
from tests.support.ntk import fl_round, problem, simulate, split


def rate_of(p, c: float) -> float:
    return c / Spectrum.of(p.h0).largest


def even(parts, kernel, steps: int, rate: float, server_rate: float = 1.0) -> RoundMap:
    """The map of a round in which all clients have the same weight, rate and number of steps."""
    clients = len(parts)
    return RoundMap.of(kernel, parts, [1 / clients] * clients, [rate] * clients, [steps] * clients, server_rate)


def total(terms: Terms) -> float:
    return terms.descent + terms.unstable_kernel + terms.unstable_output + terms.second_order


@pytest.mark.parametrize("server_rate", [1.0, 1.7])
def test_four_terms_add_up_to_the_change_of_the_error(server_rate: float):
    p = problem(16, 8)
    parts = split(16, 4)
    rate = rate_of(p, 0.5)
    u = p.u

    for _ in range(5):
        simulated, _ = fl_round(p, u, parts, 4, rate, server_rate)
        terms = simulated.terms()
        before = float((p.y - p.network.outputs(simulated.before, p.x)).square().sum())
        after = float((p.y - p.network.outputs(simulated.after, p.x)).square().sum())

        assert math.isclose(before + total(terms), after, rel_tol=1e-10)
        assert terms.descent < 0 < terms.second_order
        assert terms.descent == pytest.approx(
            -2 * server_rate * rate * simulated.effective_eigenvalue * before, rel=1e-12
        ), "rho = eta K/N, K = N"
        u = simulated.after


@pytest.mark.parametrize("by_label", [False, True])
def test_the_frozen_kernel_predicts_the_simulation(by_label: bool):
    p = problem(m=4096)
    parts = split(20, 4, by=p.y if by_label else None)
    observed = simulate(p, parts, 5, rate_of(p, 0.2), 20)[0]
    predicted = even(parts, p.h0, 5, rate_of(p, 0.2)).errors(observed[0], 20)

    assert torch.allclose(predicted, observed.square().sum(1), rtol=0.1)

    wrong = even(parts, p.h0, 1, rate_of(p, 0.2)).errors(observed[0], 20)
    assert not torch.allclose(wrong, observed.square().sum(1), rtol=0.1), (
        "another number of steps is another prediction"
    )


def test_the_round_map_is_the_product_of_local_steps_and_its_eigenvalues_are_real():
    p = problem(m=512)
    parts = split(20, 3)
    rates = [0.1, 0.2, 0.05]
    steps = [4, 1, 7]
    weights = [0.5, 0.2, 0.3]
    round_map = RoundMap.of(p.h0, parts, weights, rates, steps, 1.3)

    error = torch.randn(20, dtype=torch.float64)
    moved = torch.zeros(20, dtype=torch.float64)
    for part, w, r, k in zip(parts, weights, rates, steps, strict=True):
        local_error = error[part].clone()
        for _ in range(k):
            moved[part] += w * r * local_error
            local_error = local_error - r * p.h0[part][:, part] @ local_error

    assert torch.allclose(round_map.matrix @ error, error - 1.3 * p.h0 @ moved, atol=1e-13)

    values = torch.linalg.eigvals(round_map.matrix)
    assert float(values.imag.abs().max()) <= 1e-10
    assert float(values.abs().max()) == pytest.approx(round_map.spectral_radius, rel=1e-9)
    assert float(torch.linalg.matrix_norm(round_map.matrix, 2)) == pytest.approx(round_map.norm, rel=1e-12)


def test_rounds_grow_with_clients_and_fall_with_steps():
    p = problem(60, 20, m=2048)

    def rounds(clients: int, steps: int) -> int:
        parts = split(60, clients)
        return even(parts, p.h0, steps, 0.05).rounds_to(p.network.outputs(p.u, p.x) - p.y, 0.1)

    assert abs(rounds(4, 1) - 2 * rounds(2, 1)) <= 1 and abs(rounds(2, 1) - 2 * rounds(2, 2)) <= 1
    observed = simulate(p, split(60, 2), 5, 0.05, 20)[0].square().sum(1)
    assert abs(int((observed > 0.1 * observed[0]).sum()) - rounds(2, 5)) <= 1


def test_rounds_by_clients_and_steps_are_those_of_simulated_runs_with_samples_dealt_at_random():
    p = problem(24, 10, m=1024, paired=True)
    setting = TheoremSetting(parts=split(24, 2), width=1024, steps=1, rate=0.1)
    predicted = Scaling.of(setting, p.h0, -p.y, 0.2, clients=[2, 4], steps=[1, 3])
    for clients, by_steps in zip(predicted.clients, predicted.rounds, strict=True):
        for steps, rounds in zip(predicted.steps, by_steps, strict=True):
            errors = simulate(p, split(24, clients), steps, 0.1, rounds + 3)[0].square().sum(1)
            reached = int((errors <= 0.2 * errors[0]).nonzero()[0])
            assert reached == pytest.approx(rounds, rel=0.05, abs=1)

    assert numbers_around(20, most=50) == [5, 10, 20, 40] and numbers_around(1, most=4) == [1, 2, 4]


def test_a_server_step_that_is_too_large_diverges_as_predicted():
    p = problem(m=512)
    parts = split(20, 4)
    round_map = even(parts, p.h0, 5, rate_of(p, 0.1), server_rate=40)
    observed = simulate(p, parts, 5, rate_of(p, 0.1), 3, server_rate=40)[0].square().sum(1)
    assert round_map.spectral_radius > 1 and observed[-1] > 10 * observed[0]
    assert round_map.rounds_to(torch.ones(20, dtype=torch.float64), 0.1) is None
