"""The kernels of FL-NTK: closed form, finite width, spectra, the asymmetric one (sections 5, 8.1 and 8.2)."""

from __future__ import annotations

import math

import pytest
import torch
from torch.func import jacrev

from raypfl.analysis.theory.kernels import (
    Spectrum,
    asymmetry,
    count_common,
    gram,
    infinite_width,
    positive,
)
from tests.support.ntk import fl_round, problem, sphere, split


def of_angle(r: float) -> float:
    x = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    z = torch.tensor([[r, math.sqrt(1 - r * r)]], dtype=torch.float64)
    return float(infinite_width(x, z))


def test_the_closed_form_has_known_values():
    expected = {0.0: 0.0, 1.0: 0.5, -1.0: 0.0, 0.5: 1 / 6, -0.5: -1 / 12, math.sqrt(0.5): 0.2651650429449553}
    for r, value in expected.items():
        assert of_angle(r) == pytest.approx(value, abs=1e-15)
    for r in torch.linspace(-0.999, 0.999, 101).tolist():
        assert of_angle(r) == pytest.approx(r / 4 + r * math.asin(r) / (2 * math.pi), abs=1e-14)


def test_the_closed_form_is_symmetric_and_positive_with_half_on_its_diagonal():
    x = sphere(40, 20)
    h = infinite_width(x)
    assert torch.allclose(h, h.T, atol=1e-15) and torch.allclose(h.diagonal(), h.new_tensor(0.5), atol=1e-15)
    assert Spectrum.of(h).least > 0 and Spectrum.of(h - x @ x.T / 4).least > -1e-12
    turn = torch.linalg.qr(torch.randn(20, 20, dtype=torch.float64)).Q
    assert torch.allclose(infinite_width(x @ turn), h, atol=1e-14)


def test_finite_width_approaches_the_closed_form_with_the_square_root_of_the_width():
    x = sphere(40, 20)
    limit = infinite_width(x)
    share = limit / (x @ x.T)  # of neurons that are active on both inputs
    variance = float(((x @ x.T).square() * share * (1 - share)).sum())

    widths = [2**e for e in range(8, 15)]
    means = []
    g = torch.Generator().manual_seed(0)
    for m in widths:
        squares = []
        for _ in range(32):
            at = positive(torch.randn(m, 20, generator=g, dtype=torch.float64), x)
            away = gram(x, x, at, at) - limit
            squares.append(float(away.square().sum()))
            assert squares[-1] <= 40**2 * math.log(2 * 40**2 / 0.01) / (2 * m)  # Hoeffding, in 99 of 100 draws
        assert abs(Spectrum.of(away + limit).least - Spectrum.of(limit).least) <= torch.linalg.matrix_norm(away, 2)
        means.append(math.sqrt(sum(squares) / 32))
        assert means[-1] / math.sqrt(variance / m) == pytest.approx(1, abs=0.07)

    logs = torch.tensor([[math.log(m), math.log(v)] for m, v in zip(widths, means, strict=True)])
    centred = logs - logs.mean(0)
    assert float(centred[:, 0] @ centred[:, 1] / centred[:, 0].square().sum()) == pytest.approx(-0.5, abs=0.05)


def test_inputs_that_occur_twice_leave_no_smallest_eigenvalue_and_opposite_ones_leave_it():
    x = sphere(12, 6)
    assert abs(Spectrum.of(infinite_width(torch.cat([x, x[:1]]))).least) < 1e-12
    assert Spectrum.of(infinite_width(torch.cat([x, -x[:1]]))).least > 1e-6


def test_kernels_depend_neither_on_the_scale_of_the_weights_nor_on_the_order_of_samples():
    p = problem(m=512)
    scaled = positive(0.1 * p.u, p.x)
    order = torch.randperm(20)
    assert torch.equal(gram(p.x, p.x, scaled, scaled), p.h0)
    mixed = p.x[order]
    assert torch.allclose(gram(mixed, mixed, scaled[order], scaled[order]), p.h0[order][:, order], atol=1e-15)
    assert torch.allclose(infinite_width(mixed), infinite_width(p.x)[order][:, order], atol=1e-15)
    assert Spectrum.of(p.h0).least >= -1e-10


def test_counts_are_the_same_in_chunks_of_any_size():
    p = problem(m=1000)
    at = positive(p.u, p.x)
    whole = count_common(at, at)
    assert torch.equal(whole, count_common(at, at, neurons=7)) and whole.dtype == torch.int64
    assert torch.equal(whole, (at.int()[:, None] * at.int()[None]).sum(2))


def columns(p, parts, u, snapshots, k):
    """The asymmetric kernel at local step k: rows of the server's weights, columns of each client's."""
    h = torch.empty(len(p.x), len(p.x), dtype=torch.float64)
    rows = positive(u, p.x)
    for part, models in zip(parts, snapshots, strict=True):
        h[:, part] = gram(p.x, p.x[part], rows, positive(models[k], p.x[part]))
    return h


def test_the_rounds_kernel_is_the_product_of_the_servers_and_the_clients_gradients():
    p = problem(m=256)
    parts = split(20, 4)
    simulated, snapshots = fl_round(p, p.u, parts, 4, 0.3)
    rows = jacrev(lambda u: p.network.outputs(u, p.x))(p.u).flatten(1)
    for k in range(4):
        h = columns(p, parts, p.u, snapshots, k)
        for part, models in zip(parts, snapshots, strict=True):
            client_rows = jacrev(lambda w, part=part: p.network.outputs(w, p.x[part]))(models[k]).flatten(1)
            assert torch.allclose(h[:, part], rows @ client_rows.T, atol=1e-12)
        assert torch.allclose(h, simulated.kernel(k), atol=1e-15), "a round puts the clients' columns together"

    assert torch.equal(simulated.kernel(0), p.h0) and torch.allclose(p.h0, p.h0.T, atol=1e-15)
    assert asymmetry(simulated.kernel(0)).fraction < 1e-15


def test_a_clients_model_changes_its_own_columns_only():
    p = problem(m=256)
    parts = split(20, 4)
    _, snapshots = fl_round(p, p.u, parts, 3, 0.3)
    before = columns(p, parts, p.u, snapshots, 2)
    snapshots[1][2] = torch.randn_like(p.u)
    changed = (columns(p, parts, p.u, snapshots, 2) != before).any(0)
    of_other_clients = torch.ones(20, dtype=torch.bool)
    of_other_clients[parts[1]] = False

    assert changed[parts[1]].any() and not changed[of_other_clients].any()


def test_asymmetry_shrinks_with_width():
    def mean(m: int) -> float:
        fractions = []
        for seed in range(6):
            p = problem(16, 8, m, seed=seed, paired=True)
            rate = 0.5 / Spectrum.of(p.h0).largest
            parts = split(16, 4)
            u = p.u
            for _ in range(10):
                simulated, _ = fl_round(p, u, parts, 4, rate)
                fractions.append(asymmetry(simulated.kernel(3)).fraction)
                u = simulated.after

        return sum(fractions) / len(fractions)

    narrow = mean(512)
    wide = mean(2048)
    assert wide > 0 and 1.6 <= narrow / wide <= 4
