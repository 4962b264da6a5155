"""FedDBE follows its paper, and is FedAvg without its bias and its pull."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from raypfl.common.errors import PrivacyError
from raypfl.learning.privacy import PrivacySettings
from raypfl.methods import FedAvg, FedDBE
from tests.support.by_hand import MLP, assert_parts_close, descend, leaves, mean_by_samples
from tests.support.federation import (
    FP64,
    NormalisedConv,
    assert_close,
    both_executors,
    run_method,
)


@both_executors
def test_feddbe_without_pull_and_bias_is_fedavg(executor):
    # Not to the bit: the features' shift and mean lie between other tensors, which changes how products are summed.
    fedavg, feddbe = (
        run_method(m, executor=executor, factory=NormalisedConv, training=FP64)
        for m in (FedAvg(), FedDBE(kappa=0, train_bias=False))
    )
    layout = feddbe.method.shared_part(feddbe.model)
    assert_close(feddbe.server["theta"][layout], fedavg.server["theta"], 1e-13)
    assert not feddbe.server["theta"][~layout].any()


def steps_by_hand(parameters, visits, lr, kappa, momentum, consensus):
    """Train weights, biases and the shift in place on these batches; return the running mean.

    Without a consensus, the features have no shift.
    """
    w1, b1, w2, b2, shift = parameters
    trained = parameters if consensus is not None else parameters[:4]
    running = torch.zeros_like(shift)
    for x, y in visits:
        z = (x.flatten(1) @ w1.T + b1).tanh()
        running = (1 - momentum) * running.detach() + momentum * z.mean(0)
        if consensus is None:
            loss = F.cross_entropy(z @ w2.T + b2, y)
        else:
            loss = F.cross_entropy((z + shift) @ w2.T + b2, y) + kappa * 0.5 * ((running - consensus) ** 2).mean()
        descend(loss, trained, lr)
    return running.detach()


@both_executors
def test_rounds_of_feddbe_by_hand(executor):
    kappa = 3.0
    momentum = 0.3
    cohorts = ([1, 2], [0, 1, 2])
    fed = run_method(
        FedDBE(kappa=kappa, momentum=momentum), *cohorts, executor=executor, training=replace(FP64, epochs=2)
    )
    start = fed.model.unflatten(fed.model.init(fed.seed))
    shared = [start[name] for name in MLP]
    shifts = [torch.zeros(5, dtype=torch.float64) for _ in range(4)]

    def trained(client, round, consensus):
        parameters = leaves([*shared, shifts[client]])
        mean = steps_by_hand(parameters, fed.visits(client, round), 0.1, kappa, momentum, consensus)
        return [p.detach() for p in parameters], mean

    consensus = sum(n / 29 * trained(client, 0, None)[1] for client, n in enumerate(fed.sizes))
    assert_close(fed.server["consensus"], consensus)

    for round, ids in enumerate(cohorts):
        models = {client: trained(client, round, consensus)[0] for client in ids}
        for client in ids:
            shifts[client] = models[client][-1]
        shared = [mean_by_samples(fed, {c: models[c][i] for c in ids}, ids) for i in range(4)]

    assert_parts_close(fed, fed.server["theta"], dict(zip(MLP, shared, strict=True)))
    rows = fed.method.personal_model(fed.clients([2], personal=shifts[2][None]), fed.server)
    assert_parts_close(fed, rows[0], {"3.shift": shifts[2]})
    assert_close(torch.from_numpy(fed.state_of(2)["personal"]), shifts[2])
    assert not fed.warnings and shifts[2].any() and not fed.state_of(3)


def test_feddbe_asks_every_client_once_for_its_mean_and_sends_the_consensus_once():
    fed = run_method(FedDBE(), [0, 1], [1, 2], group_size=4)
    sent = [(e.round, e.exchange, e.direction, e.name, e.clients, e.numbers) for e in fed.ledger.entries]
    assert sent == [
        (0, 0, "down", "shared", 4, 183),
        (0, 0, "up", "mean", 4, 5),
        (0, 1, "down", "shared", 2, 183),
        (0, 1, "down", "consensus", 2, 5),
        (0, 1, "up", "shared", 2, 183),
        (1, 0, "down", "shared", 2, 183),
        (1, 0, "down", "consensus", 1, 5),
        (1, 0, "up", "shared", 2, 183),
    ]
    assert set(fed.cohorts[0].losses) == {0, 1}


def test_a_client_that_drops_out_is_charged_the_consensus_only_if_it_is_new_to_it():
    fed = run_method(FedDBE(), [0, 1])
    fed.method.round(fed.server, fed.cohort([1], dropped=(0, 3)))
    fed.method.round(fed.server, fed.cohort([2], dropped=(0,)))
    sent = [(entry.clients, entry.numbers) for entry in fed.ledger.entries if entry.name == "consensus"]
    assert sent == [(2, 5), (1, 5), (1, 5)]


def test_feddbe_is_refused_under_noise_since_its_mean_feature_gets_none():
    with pytest.raises(PrivacyError, match="Training moved statistics of the network, such as running means"):
        run_method(FedDBE(), privacy=PrivacySettings(noise=1.0))
    with pytest.raises(PrivacyError, match="returns 'mean', which is not the mean of an argument"):
        run_method(FedDBE(), privacy=PrivacySettings(noise=1.0, unit="client"))
