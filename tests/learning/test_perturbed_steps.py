"""Steps along the gradient at a perturbed model, and gradients of single mini-batches."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from raypfl.common.messages import per_client, unmarked
from raypfl.learning.recording import Replays
from raypfl.learning.vectorised import Vectorised
from raypfl.methods.local_training import proximal
from tests.support.federation import (
    FP64,
    Federation,
    NormalisedConv,
    as_module,
    as_vector,
    assert_close,
    both_executors,
    dropping_mlp,
    gradient,
    starts_of,
)

TRAINED = "conv*, norm*"


def halfway(p, gradient):
    """Go along the gradient and toward zero, by other amounts for each entry."""
    return 0.3 * gradient / gradient.norm(dim=-1, keepdim=True) - 0.1 * p


@both_executors
@pytest.mark.parametrize("train", [None, TRAINED])
def test_a_perturbed_step_follows_the_other_points_gradient_with_the_penalty_and_statistics_of_the_model(
    executor, train
):
    training = replace(FP64, momentum=0.5, weight_decay=0.2, clip_norm=0.4, epochs=2)
    fed = Federation(NormalisedConv, executor=executor, training=training)
    clients = fed.clients()
    starts = starts_of(fed)
    size = fed.model.num_parameters
    mask = torch.ones(size) if train is None else fed.model.mask(train)[:size].double()
    options = {"penalty": proximal(0.7), "perturb": halfway, "anchor": clients.initial}
    trained = clients.sgd(clients.loss, per_client(starts), train=train, **options)

    for k, start in enumerate(starts):
        theta = start.clone()
        velocity = torch.zeros(size, dtype=start.dtype)
        for x, y in fed.visits(k):
            net = as_module(fed.factory, theta).train()
            net(x)
            statistics = as_vector(net)[size:]

            first = gradient(fed, theta, k, (x, y)) * mask
            elsewhere = torch.cat([theta[:size] + halfway(theta[:size], first), theta[size:]])
            direction = gradient(fed, elsewhere, k, (x, y)) + 0.7 * (theta - clients.initial)[:size]
            direction = direction * mask
            direction = direction * (0.4 / (direction.norm() + 1e-6)).clamp_max(1) + 0.2 * theta[:size] * mask
            velocity = 0.5 * velocity + direction
            theta = torch.cat([theta[:size] - 0.1 * velocity, statistics])

        if train is None:
            assert_close(trained[k], theta)
        else:
            assert_close(trained[k, :size], theta[:size])

    if train is None:
        stepped = per_client(starts)
        for batch in clients.minibatches():
            stepped = batch.step(clients.loss, stepped, **options)
        assert_close(stepped, unmarked(trained))


@both_executors
def test_both_gradients_of_a_perturbed_step_have_the_same_dropout(executor):
    fed = Federation(dropping_mlp, executor=executor)
    clients = fed.clients()
    plain = clients.sgd(clients.loss, clients.initial)
    assert_close(clients.sgd(clients.loss, clients.initial, perturb=lambda p, g: 0 * g), unmarked(plain))


def test_a_recorded_perturbed_step_has_the_bits_of_one_that_is_not():
    models = []
    for recorder in (None, Replays()):
        fed = Federation(NormalisedConv, sizes=(8, 8), training=replace(FP64, batch_size=4, epochs=12))
        fed.context.executor = Vectorised(fed.model, recorder=recorder)
        clients = fed.clients()
        models.append(clients.sgd(clients.loss, clients.initial, perturb=halfway))
    assert torch.equal(*models) and fed.context.executor.recorder is not None


@both_executors
def test_the_gradient_of_a_mini_batch_is_that_of_a_step_and_zero_for_clients_that_have_none(executor):
    fed = Federation(NormalisedConv, executor=executor)
    clients = fed.clients()
    visits = [fed.visits(k) for k in range(4)]
    for s, batch in enumerate(clients.minibatches()):
        rows = batch.grad(clients.loss, clients.initial)
        for k, of_client in enumerate(visits):
            expected = torch.zeros(102, dtype=torch.float64)
            if s < len(of_client):
                expected = gradient(fed, clients.initial, k, of_client[s])
            assert_close(rows[k], expected)
    assert clients.losses is None
