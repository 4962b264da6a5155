"""FedPTR's identities and inequalities on quadratics (Chen et al. 2023, Appendix A), and its partitions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from raypfl.common.errors import ConfigError
from raypfl.data.partitions import Traits
from raypfl.data.partitions.label_skew import Dirichlet
from raypfl.methods.global_model.fedptr import pull_toward_anchor
from raypfl.models import FlatModel
from tests.support.federation import assert_close

D = 12
MODEL = FlatModel(lambda: nn.Linear(D - 1, 1), dtype=torch.float64)


def quadratics(draws: torch.Generator, clients: int) -> tuple[Tensor, Tensor]:
    """Indefinite Hessians ``[n, D, D]`` of norm at most 1, and linear terms ``[n, D]``."""
    a = torch.randn(clients, D, D, generator=draws, dtype=torch.float64)
    a = a + a.mT
    return a / torch.linalg.matrix_norm(a, 2)[:, None, None], torch.randn(
        clients, D, generator=draws, dtype=torch.float64
    )


def slope(a: Tensor, b: Tensor, w: Tensor) -> Tensor:
    return torch.einsum("nij,nj->ni", a, w) - b


@pytest.mark.parametrize("seed", range(20))
def test_a_round_on_quadratics_obeys_the_papers_identity_and_inequalities(seed):
    draws = torch.Generator().manual_seed(seed)
    n = 10
    a, b = quadratics(draws, n)
    image_a, image_b = quadratics(draws, n)
    w = torch.randn(D, generator=draws, dtype=torch.float64).expand(n, D)
    near = slope(image_a, image_b, w)

    eta, gamma, extra = (float(x) for x in torch.rand(3, generator=draws))
    curvature = float(-torch.linalg.eigvalsh(a).min())
    lam = curvature + 0.1 + 3 * extra  # so that local problems are strongly convex
    mu = lam - curvature
    smooth = 1.0

    centre = w - eta * near
    local_gradient = slope(a, b, w)
    exact = torch.linalg.solve(a + lam * torch.eye(D, dtype=torch.float64), b + lam * centre)

    # Short of the exact solution by as much as the inexactness allows.
    error = torch.randn(n, D, generator=draws, dtype=torch.float64)
    allowed = gamma * slope(a, b, centre).norm(dim=1, keepdim=True)
    error = error / error.norm(dim=1, keepdim=True) * allowed
    inexact = exact + torch.linalg.solve(a + lam * torch.eye(D, dtype=torch.float64), error)

    def pulled(p: Tensor, anchor: Tensor) -> Tensor:
        p = p.clone().requires_grad_()
        return torch.autograd.grad(pull_toward_anchor(MODEL, "fixed")(p, None, anchor, lam), p)[0]

    def local_slope(at: Tensor) -> Tensor:
        return slope(a, b, at) + torch.stack([pulled(p, c) for p, c in zip(at, centre, strict=True)])

    apart = (local_slope(inexact) - local_slope(w)).norm(dim=1)
    assert (apart <= (smooth + lam) * (inexact - w).norm(dim=1) + 1e-9).all()  # Lemma A.1
    residual = local_slope(inexact)
    assert_close(residual, error, 1e-9)

    terms = slope(a, b, inexact) + lam * eta * near - residual
    assert_close((inexact - w).mean(0), -terms.sum(0) / (lam * n), 1e-9)  # eq. 10
    total = (local_gradient + lam * eta * near).norm(dim=1)
    size = near.norm(dim=1)

    assert (
        residual.norm(dim=1) ** 2
        <= 2 * gamma**2 * (local_gradient.norm(dim=1) ** 2 + smooth**2 * eta**2 * size**2) + 1e-9
    ).all()  # eq. 9
    assert ((exact - w).norm(dim=1) <= total / mu + 1e-9).all()  # eq. 12

    moved = (inexact - w).norm(dim=1)
    rest = gamma * eta * (smooth + lam) * size / mu
    assert (moved <= (1 + gamma) / mu * total + rest + 1e-9).all()  # eq. 13
    assert (moved**2 <= (2 + 4 * gamma**2) / mu**2 * total**2 + 4 * rest**2 + 1e-9).all()  # eq. 14


def squared_slopes(eta: float, sigma: float, rounds: int, lam: float = 1.0) -> Tensor:
    """Of the global loss after each round of exact local solutions, if the images' gradient is wrong by `sigma`.

    The clients' losses are quadratics with one and the same minimiser, 0.
    """
    draws = torch.Generator().manual_seed(0)
    n = 10
    root, w, error = (torch.randn(*shape, generator=draws, dtype=torch.float64) for shape in ((n, D, D), (D,), (D,)))
    a = root @ root.mT
    a = a / torch.linalg.matrix_norm(a, 2)[:, None, None]
    back = (lam * torch.linalg.inv(a + lam * torch.eye(D, dtype=torch.float64))).mean(0)
    total = a.mean(0)
    error = sigma * error / error.norm()
    slopes = []

    for _ in range(rounds):
        w = back @ (w - eta * (total @ w + error))
        slopes.append((total @ w).square().sum())
    return torch.stack(slopes)


def test_the_corollarys_rates_hold_if_clients_share_their_minimiser():
    assert squared_slopes(0.01, 0.0, 1000)[-1] < 1e-20
    floor, double_eta, double_sigma = (
        float(squared_slopes(eta, sigma, 1000)[-1]) for eta, sigma in ((0.01, 1.0), (0.02, 1.0), (0.01, 2.0))
    )
    assert double_sigma / floor == pytest.approx(4) and double_eta / floor == pytest.approx(4, rel=0.1)
    bounded = [t * float(squared_slopes(t**-0.5, 1.0, t).min()) for t in (100, 1000, 5000)]
    assert max(bounded) < 2 * min(bounded)


def shares(alpha: float, clients: int, seed: int, **options) -> tuple[np.ndarray, np.ndarray]:
    """Samples of 10 classes of 600, by class and client; and the owners."""
    labels = np.repeat(np.arange(10), 600)
    partition = Dirichlet(clients=clients, alpha=alpha, min_samples=25, tries=200, **options)
    owners = partition.owners(Traits(labels=labels, num_classes=10), seed)
    return np.stack([np.bincount(owners[labels == c], minlength=clients) for c in range(10)]), owners


@pytest.mark.parametrize(("alpha", "largest"), [(0.01, 0.94), (0.04, 0.82)])
def test_partitions_are_disjoint_and_complete_and_as_skewed_as_the_papers(alpha, largest):
    partitions = [shares(alpha, 10, seed) for seed in range(40)]
    for counts, owners in partitions:
        assert counts.sum() == 6000 == len(owners) and (counts.sum(1) == 600).all() and counts.sum(0).min() >= 25
    assert np.mean([counts.max(1).mean() / 600 for counts, _ in partitions]) == pytest.approx(largest, abs=0.05)
    assert np.array_equal(partitions[3][1], shares(alpha, 10, 3)[1])
    assert not np.array_equal(partitions[3][1], partitions[4][1])


def test_a_skewed_partition_that_cannot_serve_all_clients_is_an_error():
    with pytest.raises(ConfigError, match=r"None of 200 Dirichlet\(0.01\) draws gives each of 40 clients 25 samples"):
        shares(0.01, 40, 0, when_short="refuse")
