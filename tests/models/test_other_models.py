"""A loss may call another model: that model does not move, and calling it changes nothing in training."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from raypfl.common.errors import MethodError
from raypfl.common.messages import per_client
from tests.support.federation import (
    Federation,
    NormalisedConv,
    as_module,
    as_vector,
    assert_close,
    bare_loop,
    both_executors,
    starts_of,
)


class DroppingNorm(NormalisedConv):
    """Batch norm, and dropout behind it."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.dropout(self.norm(self.conv(x)).relu().flatten(1), 0.3, self.training))


def distilled_in_torch(fed: Federation, starts: Tensor, teachers: Tensor, weight: float) -> Tensor:
    """Train each client toward its teacher's outputs, by a loop over ordinary modules."""
    rows = []
    for k, start in enumerate(starts):
        net = as_module(fed.factory, start).train()
        teacher = as_module(fed.factory, teachers[k]).eval()
        optimizer = torch.optim.SGD(net.parameters(), lr=fed.training.lr)
        for x, y in fed.visits(k):
            outputs = net(x)
            loss = F.cross_entropy(outputs, y) + weight * (outputs - teacher(x)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        rows.append(as_vector(net))

    return torch.stack(rows)


@both_executors
@pytest.mark.parametrize("whose", ["each its own", "one for all"])
def test_a_teacher_in_a_loss_is_the_bare_loops(whose, executor):
    fed = Federation(NormalisedConv, executor=executor)
    clients = fed.clients()
    starts = starts_of(fed)
    teachers = starts.flip(0) + 0.3 if whose == "each its own" else (starts[:1] + 0.3).expand(4, -1)
    before = teachers.clone()

    def loss(p, batch, teacher):
        outputs = clients.model(p, batch.x)
        distance = batch.mean((outputs - teacher(batch.x)).square().mean(1))
        return clients.objective.loss(outputs, batch) + 0.5 * distance

    teacher = clients.other(per_client(teachers) if whose == "each its own" else teachers[0])
    expected = distilled_in_torch(fed, starts, teachers, 0.5)
    assert_close(clients.sgd(loss, per_client(starts), teacher=teacher), expected)

    theta = per_client(starts)
    for batch in clients.minibatches():
        theta = batch.step(loss, theta, teacher=teacher)
    assert_close(theta, expected)
    assert torch.equal(teachers, before)


@both_executors
def test_calling_another_model_changes_no_bit_of_training(executor):
    """Not the statistics, and not what dropout draws."""
    fed = Federation(DroppingNorm, executor=executor)
    clients = fed.clients()
    starts = per_client(starts_of(fed))

    def loss(p, batch, teacher):
        return 0 * teacher.features(batch.x).sum() + clients.loss(p, batch) + 0 * teacher(batch.x).sum()

    with_teacher = clients.sgd(loss, starts, teacher=clients.other(starts))
    assert torch.equal(with_teacher.as_subclass(Tensor), clients.sgd(clients.loss, starts).as_subclass(Tensor))


@both_executors
def test_outputs_and_features_of_another_model_are_its_modules(executor):
    fed = Federation(DroppingNorm, executor=executor, sizes=(6, 6))
    clients = fed.clients()
    starts = starts_of(fed)
    other = clients.other(starts)
    mapped = clients.map(lambda p, batch, other: other(batch.x).sum(0), clients.initial, other=other)
    x, _ = fed.samples(0)

    for k in range(2):
        net = as_module(fed.factory, starts[k]).eval()
        features = net.norm(net.conv(x)).relu().flatten(1)
        assert_close(other(x)[k], net(x).detach())
        assert_close(other.features(x)[k], features.detach())
        assert_close(clients.other(starts[k]).features(x), features.detach())
        assert_close(mapped[k], net(fed.samples(k)[0]).sum(0).detach())


@both_executors
@pytest.mark.parametrize("work", ["sgd", "grad"])
def test_a_second_call_in_training_mode_is_refused_and_names_the_call_for_another_model(work, executor):
    clients = Federation(NormalisedConv, executor=executor).clients()

    def loss(p, batch, previous):
        return clients.loss(p, batch) + clients.model(previous, batch.x).square().mean()

    with pytest.raises(MethodError, match=r"twice in training mode.*\(loss, penalty\).*clients\.other\(theta\)"):
        getattr(clients, work)(loss, clients.initial, previous=per_client(clients.initial.repeat(4, 1)))
    assert_close(clients.sgd(clients.loss, clients.initial, epochs=1), bare_loop_of(clients))


def bare_loop_of(clients) -> Tensor:
    fed = Federation(NormalisedConv)
    return bare_loop(fed, clients.initial.expand(4, -1))[0]


@both_executors
def test_without_batch_norm_a_loss_may_call_the_network_as_often_as_it_likes(executor):
    fed = Federation(executor=executor)
    clients = fed.clients()

    def twice(p, batch):
        return (clients.loss(p, batch) + clients.loss(p, batch)) / 2

    assert_close(clients.sgd(twice, clients.initial), bare_loop(fed, clients.initial.expand(4, -1))[0])


@both_executors
def test_another_model_of_each_client_that_a_loss_closes_over_must_come_by_name(executor):
    clients = Federation(NormalisedConv, executor=executor).clients()
    teacher = clients.other(clients.initial.repeat(4, 1))
    with pytest.raises(MethodError, match="Pass it by name"):
        clients.sgd(lambda p, batch: clients.loss(p, batch) + teacher(batch.x).sum(), clients.initial)


def test_parameters_without_statistics_are_refused_as_another_model():
    clients = Federation(NormalisedConv).clients()
    with pytest.raises(MethodError, match=r"needs a whole model vector \[108\].*this has shape \[102\]"):
        clients.other(clients.model.parameters(clients.initial))


@both_executors
def test_the_trained_model_is_refused_as_another_model(executor):
    fed = Federation(executor=executor)
    clients = fed.clients()
    with pytest.raises(MethodError, match=r"called inside a loss.*clients\.model\.features\(p, batch\.x\)"):
        clients.sgd(lambda p, batch: clients.other(p)(batch.x).sum(), clients.initial)
