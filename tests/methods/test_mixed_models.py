"""Methods that mix clients' models with chosen others follow their papers, and equal others in limiting cases."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import raypfl
from raypfl.common.errors import ConfigError
from raypfl.methods import MTL, FedAMP, HeurFedAMP, Local
from tests.support.federation import (
    FP64,
    ONE_STEP,
    ROUNDS,
    Federation,
    NormalisedConv,
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


@pytest.mark.parametrize("name", ["fedamp"])
def test_a_resumed_run_of_mixed_models_ends_with_the_same_bits(name, tmp_path):
    changes = {"method": name, "evaluation__every": 0, "checkpoint__every": 1, "model__hidden": "[4]"}
    half, whole = (raypfl.run(experiment(tmp_path, **changes, rounds=rounds)) for rounds in (1, 3))
    assert raypfl.resume(half.run_dir, overrides=["rounds=3"]).weights_hash == whole.weights_hash


def test_fedamp_refuses_negative_weights():
    with pytest.raises(ConfigError, match=r"Lower method.alpha to sigma / 3 = 0.333 or less"):
        run_method(FedAMP(sigma=1.0, alpha=0.34))
    run_method(FedAMP(sigma=1.0, alpha=0.33), ALL)
