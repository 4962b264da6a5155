"""SCAFFOLD, FedDC and MOON by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from raypfl.common.errors import ConfigError
from raypfl.learning.optimizers import Adam
from raypfl.methods import ExtraImages, FedAvg, FedDC, FedProx, Moon, Scaffold
from tests.support.by_hand import descend
from tests.support.federation import (
    CLASSES,
    FP64,
    NormalisedConv,
    as_module,
    as_vector,
    assert_close,
    both_executors,
    both_networks,
    client_states,
    gradient,
    run_method,
    sent_per_client,
    step_by_hand,
)

DRAWN = [[0, 1, 2, 3], [1, 2, 3], [0, 3]]
TWO_STEPS = replace(FP64, steps=2)


def stepped(fed, theta, client, round, pull):
    """Step along gradient plus ``pull(w)``; returns the client's model and the mean of those sums."""
    w = theta.clone()
    gradients = []
    for samples in fed.visits(client, round)[:2]:
        gradients.append(gradient(fed, w, client, samples) + pull(w))
        w = step_by_hand(fed, w, samples[0], gradients[-1], lr=0.1)
    return w, torch.stack(gradients).mean(0)


@both_executors
@both_networks
@pytest.mark.parametrize("global_lr", [None, 0.5])
def test_three_rounds_of_scaffold_by_hand(factory, executor, global_lr):
    method = Scaffold(server_lr=global_lr)
    fed = run_method(method, *DRAWN, factory=factory, executor=executor, training=TWO_STEPS)
    theta = fed.model.init(fed.seed)
    size = fed.model.num_parameters
    variates = torch.zeros(4, size, dtype=theta.dtype)
    c = torch.zeros(size, dtype=theta.dtype)

    for round, ids in enumerate(DRAWN):
        new_variates = variates.clone()
        rows = []
        for k in ids:
            w, mean_gradient = stepped(fed, theta, k, round, lambda w: c - variates[k])  # noqa: B023
            new_variates[k] = variates[k] - c + mean_gradient
            rows.append(w)
        mean = torch.stack(rows).mean(0)
        theta = torch.cat([theta[:size] + (global_lr or 1.0) * (mean - theta)[:size], mean[size:]])
        c = c + (new_variates - variates).sum(0) / 4
        variates = new_variates

    assert_close(fed.server["theta"], theta, 1e-9)
    assert_close(client_states(fed, "c"), variates, 1e-9)
    assert_close(fed.server["c"], variates.mean(0), 1e-9)


@both_executors
@both_networks
def test_three_rounds_of_feddc_by_hand(factory, executor):
    alpha = 0.3
    fed = run_method(FedDC(alpha=alpha), *DRAWN, factory=factory, executor=executor, training=TWO_STEPS)
    theta = fed.model.init(fed.seed)
    size = fed.model.num_parameters
    drift, variates = torch.zeros(2, 4, size, dtype=theta.dtype)
    g = torch.zeros(size, dtype=theta.dtype)

    for round, ids in enumerate(DRAWN):
        new_variates = variates.clone()
        rows = []
        for k in ids:

            def pull(w, theta=theta, k=k, g=g, variates=variates):
                return alpha * ((w - theta)[:size] + drift[k]) + g - variates[k]

            w, mean_gradient = stepped(fed, theta, k, round, pull)
            new_variates[k] = variates[k] - g + mean_gradient
            rows.append(w)

        for k, w in zip(ids, rows, strict=True):
            drift[k] += (w - theta)[:size]
        g = g + (new_variates - variates).sum(0) / 4
        variates = new_variates
        mean = torch.stack(rows).mean(0)
        theta = torch.cat([mean[:size] + drift.mean(0), mean[size:]])

    assert_close(fed.server["theta"], theta, 1e-9)
    assert_close(client_states(fed, "drift"), drift, 1e-9)
    assert_close(client_states(fed, "gradient"), variates, 1e-9)


@both_executors
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("steps", [1, 5])
def test_control_variates_are_weighted_means_of_gradients_whatever_the_momentum(nesterov, steps, executor):
    training = replace(FP64, momentum=0.5, nesterov=nesterov, steps=steps, lr=1e-7)  # gradients stay what they are
    fed = run_method(Scaffold(), None, executor=executor, training=replace(training, batch_size=100))
    start = fed.model.init(fed.seed)
    assert_close(client_states(fed, "c"), torch.stack([gradient(fed, start, k) for k in range(4)]), 1e-5)


def test_control_variates_need_sgd():
    with pytest.raises(ConfigError, match=r"needs training\.optimizer=sgd, but it is Adam"):
        run_method(Scaffold(), None, training=replace(FP64, optimizer=Adam()))


@both_executors
@both_networks
def test_two_rounds_of_moon_by_hand(factory, executor):
    mu = 2.0
    tau = 0.5
    fed = run_method(Moon(mu=mu, temperature=tau), None, None, factory=factory, executor=executor, training=FP64)
    theta = fed.model.init(fed.seed)
    last = None

    def features(net, x):
        seen = []
        head = next(m for m in reversed(list(net.modules())) if isinstance(m, torch.nn.Linear))
        with head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0])):
            net(x)
        return seen[0], head(seen[0])

    for round in range(2):
        rows = []
        for k in range(4):
            net = as_module(factory, theta).train()
            received, previous = (
                as_module(factory, start).eval() for start in (theta, theta if last is None else last[k])
            )
            for x, y in fed.visits(k, round):
                z, outputs = features(net, x)
                near, far = (F.cosine_similarity(z, features(fixed, x)[0]) / tau for fixed in (received, previous))
                contrast = -torch.log(near.exp() / (near.exp() + far.exp())).mean()
                descend(F.cross_entropy(outputs, y) + mu * contrast, net.parameters())

            rows.append(as_vector(net))

        last = torch.stack(rows)
        weights = torch.tensor(fed.sizes, dtype=theta.dtype)
        theta = weights @ last / weights.sum()

    assert_close(fed.server["theta"], theta, 1e-9)


@both_executors
@both_networks
def test_moon_without_contrast_is_fedavg(factory, executor):
    a, b = (run_method(m, factory=factory, executor=executor, training=FP64).server for m in (FedAvg(), Moon(mu=0.0)))
    assert_close(a["theta"], b["theta"], 1e-9)


@both_executors
def test_extra_images_are_fedprox_on_the_union(executor):
    options = {"window": 2, "per_class": 2, "outer_steps": 2, "inner_steps": 3, "image_lr": 10.0}
    training = replace(FP64, batch_size=100)
    method = ExtraImages(mu=0.2, **options)
    fed = run_method(method, None, None, None, executor=executor, training=training)
    prox = run_method(FedProx(mu=0.2), None, None, None, executor=executor, training=training)

    assert_close(fed.server["theta"], prox.server["theta"], 1e-9)  # the window was not full
    start = fed.server["theta"]
    rows = []
    fed.run_rounds(None)

    for k, images in enumerate(client_states(fed, "images")):
        x, y = fed.samples(k)
        net = as_module(fed.factory, start)
        labels = method.labels(CLASSES, x.device)
        F.cross_entropy(net(torch.cat([x, images])), torch.cat([y, labels])).backward()
        rows.append(start - 0.1 * torch.cat([p.grad.reshape(-1) for p in net.parameters()]))

    weights = torch.tensor(fed.sizes, dtype=start.dtype)
    assert_close(fed.server["theta"], weights @ torch.stack(rows) / weights.sum(), 1e-8)


def test_control_variates_double_the_messages():
    for method, messages in ((Scaffold(), 2), (FedDC(), 2), (Moon(), 1)):
        fed = run_method(method, factory=NormalisedConv)
        sent = sent_per_client(fed.ledger, 1)
        for message_direction in ("down", "up"):
            numbers = sum(count for (direction, _), count in sent.items() if direction == message_direction)
            assert numbers == 108 + (messages - 1) * 102
