"""Methods with personal models beside a global one follow their papers, and equal each other in limiting cases."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

import raypfl
from raypfl.methods import APFL, MTL, FedAvg, FedAvgFT, Local, PartialPersonalization, PFedMe
from tests.support.federation import (
    FP32,
    FP64,
    ONE_STEP,
    Federation,
    NormalisedConv,
    assert_close,
    both_executors,
    both_networks,
    client_states,
    dropping_mlp,
    gradient,
    run_method,
    sent_per_client,
    small_mlp,
)
from tests.support.runs import experiment

WEIGHTS = np.array([7, 4, 11, 7]) / 29

any_net = pytest.mark.parametrize("factory", [small_mlp, NormalisedConv, dropping_mlp])


def personal_models(fed: Federation) -> Tensor:
    state = {name: client_states(fed, name) for name in fed.state_of(0)}
    return fed.method.personal_model(fed.clients(round=fed.round, **state), fed.server).as_subclass(Tensor)


@both_executors
@both_networks
@pytest.mark.parametrize(
    "training", [FP32, replace(FP32, momentum=0.9, nesterov=True, weight_decay=0.01, clip_norm=0.5)]
)
def test_stepping_through_mini_batches_is_sgd_to_the_bit(training, factory, executor):
    fed = Federation(factory, executor=executor, training=training)
    clients = fed.clients()
    other = fed.clients()
    theta = clients.initial.repeat(4, 1)
    active = []

    for batch in clients.minibatches():
        theta = batch.step(clients.loss, theta)
        active.append(batch.active[:, 0].tolist())

    trained = other.sgd(other.loss, other.initial)
    assert torch.equal(theta.as_subclass(Tensor), trained.as_subclass(Tensor))
    torch.testing.assert_close(clients.losses, other.losses)
    assert np.array(active).sum(0).tolist() == [4, 2, 6, 4]


@both_executors
@both_networks
def test_apfl_with_share_one_is_training_alone_to_the_bit(factory, executor):
    alone = run_method(Local(), factory=factory, executor=executor)
    apfl = run_method(APFL(alpha=1.0, adaptive=False), factory=factory, executor=executor)
    assert torch.equal(client_states(apfl), client_states(alone))
    assert torch.equal(personal_models(apfl), client_states(alone))


@both_executors
@both_networks
def test_apfls_global_model_is_fedavgs_to_the_bit(factory, executor):
    fedavg = run_method(FedAvg(), factory=factory, executor=executor)
    apfl = run_method(APFL(), factory=factory, executor=executor)
    assert torch.equal(apfl.server["theta"], fedavg.server["theta"])
    assert sent_per_client(apfl.ledger, 1) == sent_per_client(fedavg.ledger, 1)


@both_executors
def test_apfl_with_share_zero_predicts_as_fedavgs_local_models(executor):
    local = run_method(PartialPersonalization(personal="", body="last"), executor=executor)
    apfl = run_method(APFL(alpha=0.0, adaptive=False), executor=executor)
    assert torch.equal(personal_models(apfl), client_states(local, "shared"))
    assert torch.equal(client_states(apfl), apfl.model.init(3).expand(4, -1))


@both_executors
def test_two_rounds_of_apfl_by_hand(executor):
    lr = 0.1
    alpha_lr = 0.4
    alphas = [0.3] * 4
    method = APFL(alpha=0.3, alpha_lr=alpha_lr)
    fed = run_method(method, None, None, executor=executor, training=ONE_STEP)
    w = fed.model.init(fed.seed)
    v = [w] * 4

    for _ in range(2):
        locals_ = []
        for c in range(4):
            g = gradient(fed, alphas[c] * v[c] + (1 - alphas[c]) * w, c)
            alphas[c] = min(1.0, max(0.0, alphas[c] - alpha_lr * float((v[c] - w) @ g)))
            g = gradient(fed, alphas[c] * v[c] + (1 - alphas[c]) * w, c)
            v[c] = v[c] - lr * alphas[c] * g
            locals_.append(w - lr * gradient(fed, w, c))
        w = sum(weight * local for weight, local in zip(WEIGHTS, locals_, strict=True))

    assert len({round(alpha, 6) for alpha in alphas}) == 4  # each client went its own way
    assert_close(client_states(fed, "alpha"), torch.tensor(alphas, dtype=torch.float64))
    assert_close(client_states(fed), torch.stack(v))
    assert_close(fed.server["theta"], w)

    mixed = torch.stack([a * p + (1 - a) * q for a, p, q in zip(alphas, v, locals_, strict=True)])
    assert_close(personal_models(fed), mixed)


def test_apfls_share_stays_between_zero_and_one():
    assert client_states(run_method(APFL(alpha_lr=1e6)), "alpha").tolist() == [1.0] * 4


@both_executors
def test_two_mini_batches_of_pfedme_by_hand(executor):
    lam = 0.7
    lr = 0.1
    inner = 0.05
    method = PFedMe(lam=lam, inner_steps=3, inner_lr=inner)
    fed = run_method(method, None, executor=executor, training=replace(FP64, steps=2))
    start = fed.model.init(fed.seed)
    mean = torch.zeros_like(start)
    models = []

    for c in range(4):
        w = v = start
        for x, y in fed.visits(c):
            for _ in range(3):
                v = v - inner * (gradient(fed, v, c, (x, y)) + lam * (v - w))
            w = w - lr * lam * (w - v)
        mean = mean + WEIGHTS[c] * w
        models = [*models, v]

    assert_close(fed.server["theta"], mean)
    assert_close(personal_models(fed), torch.stack(models))


@both_executors
@both_networks
def test_pfedme_without_inner_steps_or_pull_leaves_the_global_model(factory, executor):
    for method in (PFedMe(inner_steps=0), PFedMe(lam=0.0)):
        fed = run_method(method, factory=factory, executor=executor, training=replace(FP64, lr=0.01))
        assert_close(fed.server["theta"], fed.model.init(fed.seed))


@both_executors
def test_pfedme_that_moves_all_the_way_to_a_single_inner_step_is_fedavg(executor):
    training = replace(FP64, epochs=2)
    a, b = (
        run_method(m, executor=executor, training=training, factory=NormalisedConv)
        for m in (FedAvg(), PFedMe(lam=10.0, inner_steps=1))
    )
    assert_close(a.server["theta"], b.server["theta"])


def test_pfedmes_beta_is_the_servers_learning_rate():
    start = Federation(training=FP64).model.init(3)
    full_rate, half_rate = (run_method(PFedMe(server_lr=lr), None, training=FP64).server["theta"] for lr in (1.0, 0.5))
    assert_close(half_rate, (start + full_rate) / 2)


@both_executors
@both_networks
def test_mtl_without_pull_is_training_alone_to_the_bit(factory, executor):
    alone, mtl = (run_method(m, factory=factory, executor=executor) for m in (Local(), MTL(lam=0.0)))
    assert torch.equal(client_states(mtl), client_states(alone))
    assert torch.equal(personal_models(mtl), client_states(alone))
    assert mtl.method.global_model(mtl.server) is None


@both_executors
def test_two_rounds_of_mtl_by_hand(executor):
    lam = 0.7
    lr = 0.1
    for weighting, weights in (("uniform", np.full(4, 0.25)), ("samples", WEIGHTS)):
        fed = run_method(MTL(lam=lam, weighting=weighting), None, None, executor=executor, training=ONE_STEP)
        mean = fed.model.init(fed.seed)
        v = [mean] * 4
        for _ in range(2):
            v = [p - lr * (gradient(fed, p, c) + lam * (p - mean)) for c, p in enumerate(v)]
            mean = sum(weight * p for weight, p in zip(weights, v, strict=True))
        assert_close(client_states(fed), torch.stack(v))
        assert_close(fed.server["mean"], mean)


def test_fine_tuning_for_zero_epochs_is_fedavg():
    fed = run_method(FedAvgFT(finetune_epochs=0))
    models = fed.method.personal_model(fed.clients(round=4), fed.server)
    assert torch.equal(models.as_subclass(Tensor), fed.server["theta"].expand(4, -1))


def test_the_error_of_a_diverging_personal_step_names_its_client(tmp_path):
    with pytest.raises(raypfl.RaypflError, match=r"Training diverged on client \d+ in round 1"):
        raypfl.run(experiment(tmp_path, method="pfedme", method__inner_lr=1e6, rounds=1))
