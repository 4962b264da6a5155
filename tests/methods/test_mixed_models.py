"""Methods that mix clients' models with chosen others follow their papers, and equal others in limiting cases."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import raypfl
from raypfl.common.errors import ConfigError
from raypfl.methods import MTL, FedAMP, FedFomo, HeurFedAMP, Local
from tests.support.federation import (
    FP64,
    ONE_STEP,
    ROUNDS,
    Federation,
    NormalisedConv,
    as_module,
    assert_close,
    both_executors,
    client_states,
    gradient,
    run_method,
    sent_per_client,
)
from tests.support.runs import experiment

ALL = [0, 1, 2, 3]
LR = 0.1


def start_of(fed: Federation) -> Tensor:
    return fed.model.init(fed.seed)


@both_executors
def test_fedamp_without_pull_is_training_alone_to_the_bit(executor):
    methods = (Local(), FedAMP(lam=0.0))
    alone, amp = (run_method(m, factory=NormalisedConv, executor=executor) for m in methods)
    assert torch.equal(client_states(amp), client_states(alone))


@pytest.mark.parametrize(
    "method", [FedAMP(sigma=1e12, lam=0.2 * 1e12 / 4), HeurFedAMP(sigma=0.0, lam=0.2)], ids=["fedamp", "heurfedamp"]
)
def test_fedamp_with_equal_weights_is_mtl_if_all_clients_take_part(method):
    mtl, amp = (run_method(m, ALL, ALL, ALL, factory=NormalisedConv, training=FP64) for m in (MTL(lam=0.2), method))
    assert_close(client_states(amp), client_states(mtl), 1e-11)


@both_executors
@pytest.mark.parametrize("heuristic", [False, True])
@pytest.mark.parametrize("mixed", ["all", "last cohort"])
def test_four_rounds_of_fedamp_by_hand(mixed, heuristic, executor):
    sigma = 0.5
    lam = 0.3
    method = FedAMP(sigma=sigma, alpha=0.1, lam=lam, mixed=mixed)
    if heuristic:
        method = HeurFedAMP(sigma=sigma, alpha=0.1, lam=lam, mixed=mixed, own_weight=0.4)
    fed = run_method(method, executor=executor, training=replace(ONE_STEP, lr=LR))
    w = [start_of(fed)] * 4
    last = set()

    for cohort in ROUNDS:
        trained = list(w)
        for i in cohort:
            others = sorted(last - {i})
            if heuristic:
                raw = {j: math.exp(sigma * torch.cosine_similarity(w[i], w[j], dim=0)) for j in others}
                xi = {j: 0.6 * raw[j] / sum(raw.values()) for j in others}
            else:
                xi = {j: 0.1 / sigma * math.exp(-float((w[i] - w[j]).square().sum()) / sigma) for j in others}
            u = (1 - sum(xi.values())) * w[i] + sum(xi[j] * w[j] for j in others)
            trained[i] = w[i] - LR * (gradient(fed, w[i], i) + lam / 0.1 * (w[i] - u))
        w = trained
        last = set(cohort) if mixed == "last cohort" else last | set(cohort)

    assert_close(fed.server["models"], torch.stack(w))
    assert_close(client_states(fed), torch.stack(w))
    assert sent_per_client(fed.ledger, 1) == {("down", "target"): len(w[0]), ("up", "model"): len(w[0])}


@pytest.mark.parametrize("name", ["fedamp", "fedfomo"])
def test_a_resumed_run_of_mixed_models_ends_with_the_same_bits(name, tmp_path):
    changes = {"method": name, "evaluation__every": 0, "checkpoint__every": 1, "model__hidden": "[4]"}
    half, whole = (raypfl.run(experiment(tmp_path, **changes, rounds=rounds)) for rounds in (1, 3))
    assert raypfl.resume(half.run_dir, overrides=["rounds=3"]).weights_hash == whole.weights_hash


def test_fedamp_refuses_negative_weights():
    with pytest.raises(ConfigError, match=r"Lower method.alpha to sigma / 3 = 0.333 or less"):
        run_method(FedAMP(sigma=1.0, alpha=0.34))
    run_method(FedAMP(sigma=1.0, alpha=0.33), ALL)


def with_validation(method: FedFomo, **options) -> Federation:
    """Return a federation in which a client's first three samples are for validation too."""
    fed = Federation(method=method, group_size=2, **options)
    fed.context.split = lambda client, name: fed.split[client][: 3 if name == "val" else None]
    return fed


@both_executors
def test_fedfomo_without_models_or_with_a_useless_one_is_training_alone_to_the_bit(executor):
    alone = run_method(Local(), executor=executor)
    fed = with_validation(FedFomo(models=0, fallback="own"), executor=executor, training=alone.training)
    fed.run_rounds(*ROUNDS)
    assert torch.equal(client_states(fed), client_states(alone))
    assert sent_per_client(fed.ledger, 3) == {("up", "model"): fed.model.size}


@both_executors
@pytest.mark.parametrize(("norm", "fallback"), [("l2", "start"), ("l1", "own")])
def test_four_rounds_of_fedfomo_by_hand(norm, fallback, executor):
    method = FedFomo(models=2, epsilon=0.0, norm=norm, fallback=fallback)
    fed = with_validation(method, executor=executor, training=replace(ONE_STEP, lr=LR))
    w = [start_of(fed)] * 4
    r = [start_of(fed)] * 4
    affinity = torch.eye(4, dtype=torch.float64)
    sent = set()

    def validation_loss(client: int, theta: Tensor) -> Tensor:
        x, y = fed.samples(client)
        return F.cross_entropy(as_module(fed.factory, theta)(x[:3]), y[:3]).detach()

    for cohort in [ALL, *ROUNDS]:
        # What the server may choose: the two of largest affinity, in any order among equals.
        fed.server = fed.server or method.start(fed.task)
        chosen = method._choose(fed.server, fed.cohort(cohort)).tolist()
        for i, models in zip(cohort, chosen, strict=True):
            assert len(set(models)) == len(models) == min(2, len(sent)) and set(models) <= sent
            best = sorted((float(affinity[i, j]) for j in sent), reverse=True)[:2]
            assert sorted((float(affinity[i, j]) for j in models), reverse=True) == pytest.approx(best, rel=1e-9)
        fed.run_rounds(cohort)

        trained = list(w)
        for i, models in zip(cohort, chosen, strict=True):
            a = {}
            for j in models:
                distance = torch.linalg.vector_norm(w[j] - r[i], ord=int(norm[1]))
                a[j] = float((validation_loss(i, r[i]) - validation_loss(i, w[j])) / distance) if distance else 0.0
                affinity[i, j] += a[j]
            total = sum(max(value, 0.0) for value in a.values())
            start = r[i] if fallback == "start" else w[i]
            if total:
                start = r[i] + sum(max(a[j], 0.0) / total * (w[j] - r[i]) for j in models)
            r[i] = start
            trained[i] = start - LR * gradient(fed, start, i)
        w = trained
        sent |= set(cohort)
        assert_close(fed.server["models"], torch.stack(w))

    assert_close(fed.server["affinity"], affinity)
    assert_close(client_states(fed, "start"), torch.stack(r))
    size = fed.model.size
    assert sent_per_client(fed.ledger, 1) == {
        ("down", "models"): 2 * size,
        ("up", "model"): size,
        ("up", "advantage"): 2,
    }


def test_fedfomo_draws_some_models_at_random():
    fed = with_validation(FedFomo(models=2, epsilon=1.0, epsilon_decay=0.5))
    fed.run_rounds(ALL)
    first = fed.method._choose(fed.server, fed.cohort(ALL))
    assert all(len(set(row)) == 2 for row in first.tolist())
    fed.round = 3  # the third round, without chance
    fed.server["affinity"] = torch.eye(4, dtype=torch.float64) + torch.eye(4, dtype=torch.float64).roll(1, 1) / 2
    assert fed.method._choose(fed.server, fed.cohort(ALL)).tolist() == [[0, 1], [1, 2], [2, 3], [3, 0]]


def test_fedfomo_is_refused_without_validation_samples(tmp_path):
    with pytest.raises(ConfigError, match=r"needs validation samples .* client 0 has none .* Set data.val_fraction"):
        raypfl.run(experiment(tmp_path, method="fedfomo", data__val_fraction=0))
