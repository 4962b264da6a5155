"""FedALA follows its paper, and equals FedAvg and local training in limiting cases."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch.nn import functional as F

from raypfl.methods import FedALA, FedAvg, Local
from raypfl.methods.local_training import sample_passes
from tests.support.by_hand import mean_by_samples
from tests.support.federation import (
    FP64,
    NormalisedConv,
    as_module,
    as_vector,
    assert_close,
    both_executors,
    client_states,
    gradient,
    run_method,
    sent_per_client,
    torch_sgd,
)


@both_executors
def test_fedala_with_fixed_weights_is_fedavg_to_the_bit(executor):
    fedavg, fedala = (
        run_method(m, executor=executor, factory=NormalisedConv) for m in (FedAvg(), FedALA(weight_lr=0, max_epochs=1))
    )
    assert torch.equal(fedala.server["theta"], fedavg.server["theta"])
    assert sent_per_client(fedala.ledger, 1) == sent_per_client(fedavg.ledger, 1)


def test_a_client_alone_under_fedala_trains_locally():
    alone, fedala = (run_method(m, [2], [2], [2]) for m in (Local(), FedALA(weighting="uniform")))
    assert np.array_equal(fedala.state_of(2)["model"], alone.state_of(2)["personal"])


@both_executors
def test_rounds_of_fedala_by_hand(executor):
    method = FedALA(adapted="3.weight, 1.bias", weight_lr=2.0, share=0.7, window=2, threshold=0.05, max_epochs=20)
    cohorts = ([0, 1, 2, 3], [1, 2], [0, 1, 2, 3], [0, 1, 2, 3])
    fed = run_method(method, *cohorts, executor=executor, training=FP64)
    adapted = fed.model.mask(method.adapted)
    theta = fed.model.init(fed.seed)
    models = {}
    weights = {}
    epochs = {}

    for round, ids in enumerate(cohorts):
        for client in ids:
            start = theta.clone()
            if client in models:
                difference = (theta - models[client])[adapted]
                is_first = client not in weights
                W = weights.get(client, torch.ones_like(difference))
                losses = []
                while True:
                    # The mini-batches are the library's, since they are drawn; all that is done with them is not.
                    for _, (batch,) in sample_passes(fed.clients([client], round), "weights", 0.7):
                        start[adapted] = models[client][adapted] + W * difference
                        loss = F.cross_entropy(as_module(fed.factory, start)(batch.x), batch.y).item()
                        g = gradient(fed, start, client, (batch.x, batch.y))[adapted]
                        W = (W - 2.0 * g * difference).clamp(0, 1)
                    losses.append(loss)
                    settled = len(losses) > 2 and np.std(losses[-2:]) < 0.05
                    if not is_first or settled or len(losses) == 20:
                        break
                start[adapted] = models[client][adapted] + W * difference
                weights[client] = W
                epochs.setdefault(client, []).append(len(losses))
            net = as_module(fed.factory, start)
            torch_sgd(net, fed.visits(client, round), lr=0.1)
            models[client] = as_vector(net)
        theta = mean_by_samples(fed, models, ids)

    assert all(first > 1 for first, *_ in epochs.values()) and epochs[1][1:] == [1, 1]
    assert_close(client_states(fed, "weights"), torch.stack([weights[client] for client in range(4)]))
    assert 0 < client_states(fed, "weights").min() < 1
    assert_close(client_states(fed, "model"), torch.stack([models[client] for client in range(4)]))
    assert_close(fed.server["theta"], theta)
    assert not fed.warnings


def test_a_pass_ends_with_the_last_mini_batch_of_every_client():
    fed = run_method(FedALA(), [0], training=replace(FP64, batch_size=2))
    clients = fed.clients()
    steps = sample_passes(clients, "any")
    # Clients have 7, 4, 11 and 7 samples.
    assert [(takes * torch.tensor([len(batch.y) for batch in batches])).tolist() for takes, batches in steps] == [
        *([0, 0, 2, 0], [0, 0, 2, 0], [2, 0, 2, 2], [2, 0, 2, 2], [2, 2, 2, 2], [1, 2, 1, 1])
    ]
    seen = torch.cat([batches[0].x for takes, batches in steps if takes[0]])
    x, _ = fed.samples(0)
    assert torch.equal(seen.flatten(1).sum(1).sort().values, x.flatten(1).sum(1).sort().values)


def test_a_client_that_was_never_trained_by_fedala_has_the_global_model():
    fed = run_method(FedALA(), [0, 1], [0, 1])
    models = fed.method.personal_model(fed.clients([3]), fed.server)
    assert torch.equal(models.as_subclass(torch.Tensor)[0], fed.server["theta"])
