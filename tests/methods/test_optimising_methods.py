"""FedNova, FedSAM, FedExP, FedSpeed, FedACG and Mime by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from raypfl.methods import (
    FedACG,
    FedASAM,
    FedAvg,
    FedDyn,
    FedExP,
    FedNova,
    FedProx,
    FedSAM,
    FedSpeed,
    Mime,
    MimeLite,
)
from tests.support.federation import (
    FP64,
    ONE_STEP,
    Federation,
    NormalisedConv,
    assert_close,
    both_executors,
    client_states,
    gradient,
    run_method,
    sent_per_client,
    step_by_hand,
)

DRAWN = [[0, 1, 2, 3], [1, 2, 3], [0, 3]]
P = 102
"""Parameters of NormalisedConv, which has 6 statistics."""

Batch = tuple[Tensor, Tensor]


def local(
    fed: Federation, start: Tensor, client: int, round: int, direction: Callable[[Tensor, Batch], Tensor]
) -> Tensor:
    """Return a client's model ``[P+B]`` after its steps along ``direction(w, samples)``."""
    w = start
    for samples in fed.visits(client, round):
        w = step_by_hand(fed, w, samples[0], direction(w, samples), fed.training.lr)
    return w


def moved(theta: Tensor, step: Tensor) -> Tensor:
    """Return a model after a step of its parameters."""
    return torch.cat([theta[:P] + step, theta[P:]])


def rounds_of(method, executor: str = "vectorised", **options) -> Federation:
    """Run rounds with a network that has batch norm, in float64."""
    return run_method(method, *DRAWN, **{"executor": executor, "training": FP64, "factory": NormalisedConv, **options})


def gradients_weights(steps: int, momentum: float, nesterov: bool, shrink: float) -> list[float]:
    """Weight of each gradient in SGD's move over lr, by taking its steps on one number."""
    weights = []
    for pushed in range(steps):
        position = 0.0
        velocity = 0.0
        for s in range(steps):
            pull = float(s == pushed) + shrink * position
            velocity = momentum * velocity + pull
            position -= pull + momentum * velocity if nesterov else velocity
        weights.append(-position)
    return weights


@both_executors
@pytest.mark.parametrize(
    ("method", "momentum", "nesterov"),
    [
        (FedNova(), 0.0, False),
        (FedNova(weighting="uniform"), 0.6, False),
        (FedNova(effective="gradients"), 0.6, True),
        (FedNova(mu=0.8), 0.0, False),
        (FedNova(mu=0.8), 0.6, True),
        (FedNova(mu=4.0, effective="gradients"), 0.9, False),
    ],
)
def test_three_rounds_of_fednova_by_hand(method, momentum, nesterov, executor):
    training = replace(FP64, epochs=2, momentum=momentum, nesterov=nesterov)
    fed = rounds_of(method, executor, training=training)
    theta = fed.model.init(fed.seed)

    for round, ids in enumerate(DRAWN):
        p = torch.tensor([fed.sizes[k] if method.weighting == "samples" else 1 for k in ids]).to(theta)
        p = p / p.sum()
        normalised = torch.zeros(P, dtype=theta.dtype)
        statistics = []
        tau = []
        norms = []
        for p_k, k in zip(p, ids, strict=True):
            velocity = torch.zeros(P, dtype=theta.dtype)

            def direction(w, samples, velocity=velocity, k=k, theta=theta):
                slope = gradient(fed, w, k, samples) + method.mu * (w - theta)[:P]
                velocity.mul_(momentum).add_(slope)
                return slope + momentum * velocity if nesterov else velocity.clone()

            w = local(fed, theta, k, round, direction)
            tau.append(float(len(fed.visits(k, round))))
            weights = gradients_weights(int(tau[-1]), momentum, nesterov, 0.1 * method.mu)
            norms.append(sum(map(abs, weights)))
            normalised += p_k * (w - theta)[:P] / norms[-1]
            statistics.append(p_k / norms[-1] * w[P:])

        counts = tau if method.effective == "steps" else norms
        effective = p @ torch.tensor(counts, dtype=theta.dtype)
        share = sum(p_k / norm for p_k, norm in zip(p, norms, strict=True))
        theta = torch.cat([theta[:P] + effective * normalised, sum(statistics) / share])

    assert_close(fed.server["theta"], theta, 1e-8)
    up = {name: count for (direction, name), count in sent_per_client(fed.ledger, 1).items() if direction == "up"}
    assert up == {"theta": 108, "normaliser": 1}


def test_fednova_with_equal_steps_is_fedavg():
    equal = replace(FP64, steps=3)
    assert_close(
        rounds_of(FedNova(), training=equal).server["theta"], rounds_of(FedAvg(), training=equal).server["theta"]
    )

    other = replace(equal, momentum=0.5)
    nova = rounds_of(FedNova(effective="gradients"), training=other)
    assert_close(nova.server["theta"], rounds_of(FedAvg(), training=other).server["theta"])
    nova = rounds_of(FedNova(effective="gradients", mu=0.4), training=equal)
    assert_close(nova.server["theta"], rounds_of(FedProx(mu=0.4), training=equal).server["theta"])


def perturbed_gradient(fed: Federation, w: Tensor, client: int, samples: Batch, rho: float, nu: float | None) -> Tensor:
    """Return the gradient of SAM or, with `nu`, of ASAM, tensor by tensor."""
    g = gradient(fed, w, client, samples)
    factors = torch.ones(P, dtype=w.dtype)
    if nu is not None:
        for name in ("conv.weight", "norm.weight", "head.weight"):
            factors[fed.model.mask(name)[:P]] = w[:P][fed.model.mask(name)[:P]].abs() + nu
    step = rho * factors**2 * g / (factors * g).norm()
    return gradient(fed, moved(w, step), client, samples)


@both_executors
@pytest.mark.parametrize(("method", "nu"), [(FedSAM(rho=0.3), None), (FedASAM(rho=0.5, nu=0.1), 0.1)])
def test_three_rounds_of_fedsam_and_fedasam_by_hand(method, nu, executor):
    fed = rounds_of(method, executor)
    theta = fed.model.init(fed.seed)
    for round, ids in enumerate(DRAWN):
        rows = []
        for k in ids:

            def direction(w, samples, k=k):
                return perturbed_gradient(fed, w, k, samples, method.rho, nu)

            rows.append(local(fed, theta, k, round, direction))
        weights = torch.tensor([fed.sizes[k] for k in ids]).to(theta)
        theta = weights @ torch.stack(rows) / weights.sum()

    assert_close(fed.server["theta"], theta, 1e-9)
    assert sent_per_client(fed.ledger, 1) == {("down", "theta"): 108, ("up", "theta"): 108}


@pytest.mark.parametrize("method", [FedSAM(rho=0.0), FedASAM(rho=0.0)], ids=repr)
def test_fedsam_without_perturbation_is_fedavg_to_the_bit(method):
    plain, flat = (run_method(m, factory=NormalisedConv).server["theta"] for m in (FedAvg(), method))
    assert torch.equal(plain, flat)


@both_executors
@pytest.mark.parametrize("eps", [1e-3, 100.0])
def test_three_rounds_of_fedexp_by_hand(eps, executor):
    fed = rounds_of(FedExP(eps=eps), executor)
    theta = fed.model.init(fed.seed)
    rates = []
    for round, ids in enumerate(DRAWN):
        rows = torch.stack([local(fed, theta, k, round, lambda w, s, k=k: gradient(fed, w, k, s)) for k in ids])
        moves = (rows - theta)[:, :P]
        mean = moves.mean(0)
        rates.append(max(1.0, float((moves**2).sum() / (2 * len(ids) * (mean @ mean + eps)))))
        previous = theta
        theta = torch.cat([theta[:P] + rates[-1] * mean, rows.mean(0)[P:]])

    assert_close(fed.server["theta"], theta, 1e-9)
    assert_close(fed.method.global_model(fed.server), (theta + previous) / 2, 1e-9)
    assert (max(rates) > 1.2) == (eps < 1)
    up = {name: count for (direction, name), count in sent_per_client(fed.ledger, 1).items() if direction == "up"}
    assert up == {"theta": 108, "squared": 1}


def test_fedexp_that_need_not_extrapolate_is_fedavg_to_the_bit():
    plain = run_method(FedAvg(weighting="uniform"), [0], [1], [3], factory=NormalisedConv)
    alone = run_method(FedExP(eps=0.0), [0], [1], [3], factory=NormalisedConv)
    assert torch.equal(alone.server["theta"], plain.server["theta"])


@both_executors
@pytest.mark.parametrize(
    "method", [FedSpeed(alpha=0.3, rho=0.2), FedSpeed(alpha=0.3, rho=0.2, normalised=True, duals="all")], ids=repr
)
def test_three_rounds_of_fedspeed_by_hand(method, executor):
    fed = rounds_of(method, executor)
    theta = fed.model.init(fed.seed)
    duals = torch.zeros(4, P, dtype=theta.dtype)

    for round, ids in enumerate(DRAWN):
        rows = []
        for k in ids:

            def direction(w, samples, k=k, theta=theta):
                first = gradient(fed, w, k, samples)
                step = 0.2 * first / (first.norm() if method.normalised else 1.0)
                second = gradient(fed, moved(w, step), k, samples)
                return second + 0.3 * ((w - theta)[:P] + duals[k])

            rows.append(local(fed, theta, k, round, direction))
        for k, w in zip(ids, rows, strict=True):
            duals[k] += (w - theta)[:P]
        mean_dual = duals.mean(0) if method.duals == "all" else duals[ids].mean(0)
        theta = moved(torch.stack(rows).mean(0), mean_dual)

    assert_close(fed.server["theta"], theta, 1e-8)
    assert_close(client_states(fed, "dual"), duals, 1e-8)
    assert sent_per_client(fed.ledger, 1) == {("down", "theta"): 108, ("up", "theta"): 108}


def test_fedspeed_of_all_clients_duals_is_feddyn_without_perturbation():
    speed = rounds_of(FedSpeed(alpha=0.3, rho=0.0, duals="all"))
    dyn = rounds_of(FedDyn(alpha=0.3))
    assert_close(speed.server["theta"], dyn.server["theta"], 1e-12)
    assert_close(client_states(speed, "dual"), client_states(dyn, "linear") / -0.3, 1e-12)

    everybody = {"training": FP64, "factory": NormalisedConv}
    a, b = (run_method(FedSpeed(duals=duals), None, None, **everybody) for duals in ("all", "cohort"))
    assert_close(a.server["theta"], b.server["theta"], 1e-12)


@both_executors
def test_three_rounds_of_fedacg_by_hand(executor):
    fed = rounds_of(FedACG(lam=0.7, beta=0.2), executor)
    theta = fed.model.init(fed.seed)
    v = torch.zeros(P, dtype=theta.dtype)
    for round, ids in enumerate(DRAWN):
        ahead = moved(theta, 0.7 * v)
        rows = []
        for k in ids:

            def direction(w, samples, k=k, ahead=ahead):
                return gradient(fed, w, k, samples) + 2 * 0.2 * (w - ahead)[:P]

            rows.append(local(fed, ahead, k, round, direction))
        v = 0.7 * v + torch.stack([w - ahead for w in rows]).mean(0)[:P]
        theta = torch.cat([theta[:P] + v, torch.stack(rows).mean(0)[P:]])

    assert_close(fed.server["theta"], theta, 1e-9)
    assert_close(fed.method.global_model(fed.server), theta, 1e-9)
    assert sent_per_client(fed.ledger, 1) == {("down", "theta"): 108, ("up", "theta"): 108}


def test_fedacg_starts_as_fedprox_and_without_both_is_fedavg():
    first = run_method(FedACG(beta=0.2), None, training=FP64).server["theta"]
    assert_close(first, run_method(FedProx(mu=0.4, weighting="uniform"), None, training=FP64).server["theta"])
    plain = rounds_of(FedACG(lam=0.0, beta=0.0)).server["theta"]
    assert_close(plain, rounds_of(FedAvg(weighting="uniform")).server["theta"])


@both_executors
@pytest.mark.parametrize("kind", [MimeLite, Mime])
def test_three_rounds_of_mime_and_mimelite_by_hand(kind, executor):
    decay = 0.05
    fed = rounds_of(kind(beta=0.8), executor, training=replace(FP64, weight_decay=decay))
    theta = fed.model.init(fed.seed)
    m = torch.zeros(P, dtype=theta.dtype)

    def slope(w, k, samples=None):
        return gradient(fed, w, k, samples) + decay * w[:P]

    for round, ids in enumerate(DRAWN):
        c = torch.stack([slope(theta, k) for k in ids]).mean(0)
        rows = []
        for k in ids:

            def direction(w, samples, k=k, theta=theta, c=c, m=m):
                g = slope(w, k, samples)
                if kind is Mime:
                    g = g - slope(theta, k, samples) + c
                return 0.2 * g + 0.8 * m

            rows.append(local(fed, theta, k, round, direction))
        theta = torch.stack(rows).mean(0)
        m = 0.2 * c + 0.8 * m

    assert_close(fed.server["theta"], theta, 1e-9)
    assert_close(fed.server["m"], m, 1e-9)
    sent = sent_per_client(fed.ledger, 1)
    down = 108 + P * (2 if kind is Mime else 1)
    assert sum(count for (direction, _), count in sent.items() if direction == "down") == down
    assert sum(count for (direction, _), count in sent.items() if direction == "up") == 108 + P


def test_mimelite_without_momentum_is_fedavg_and_mimes_clients_take_the_same_full_step():
    lite = run_method(MimeLite(beta=0.0), factory=NormalisedConv).server["theta"]
    assert torch.equal(lite, run_method(FedAvg(weighting="uniform"), factory=NormalisedConv).server["theta"])

    fed = run_method(Mime(beta=0.0), None, training=ONE_STEP)
    start = fed.model.init(fed.seed)
    c = torch.stack([gradient(fed, start, k) for k in range(4)]).mean(0)
    assert_close(fed.server["theta"], start - 0.1 * c, 1e-12)
