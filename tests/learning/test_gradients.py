"""Gradients, maps, cotangents and class means of a group are autograd's on one client, with both executors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from raypfl.common.messages import per_client
from raypfl.methods import Method
from raypfl.models import FlatModel
from tests.support.federation import (
    CLASSES,
    Federation,
    NormalisedConv,
    as_module,
    assert_close,
    both_executors,
    both_networks,
    gradient,
    starts_of,
)


@both_executors
@both_networks
def test_gradients_are_autograds_and_agree_with_finite_differences(factory, executor):
    fed = Federation(factory, executor=executor)
    clients = fed.clients()
    theta = starts_of(fed)
    gradients = clients.grad(clients.loss, per_client(theta)).as_subclass(Tensor)
    size = fed.model.num_parameters
    direction = torch.randn(size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    for k in range(4):
        x, y = fed.samples(k)

        def value(parameters: Tensor, k=k, x=x, y=y) -> Tensor:
            net = as_module(factory, torch.cat([parameters, theta[k, size:]])).train()
            return F.cross_entropy(net(x), y)

        ahead, behind = (value(theta[k, :size] + step * direction) for step in (1e-6, -1e-6))
        assert float(gradients[k] @ direction) == pytest.approx(float((ahead - behind).detach() / 2e-6), rel=1e-5)
        assert_close(gradients[k], gradient(fed, theta[k], k))


@both_executors
def test_gradients_are_taken_on_the_batches_and_with_the_extras_that_are_given(executor):
    fed = Federation(executor=executor)
    clients = fed.clients()
    batches = clients.batches(5, "some")
    anchors = starts_of(fed)

    def loss(p, batch, anchor):
        return clients.loss(p, batch) + 0.5 * (p - anchor).square().sum()

    gradients = clients.grad(loss, clients.initial, batches, anchor=per_client(anchors))
    for k, batch in enumerate(batches):
        expected = gradient(fed, clients.initial, k, (batch.x, batch.y)) + clients.initial - anchors[k]
        assert_close(gradients[k], expected)


@both_executors
def test_gradients_leave_model_vectors_as_they_are(executor):
    fed = Federation(NormalisedConv, executor=executor)
    clients = fed.clients()
    theta = starts_of(fed)
    before = theta.clone()
    clients.grad(clients.loss, per_client(theta))
    assert torch.equal(theta, before)


@both_executors
def test_a_map_sees_each_clients_row_samples_and_extras_in_evaluation_mode(executor):
    fed = Federation(NormalisedConv, executor=executor)
    clients = fed.clients()
    vectors = starts_of(fed)
    vectors[:, fed.model.num_parameters :] += 0.5
    scales = torch.arange(1.0, 5.0, dtype=torch.float64)

    def describe(theta, batch, scale):
        return scale * batch.mean(fed.model(theta, batch.x))

    rows = clients.map(describe, per_client(vectors), scale=per_client(scales))
    for k in range(4):
        net = as_module(fed.factory, vectors[k]).eval()
        assert_close(rows[k], scales[k] * net(fed.samples(k)[0]).mean(0).detach())


@both_executors
def test_a_methods_own_network_is_in_evaluation_mode_in_maps_too(executor):
    def embedding():
        return nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(32, 4))

    class Dropped(Method):
        def networks(self, task):
            return {"embed": FlatModel(embedding, dtype=task.model.dtype)}

    fed = Federation(executor=executor, method=Dropped())
    clients = fed.clients()
    embed = clients.networks["embed"]
    theta = embed.init(0)
    rows = clients.map(lambda p, batch: batch.mean(embed(p, batch.x)), theta)

    for client in range(4):
        x, _ = fed.samples(client)
        assert_close(rows[client], as_module(embedding, theta).eval()(x).mean(0).detach())


@both_executors
@pytest.mark.parametrize("shared", [True, False])
def test_pulling_a_cotangent_back_is_autograd_through_the_map(shared, executor):
    fed = Federation(executor=executor)
    clients = fed.clients()
    vectors = fed.model.init(1) if shared else starts_of(fed)
    cotangent = torch.randn(4, CLASSES, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def describe(theta, batch):
        return batch.mean(fed.model(theta, batch.x))

    pulled = clients.vjp(describe, vectors if shared else per_client(vectors), per_client(cotangent))
    for k in range(4):
        net = as_module(fed.factory, vectors if shared else vectors[k])
        (net(fed.samples(k)[0]).mean(0) @ cotangent[k]).backward()
        assert_close(pulled[k], torch.cat([p.grad.reshape(-1) for p in net.parameters()]))


@both_executors
def test_class_means_are_those_of_each_clients_own_samples(executor):
    fed = Federation(executor=executor, sizes=(7, 1, 11))
    clients = fed.clients()
    means, counts = clients.class_means(lambda theta, x: x.flatten(1)[:, :6], clients.initial)
    for k in range(3):
        x, y = fed.samples(k)
        for c in range(CLASSES):
            class_pixels = x.flatten(1)[y == c, :6]
            expected = class_pixels.mean(0) if len(class_pixels) else torch.zeros(6, dtype=torch.float64)
            assert counts[k, c] == len(class_pixels)
            assert_close(means[k, c], expected)
