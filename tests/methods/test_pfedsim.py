"""pFedSim follows its paper, and is FedAvg while it warms up."""

from __future__ import annotations

import math

import torch

import raypfl
from raypfl.methods import FedAvg, PFedSim
from tests.support.by_hand import mean_by_samples
from tests.support.federation import (
    ONE_STEP,
    ROUNDS,
    Federation,
    NormalisedConv,
    assert_close,
    both_executors,
    gradient,
    run_method,
    sent_per_client,
)
from tests.support.runs import experiment


@both_executors
def test_pfedsim_that_only_warms_up_is_fedavg_to_the_bit(executor):
    options = {"factory": NormalisedConv, "executor": executor}
    fedavg, sim = (run_method(method, **options) for method in (FedAvg(), PFedSim(warmup=1.0)))
    assert torch.equal(sim.server["theta"], fedavg.server["theta"])
    assert sim.ledger.entries == fedavg.ledger.entries
    assert torch.equal(sim.method.personal_model(sim.clients([2]), sim.server)[0], fedavg.server["theta"])


def warmed_up(method, *cohorts, **options):
    """Run rounds of which the first of ten is the warm-up."""
    fed = Federation(method=method, group_size=2, training=ONE_STEP, **options)
    fed.round = 1
    fed.run_rounds(*cohorts)
    return fed


@both_executors
def test_rounds_of_pfedsim_by_hand(executor):
    fed = warmed_up(PFedSim(warmup=0.1), *ROUNDS, [0, 3], executor=executor)
    w = fed.model.init(fed.seed)
    first, *rest = [*ROUNDS, [0, 3]]
    w = mean_by_samples(fed, {client: w - 0.1 * gradient(fed, w, client) for client in first}, first)
    models = [w] * 4
    phi = torch.eye(4, dtype=torch.float64)
    body = 32 * 5 + 5  # entries of the layer below the output layer, which come first

    for cohort in rest:
        before = list(models)
        for i in cohort:
            weights = [-math.log(1 - min(float(phi[i, j]), 0.9999)) for j in range(4)]
            mixed = sum(weights[j] / sum(weights) * before[j][:body] for j in range(4))
            start = torch.cat([mixed, before[i][body:]])
            models[i] = start - 0.1 * gradient(fed, start, i)
        for i in cohort:
            for j in cohort:
                weights_i, weights_j = (models[k][body : body + 15].reshape(3, 5) for k in (i, j))
                phi[i, j] = torch.cosine_similarity(weights_i, weights_j).mean().clamp_min(0)

    assert_close(fed.server["models"], torch.stack(models))
    assert_close(fed.server["similarity"], phi)
    assert_close(fed.server["theta"], w)
    assert_close(fed.method.personal_model(fed.clients([3, 1]), fed.server), torch.stack([models[3], models[1]]))
    assert not fed.warnings
    assert sent_per_client(fed.ledger, 3) == {("down", "model"): fed.model.size, ("up", "model"): fed.model.size}


def test_compression_shortens_the_models_after_the_warm_up_too(tmp_path):
    compressed = experiment(tmp_path, method="pfedsim", rounds=1, compression="{name: uniform, bits: 4}")
    result = raypfl.run(compressed)
    up, down = result.megabytes
    assert 0 < up < down / 4


class Dissimilar(PFedSim):
    """pFedSim whose clients never resemble each other."""

    def similarities(self, model, models):
        return torch.eye(len(models), dtype=models.dtype)


def test_clients_that_resemble_nobody_train_alone_after_the_warm_up():
    fed = warmed_up(Dissimilar(warmup=0.1), [0, 1, 2, 3], [0, 1], [0, 2])
    w = fed.server["theta"]
    once = w - 0.1 * gradient(fed, w, 0)
    assert_close(fed.server["models"][0], once - 0.1 * gradient(fed, once, 0))
    assert torch.equal(fed.server["models"][3], w)
