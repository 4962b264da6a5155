"""The kernels of FL-NTK: closed form, finite width, spectra, the asymmetric one (sections 5, 8.1 and 8.2)."""

from __future__ import annotations

import math

import pytest
import torch
from torch.func import jacrev

from raypfl.analysis.theory import kernels
from raypfl.analysis.theory.kernels import (
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
    # Also where two inputs are one, up to rounding.
    torch.testing.assert_close(
        infinite_width(sphere(40, 20)).diagonal(), torch.full((40,), 0.5).double(), rtol=1e-15, atol=0
    )


def test_asymmetry_is_the_share_of_the_antisymmetric_part_and_the_least_eigenvalue_of_the_other():
    shares = asymmetry(torch.tensor([[2.0, 3.0], [-1.0, 2.0]], dtype=torch.float64))
    assert shares.fraction == pytest.approx((8 / 18) ** 0.5) and shares.least_symmetric == pytest.approx(1.0)


def test_counts_are_the_same_in_chunks_of_any_size(monkeypatch: pytest.MonkeyPatch):
    p = problem(m=1000)
    at = positive(p.u, p.x)
    whole = count_common(at, at)
    monkeypatch.setattr(kernels, "EXACT", 7)
    assert torch.equal(whole, count_common(at, at)) and whole.dtype == torch.int64
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
