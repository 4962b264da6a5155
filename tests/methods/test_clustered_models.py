"""Clustered methods follow their papers, and equal FedAvg with one cluster."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from raypfl.methods import CFL, IFCA, FedAvg, FedEM
from raypfl.methods.clustered_models.cfl import bipartition
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

ALL = [0, 1, 2, 3]
LR = 0.1
STEP = replace(ONE_STEP, lr=LR)


def losses_by_hand(fed: Federation, theta: Tensor, client: int) -> Tensor:
    """The loss of each training sample of a client."""
    x, y = fed.samples(client)
    return F.cross_entropy(as_module(fed.factory, theta).eval()(x), y, reduction="none").detach()


def personal_models(fed: Federation) -> Tensor:
    return fed.method.personal_model(fed.clients(), fed.server).as_subclass(Tensor)


@both_executors
@pytest.mark.parametrize(
    "method", [IFCA(clusters=1), FedEM(components=1), IFCA(clusters=1, weighting="uniform")], ids=["ifca", "fedem", "u"]
)
def test_one_cluster_is_fedavg_to_the_bit(method, executor):
    fedavg, clustered = (
        run_method(m, factory=NormalisedConv, executor=executor) for m in (FedAvg(weighting=method.weighting), method)
    )
    assert torch.equal(clustered.server["models"][0], fedavg.server["theta"])


@both_executors
def test_cfl_that_never_splits_is_fedavg(executor):
    fedavg, cfl = (
        run_method(m, factory=NormalisedConv, executor=executor, training=FP64) for m in (FedAvg(), CFL(eps1=0.0))
    )
    assert_close(cfl.server["models"][0], fedavg.server["theta"], 1e-13)
    assert sent_per_client(cfl.ledger, 1) == {("down", "models"): cfl.model.size, ("up", "update"): cfl.model.size}


@both_executors
def test_four_rounds_of_ifca_by_hand(executor):
    fed = run_method(IFCA(clusters=3), executor=executor, training=STEP)
    models = list(fed.method.start(fed.task)["models"])
    assert torch.equal(models[0], fed.model.init(fed.seed)) and not torch.equal(models[1], models[2])

    chosen = set()
    for cohort in ROUNDS:
        trained = {number: [] for number in range(3)}
        for k in cohort:
            best = int(np.argmin([float(losses_by_hand(fed, theta, k).mean()) for theta in models]))
            trained[best].append((fed.sizes[k], models[best] - LR * gradient(fed, models[best], k)))
            chosen.add(best)
        for number, members in trained.items():
            if members:
                models[number] = sum(n * theta for n, theta in members) / sum(n for n, _ in members)

    assert len(chosen) > 1
    assert_close(fed.server["models"], torch.stack(models))
    best = [int(np.argmin([float(losses_by_hand(fed, theta, k).mean()) for theta in models])) for k in ALL]
    assert_close(personal_models(fed), torch.stack(models)[best])
    size = fed.model.size
    up = [
        n for (direction, name), n in sent_per_client(fed.ledger, 0).items() if direction == "up" and name != "choice"
    ]
    assert sent_per_client(fed.ledger, 0)["down", "models"] == 3 * size and up == [size] * len(up)


def test_of_equal_models_all_clients_take_the_first_and_the_rest_stay():
    fed = Federation(method=IFCA(clusters=3), training=FP64, group_size=2)
    initial = fed.model.init(fed.seed)
    fed.server = {"models": initial.repeat(3, 1)}
    fed.run_rounds(ALL)
    assert torch.equal(fed.server["models"][1:], initial.repeat(2, 1))
    assert not torch.equal(fed.server["models"][0], initial)


def test_the_cut_of_a_cluster_is_the_best_of_all():
    draws = torch.Generator().manual_seed(0)
    for _ in range(20):
        directions = F.normalize(torch.randn(5, 3, generator=draws, dtype=torch.float64))
        cosines = directions @ directions.T

        def across(second: list[int], cosines: Tensor = cosines) -> float:
            first = [i for i in range(5) if i not in second]
            return float(cosines[first][:, second].max())

        best = min(across(list(second)) for size in (1, 2) for second in combinations(range(5), size))
        assert across(bipartition(cosines).nonzero().flatten().tolist()) == best


@both_executors
def test_three_rounds_of_cfl_by_hand_in_which_a_cluster_splits(executor):
    fed = Federation(method=CFL(eps1=0.3, eps2=0.1), executor=executor, training=STEP, group_size=2)
    for client in ALL:  # two pairs of clients that want opposite labels for the same inputs
        fed.inputs[fed.split[client]] = fed.inputs[fed.split[0]][np.arange(fed.sizes[client]) % 4]
        fed.labels[fed.split[client]] = client // 2
    fed.run_rounds(ALL)
    initial = fed.model.init(fed.seed)
    moves = [-LR * gradient(fed, initial, k) for k in ALL]
    n = np.array(fed.sizes, dtype=float)
    norm_of_mean = float(sum(n[k] / n.sum() * moves[k] for k in ALL).norm())
    assert norm_of_mean < 0.3 and max(float(move.norm()) for move in moves) > 0.1

    halves = {0: [0, 1], 1: [2, 3]}
    models = {h: initial + sum(n[k] * moves[k] for k in half) / n[half].sum() for h, half in halves.items()}
    assert fed.server["cluster"].tolist() == [0, 0, 1, 1]
    assert_close(fed.server["models"], torch.stack([models[0], models[1]]))

    fed.run_rounds([0])  # its cluster is not complete, and so stays together
    models[0] = models[0] - LR * gradient(fed, models[0], 0)
    fed.method = CFL(eps1=0.0)
    fed.run_rounds([1, 2, 3])
    models[0] = models[0] - LR * gradient(fed, models[0], 1)
    after = [models[1] - LR * gradient(fed, models[1], k) for k in (2, 3)]
    models[1] = (n[2] * after[0] + n[3] * after[1]) / (n[2] + n[3])
    assert_close(fed.server["models"], torch.stack([models[0], models[1]]))
    assert_close(personal_models(fed), torch.stack([models[0], models[0], models[1], models[1]]))


def test_gamma_keeps_a_cluster_together():
    split, together = (run_method(CFL(eps1=1e9, eps2=0.0, gamma=gamma), ALL) for gamma in (0.0, 1.0))
    assert len(split.server["models"]) == 2 and len(together.server["models"]) == 1


@both_executors
def test_four_rounds_of_fedem_by_hand(executor):
    fed = run_method(FedEM(components=3), executor=executor, training=STEP)
    models = fed.method.start(fed.task)["models"]
    pi = torch.full((4, 3), 1 / 3, dtype=torch.float64)

    for cohort in ROUNDS:
        sums = torch.zeros_like(models)
        for k in cohort:
            x, y = fed.samples(k)
            losses = torch.stack([losses_by_hand(fed, theta, k) for theta in models])
            q = pi[k][:, None] * torch.exp(-losses)
            q = q / q.sum(0)
            for m, theta in enumerate(models):
                net = as_module(fed.factory, theta)
                (q[m] * F.cross_entropy(net(x), y, reduction="none")).mean().backward()
                sums[m] += len(y) * (theta - LR * torch.cat([p.grad.reshape(-1) for p in net.parameters()]))
            pi[k] = q.mean(1)
        models = sums / sum(fed.sizes[k] for k in cohort)

    assert_close(fed.server["models"], models)
    assert_close(client_states(fed, "pi"), pi)
    assert set(sent_per_client(fed.ledger, 1).values()) == {3 * fed.model.size}

    x, _ = fed.samples(2)
    predictor = fed.method.personal_model(fed.clients(pi=client_states(fed, "pi")), fed.server)
    mixed = sum(pi[2, m] * as_module(fed.factory, theta)(x).softmax(1) for m, theta in enumerate(models))
    assert_close(predictor.outputs_of(2, x).detach(), mixed.log().detach())
