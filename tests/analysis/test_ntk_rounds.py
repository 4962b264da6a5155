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
from tests.support.ntk import fl_round, gradient, problem, simulate, split


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


@pytest.mark.parametrize("clients", [1, 4, 7])
def test_one_local_step_is_centralised_gradient_descent_for_any_partition(clients: int):
    p = problem()
    rate = 0.2
    u = w = p.u
    for _ in range(10):
        u = fl_round(p, u, split(20, clients, by=p.y), 1, rate, 1.5)[0].after
        w = w - 1.5 * rate / clients * gradient(p, w, p.x, p.y)
    assert float((u - w).abs().max()) <= 1e-12


def test_one_client_with_k_steps_is_k_steps_of_centralised_descent():
    p = problem()
    w = p.u
    u = fl_round(p, p.u, split(20, 1), 6, 0.1)[0].after
    for _ in range(6):
        w = w - 0.1 * gradient(p, w, p.x, p.y)
    assert float((u - w).abs().max()) <= 1e-12


def test_clients_with_the_same_data_are_one_client():
    p = problem()
    everything = torch.arange(20)
    three_clients = simulate(p, [everything] * 3, 4, 0.1, 5)[1]
    one_client = simulate(p, [everything], 4, 0.1, 5)[1]
    assert float((three_clients - one_client).abs().max()) <= 1e-12


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


def test_the_frozen_kernel_predicts_better_the_wider_the_network_is():
    def mean_error(m: int) -> float:
        errors = []
        for seed in range(6):
            p = problem(16, 8, m, seed=seed)
            parts = split(16, 4)
            rate = rate_of(p, 0.5)
            observed = simulate(p, parts, 4, rate, 10)[0]
            end = float(observed[-1].square().sum())
            predicted = float(even(parts, p.h0, 4, rate).errors(observed[0], 10)[-1])
            errors.append(abs(predicted / end - 1))

        return sum(errors) / len(errors)

    assert mean_error(512) > mean_error(2048) > mean_error(8192)


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


def test_local_steps_obey_their_deterministic_bounds_at_any_width():
    for m in (16, 256):
        p = problem(m=m)
        parts = split(20, 4, by=p.y)
        n = 20
        steps = 4
        rate = 1.25 / (n * steps)
        u = p.u

        for _ in range(5):
            simulated, snapshots = fl_round(p, u, parts, steps, rate)
            error = float((p.y - p.network.outputs(u, p.x)).norm())
            for part, models in zip(parts, snapshots, strict=True):
                outputs = [p.network.outputs(w, p.x[part]) for w in models]
                first = float((outputs[0] - p.y[part]).norm())
                for k in range(steps):
                    local_error = float((outputs[k] - p.y[part]).norm())
                    assert float((outputs[k + 1] - outputs[k]).norm()) <= rate * len(part) * local_error
                    assert float((outputs[k] - outputs[0]).norm()) <= 2 * rate * n * steps * first  # L1

            factor = 1 + 2 * rate * n * steps
            assert all(float((p.y - local).norm()) <= 2 * factor * error for local in simulated.local)  # L2
            bound = 2 * rate * steps * factor * math.sqrt(n) / (len(parts) * math.sqrt(m)) * error
            assert float((simulated.after - simulated.before).norm(dim=1).max()) <= bound  # L3
            assert simulated.terms().second_order <= (2 * rate * n * steps * factor / len(parts) * error) ** 2
            u = simulated.after


def test_the_order_of_clients_changes_rounding_only():
    p = problem(m=256)
    parts = split(20, 4)
    assert torch.allclose(simulate(p, parts, 4, 0.2, 5)[1], simulate(p, parts[::-1], 4, 0.2, 5)[1], atol=1e-12)


def test_wide_networks_stay_within_the_radii_and_kernels_within_the_distances_of_the_lemmas():
    """F1, F2, G1 and the four bounds of a round, each with the largest movement that is seen as radius."""
    p = problem(m=4096)
    parts = split(20, 4)
    n = 20
    steps = 4
    values = Spectrum.of(p.h0)
    rate = 1 / (steps * values.largest)
    rho = rate * steps / len(parts)
    first = float((p.network.outputs(p.u, p.x) - p.y).norm())
    far = 8 * math.sqrt(n) * first / (math.sqrt(4096) * values.least)

    simulations = []
    weights = []
    u = p.u
    for _ in range(10):
        simulated, snapshots = fl_round(p, u, parts, steps, rate)
        for part, models in zip(parts, snapshots, strict=True):
            errors = [float((p.network.outputs(w, p.x[part]) - p.y[part]).norm()) for w in models]
            assert all(e**2 <= (1 - rate * values.least / 2) ** k * errors[0] ** 2 for k, e in enumerate(errors))
            reach = 4 * math.sqrt(n) * errors[0] / (math.sqrt(4096) * values.least)
            assert all(float((w - u).norm(dim=1).max()) <= reach for w in models)
            weights += models
        assert float((simulated.after - p.u).norm(dim=1).max()) <= far
        simulations.append(simulated)
        u = simulated.after

    radius = max(float((w - p.u).norm(dim=1).max()) for w in weights)
    assert n**2 * math.exp(-4096 * radius / 10) <= 0.01, "else the bounds say nothing"

    unstable = (p.x @ p.u.T).abs() <= radius
    assert float(unstable.sum(1).max()) <= 4 * 4096 * radius

    factor = 1 + 2 * rate * n * steps
    for simulated in simulations:
        assert all(float((simulated.kernel(k) - p.h0).norm()) <= 2 * n * radius for k in range(steps))
        error = float(simulated.error.square().sum())
        terms = simulated.terms()
        drift = 4 * n * radius * factor + 2 * rate * values.largest * steps * n
        assert terms.descent <= 2 * rho * error * (drift - values.least)
        assert max(terms.unstable_kernel, terms.unstable_output) <= 16 * rho * factor * n * radius * error
        assert terms.second_order <= (2 * rho * n * factor) ** 2 * error


def test_first_outputs_have_half_the_variance_of_the_weights():
    squares = []
    for seed in range(200):
        p = problem(20, 10, 64, sigma=0.5, seed=seed)
        squares.append(float(p.network.outputs(p.u, p.x).square().sum()))
    sums = torch.tensor(squares)
    assert abs(float(sums.mean()) - 20 * 0.5**2 / 2) <= 4 * float(sums.std()) / 200**0.5


@pytest.mark.parametrize(("clients", "steps"), [(1, 1), pytest.param(4, 5, marks=pytest.mark.thorough)])
def test_weights_move_to_the_nearest_interpolation_for_any_clients_and_steps(clients: int, steps: int):
    p = problem(12, 10, m=1024)
    error, u = simulate(p, split(12, clients, by=p.y), steps, rate_of(p, 1 / steps), 60 * clients)
    assert float(error[-1].norm()) < 0.1 * float(error[0].norm())
    away = torch.linalg.solve(p.h0, error[0] - error[-1])
    assert float((u - p.u).norm() / (away @ p.h0 @ away).sqrt()) == pytest.approx(1, abs=0.03)
