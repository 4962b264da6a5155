"""pFedFDA follows its paper, and chooses the best mixture of local and global distributions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from raypfl.common.errors import ConfigError
from raypfl.methods import PFedFDA
from raypfl.methods.partial_models.pfedfda import Gaussians
from tests.support.by_hand import assert_parts_close, descend, leaves, mean_by_samples
from tests.support.federation import (
    CLASSES,
    FP64,
    Federation,
    NormalisedConv,
    assert_close,
    both_executors,
    client_states,
    run_method,
    sent_per_client,
    without_bias,
)


def layer(means, covariance, shares):
    """Weights and biases of the Bayes classifier, by an explicit inverse."""
    size = len(covariance)
    covariance = (1 - 1e-4) * covariance + 1e-4 * covariance.trace() / size * torch.eye(size, dtype=torch.float64)
    inverse = torch.linalg.inv(covariance)
    prior = (shares + 1e-4) / (shares + 1e-4).sum()
    weight = torch.stack([inverse @ mean for mean in means])
    bias = torch.stack([p.log() - m @ inverse @ m / 2 for p, m in zip(prior, means, strict=True)])
    return weight, bias


def estimate(z, y, received):
    means = received[0].clone()
    scatter = torch.zeros(5, 5, dtype=torch.float64)
    for c in y.unique():
        means[c] = z[y == c].mean(0)
        scatter += sum(torch.outer(row - means[c], row - means[c]) for row in z[y == c])
    return means, scatter / max(len(z) - 1, 1) + torch.eye(5, dtype=torch.float64)


def mixed(local, received, beta):
    return [beta * a + (1 - beta) * b for a, b in zip(local, received, strict=True)]


@both_executors
def test_rounds_of_pfedfda_by_hand(executor):
    cohorts = ([0, 1, 2, 3], [1, 2], [0, 2])
    fed = Federation(method=PFedFDA(), executor=executor, training=FP64, group_size=2)
    # Classes that samples show, but not clearly: then some clients are best between both estimates.
    fed.labels = fed.inputs[:, 0].mean((1, 2)).argsort().argsort() * CLASSES // len(fed.inputs)
    server = fed.method.start(fed.task)
    tensors = fed.model.unflatten(server["theta"])
    body = [tensors["1.weight"], tensors["1.bias"]]
    received = [server["means"], server["covariance"]]
    assert (received[0] >= 0).all() and (received[0] < 1).all()
    assert torch.equal(received[1], torch.eye(5, dtype=torch.float64))
    betas = torch.zeros(4, dtype=torch.float64)

    def features(body, x):
        return (x.flatten(1) @ body[0].T + body[1]).tanh()

    def shares(client):
        return torch.bincount(fed.samples(client)[1], minlength=CLASSES).double() / fed.sizes[client]

    for round, ids in enumerate(cohorts):
        fed.run_rounds(ids)
        results = {}
        for client in ids:
            weight, bias = layer(*received, shares(client))
            trained = leaves(body)
            for x, y in fed.visits(client, round):
                descend(F.cross_entropy(features(trained, x) @ weight.T + bias, y), trained)

            x, y = fed.samples(client)
            z = features(trained, x).detach()
            (generator,) = fed.clients([client], round).generators("halves")
            halves = torch.randperm(len(y), generator=generator).tensor_split([len(y) // 2])

            def error(beta, z=z, y=y, halves=halves, client=client, received=received):
                total = 0.0
                for fit, test in (halves, halves[::-1]):
                    weight, bias = layer(*mixed(estimate(z[fit], y[fit], received), received, beta), shares(client))
                    total += float(F.cross_entropy(z[test] @ weight.T + bias, y[test], reduction="sum"))
                return total

            # The method's beta is the best; which of two that differ by rounding, the loop need not know.
            betas[client] = float(fed.state_of(client)["beta"])
            assert error(float(betas[client])) <= min(error(beta) for beta in np.linspace(0, 1, 101)) + 1e-6
            results[client] = (*trained, *mixed(estimate(z, y, received), received, float(betas[client])))

        means = [mean_by_samples(fed, {c: results[c][i] for c in ids}, ids) for i in range(4)]
        body, received = means[:2], means[2:]

    assert_close(fed.server["means"], received[0])
    assert_close(fed.server["covariance"], received[1])
    weight, bias = layer(*received, torch.full((CLASSES,), 1 / CLASSES, dtype=torch.float64))
    expected = {"1.weight": body[0], "1.bias": body[1], "3.weight": weight, "3.bias": bias}
    assert_parts_close(fed, fed.server["theta"], expected)

    rows = fed.method.personal_model(fed.clients(beta=client_states(fed, "beta")), fed.server)
    for client, row in enumerate(rows.as_subclass(torch.Tensor)):
        x, y = fed.samples(client)
        weight, bias = layer(
            *mixed(estimate(features(body, x), y, received), received, float(betas[client])), shares(client)
        )
        assert_parts_close(fed, row, {"3.weight": weight, "3.bias": bias})
    assert not fed.warnings and len(set(betas.tolist())) > 2

    numbers = {"body": 165, "means": CLASSES * 5, "covariance": 25}
    expected = {(direction, name): count for direction in ("down", "up") for name, count in numbers.items()}
    assert sent_per_client(fed.ledger, 1) == expected


def test_a_client_that_was_never_trained_has_the_servers_distributions_and_its_own_shares():
    fed = run_method(PFedFDA(), [0, 1], training=FP64)
    (row,) = fed.method.personal_model(fed.clients([2]), fed.server).as_subclass(torch.Tensor)
    (shares,) = fed.clients([2]).label_counts().as_subclass(torch.Tensor)
    expected = Gaussians(fed.server["means"], fed.server["covariance"]).layer(shares / shares.sum())
    assert_close(row[fed.model.mask("output layer")], expected)


def test_pfedfda_trains_with_batch_norm_and_with_a_client_of_one_sample():
    fed = run_method(PFedFDA(), factory=NormalisedConv, sizes=(7, 1, 11, 7), training=FP64)
    assert torch.isfinite(fed.server["theta"]).all() and not fed.warnings


def test_pfedfda_refuses_an_output_layer_without_a_bias():
    with pytest.raises(ConfigError, match="computes the bias of the output layer, but 3 has none"):
        PFedFDA().check(Federation(factory=without_bias).model)
