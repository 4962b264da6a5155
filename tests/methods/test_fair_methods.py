"""q-FFL, TERM and AFL by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from raypfl.federation.settings import FailureSettings
from raypfl.methods import AFL, QFFL, TERM, FedAvg
from tests.support.federation import (
    FP64,
    ONE_STEP,
    Federation,
    NormalisedConv,
    as_module,
    as_vector,
    assert_close,
    both_executors,
    both_networks,
    run_method,
    sent_per_client,
    torch_sgd,
)

DRAWN = [[0, 1, 2, 3], [1, 2, 3], [0, 3]]
P = 102
"""Parameters of NormalisedConv, which has 6 statistics."""


def received_loss(fed: Federation, theta: Tensor, client: int) -> float:
    x, y = fed.samples(client)
    net = as_module(fed.factory, theta).eval()
    return F.cross_entropy(net(x), y).item()


def trained_by_hand(fed: Federation, theta: Tensor, client: int, round: int) -> Tensor:
    net = as_module(fed.factory, theta)
    torch_sgd(net, fed.visits(client, round), lr=fed.training.lr)
    return as_vector(net)


def losses_and_models(fed: Federation, theta: Tensor, ids: list[int], round: int) -> tuple[Tensor, Tensor]:
    losses = [received_loss(fed, theta, k) for k in ids]
    models = [trained_by_hand(fed, theta, k, round) for k in ids]
    return torch.tensor(losses, dtype=theta.dtype), torch.stack(models)


@both_executors
@pytest.mark.parametrize("q", [0.5, 3.0])
def test_three_rounds_of_q_ffl_by_hand(q, executor):
    fed = run_method(QFFL(q=q), *DRAWN, executor=executor, training=FP64, factory=NormalisedConv)
    theta = fed.model.init(fed.seed)
    lipschitz = 1 / 0.1

    for round, ids in enumerate(DRAWN):
        step = torch.zeros(P, dtype=theta.dtype)
        curvature = 0.0
        statistics = torch.zeros(6, dtype=theta.dtype)
        for loss, model in zip(*losses_and_models(fed, theta, ids, round), strict=True):
            slope = lipschitz * (theta - model)[:P]
            step += loss**q * slope
            curvature += q * loss ** (q - 1) * slope @ slope + lipschitz * loss**q
            statistics += loss**q * model[P:]
        weights = sum(received_loss(fed, theta, k) ** q for k in ids)
        theta = torch.cat([theta[:P] - step / curvature, statistics / weights])

    assert_close(fed.server["theta"], theta, 1e-8)
    sent = sent_per_client(fed.ledger, 1)
    assert sent == {("down", "theta"): P + 6, ("up", "theta"): P + 6, ("up", "curvature"): 1}


@both_networks
def test_q_ffl_of_q_0_is_fedavg_with_equal_clients_to_the_bit(factory):
    fair = run_method(QFFL(q=0.0), factory=factory)
    assert torch.equal(fair.server["theta"], run_method(FedAvg(weighting="uniform"), factory=factory).server["theta"])
    by_samples = run_method(QFFL(q=0.0, weighting="samples"), factory=factory)
    assert torch.equal(by_samples.server["theta"], run_method(FedAvg(), factory=factory).server["theta"])


@both_executors
@pytest.mark.parametrize("t", [2.0, -1.5])
@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_three_rounds_of_term_by_hand(t, weighting, executor):
    method = TERM(t=t, weighting=weighting)
    fed = run_method(method, *DRAWN, executor=executor, training=FP64, factory=NormalisedConv)
    theta = fed.model.init(fed.seed)

    for round, ids in enumerate(DRAWN):
        losses, models = losses_and_models(fed, theta, ids, round)
        p = [fed.sizes[k] if weighting == "samples" else 1.0 for k in ids]
        tilted = [p_k * math.exp(t * loss) for p_k, loss in zip(p, losses, strict=True)]
        tilted = torch.tensor(tilted, dtype=theta.dtype)
        theta = tilted @ models / tilted.sum()

    assert_close(fed.server["theta"], theta, 1e-9)
    assert fed.ledger.total("down", 0) == 4 * 108 * 8
    assert fed.ledger.total("up", 0) == 4 * (108 + 1) * 8


def test_term_without_tilt_is_fedavg_and_with_much_of_it_the_worst_or_best_clients_model():
    for weighting in ("samples", "uniform"):
        flat = run_method(TERM(t=0.0, weighting=weighting), factory=NormalisedConv).server
        assert torch.equal(
            flat["theta"], run_method(FedAvg(weighting=weighting), factory=NormalisedConv).server["theta"]
        )

    for t, chosen in ((1e6, torch.argmax), (-1e6, torch.argmin)):
        fed = run_method(TERM(t=t), None, training=FP64)
        losses, models = losses_and_models(fed, fed.model.init(fed.seed), [0, 1, 2, 3], 0)
        assert_close(fed.server["theta"], models[chosen(losses)], 1e-12)


@both_executors
def test_three_rounds_of_afl_by_hand(executor):
    fed = run_method(AFL(lambda_lr=0.8), *DRAWN, executor=executor, training=FP64, factory=NormalisedConv)
    theta = fed.model.init(fed.seed)
    weights = torch.full((4,), 0.25, dtype=theta.dtype)
    iterates = []

    for round, ids in enumerate(DRAWN):
        losses, models = losses_and_models(fed, theta, ids, round)
        share = weights[ids] / weights[ids].sum()
        theta = share @ models
        iterates.append(theta)
        raised = weights.clone()
        raised[ids] += 0.8 * losses
        weights = simplex_by_bisection(raised)

    assert_close(fed.server["theta"], theta, 1e-9)
    assert_close(fed.server["lambda"], weights, 1e-9)
    assert_close(fed.method.global_model(fed.server), torch.stack(iterates).mean(0), 1e-9)
    assert sent_per_client(fed.ledger, 1) == {("down", "theta"): 108, ("up", "theta"): 108, ("up", "loss"): 1}


def simplex_by_bisection(vector: Tensor) -> Tensor:
    """Project by its definition: ``max(v - s, 0)`` with the shift s at which it sums to 1."""
    low = float(vector.min()) - 1
    high = float(vector.max())
    for _ in range(100):
        shift = (low + high) / 2
        if float((vector - shift).clamp_min(0).sum()) > 1:
            low = shift
        else:
            high = shift
    return (vector - high).clamp_min(0)


def test_afl_without_a_rate_of_lambda_trains_fedavgs_models():
    fed = run_method(AFL(lambda_lr=0.0), None, None, training=FP64)
    assert_close(
        fed.server["theta"], run_method(FedAvg(weighting="uniform"), None, None, training=FP64).server["theta"]
    )


def test_a_large_rate_of_lambda_leaves_the_worst_client_and_cohorts_without_it_change_nothing():
    fed = run_method(AFL(lambda_lr=1e6), None, training=ONE_STEP)
    start = fed.model.init(fed.seed)
    worst = max(range(4), key=lambda k: received_loss(fed, start, k))
    assert fed.server["lambda"].argmax() == worst and fed.server["lambda"].max() == 1

    before = fed.server["theta"]
    # The others learn their part only when their loss raises it, after the round.
    fed.run_rounds([k for k in range(4) if k != worst])
    assert torch.equal(fed.server["theta"], before)


class WithoutTheWorst(AFL):
    """AFL in which a client that has all of the weight fails."""

    def weighted(self, clients, theta, lam):
        if bool((lam == 1).any()):
            raise RuntimeError("out of power")
        return super().weighted(clients, theta, lam)


def test_a_cohort_whose_only_weighted_client_fails_leaves_the_model():
    failures = FailureSettings(on_client_failure="skip", retries=0)
    fed = run_method(WithoutTheWorst(lambda_lr=1e6), None, training=ONE_STEP, failures=failures)
    before = fed.server["theta"]
    fed.run_rounds(None)
    assert torch.equal(fed.server["theta"], before) and fed.cohorts[-1].present.sum() == 3
