"""A loss that cannot be vectorised over clients is trained client by client, or refused in a sentence."""

from __future__ import annotations

import math
import re
import warnings
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from raypfl.clients.clients import Clients
from raypfl.common.errors import ClientError, MethodError, RaypflError
from raypfl.common.messages import per_client
from raypfl.models.flat import FlatModel
from tests.support.federation import (
    CLASSES,
    EXECUTORS,
    FP64,
    Federation,
    NormalisedConv,
    as_module,
    assert_close,
    bare_loop,
    both_executors,
    both_networks,
    starts_of,
)


def ignoring(fed: Federation, p: Tensor, batch) -> Tensor:
    return F.cross_entropy(fed.model(p, batch.x), batch.y)


def wrongly_divided(fed: Federation, p: Tensor, batch) -> Tensor:
    return (F.cross_entropy(fed.model(p, batch.x), batch.y, reduction="none") * batch.weight).mean()


def seen_by(fed: Federation, loss, sizes: list[int]):
    """The loss, which records how many samples it gets."""

    def noting(p, batch):
        sizes.append(len(batch.y))
        return loss(fed, p, batch)

    return noting


@both_networks
@pytest.mark.parametrize("careless", [ignoring, wrongly_divided])
def test_a_careless_loss_is_found_out_on_no_more_than_a_batch_of_a_large_client(careless, factory):
    fed = Federation(factory, sizes=(41, 4, 11))
    sizes = []
    clients = fed.clients()
    with pytest.warns(UserWarning, match=r"does not weigh its samples with batch\.weight"):
        trained = clients.sgd(seen_by(fed, careless, sizes), clients.initial)
    assert max(sizes) <= 2 * fed.training.batch_size
    assert_close(trained, bare_loop(fed, clients.initial.expand(3, -1))[0])

    sizes.clear()
    with pytest.warns(UserWarning, match=r"does not weigh its samples with batch\.weight"):
        clients.grad(seen_by(fed, careless, sizes), clients.initial)
    assert max(sizes) == 41

    sizes.clear()
    with pytest.warns(UserWarning, match=r"does not weigh its samples with batch\.weight"):
        next(clients.minibatches()).step(seen_by(fed, careless, sizes), trained)
    assert max(sizes) <= 2 * fed.training.batch_size


def test_beside_the_objective_a_penalty_alone_is_tried_on_padded_batches(monkeypatch):
    fed = Federation(sizes=(41, 4, 11))
    clients = fed.clients()

    def careless(p, batch):
        return p.square().sum() * batch.x.square().mean()

    with pytest.warns(UserWarning, match=r"careless.* does not weigh its samples with batch\.weight"):
        clients.sgd(clients.loss, clients.initial, penalty=careless)

    passes = []
    forward = FlatModel.__call__
    monkeypatch.setattr(FlatModel, "__call__", lambda *arguments: passes.append(1) or forward(*arguments))
    clients.sgd(clients.loss, clients.initial)
    expected = len(passes)
    start = clients.initial
    clients.sgd(clients.loss, start, penalty=lambda p, batch, anchor: (p - anchor).square().sum(), anchor=start)
    assert len(passes) == 2 * expected


def test_a_function_of_labels_alone_is_found_out_by_the_one_label_that_is_not_paddings():
    fed = Federation(sizes=(40, 4, 11))
    fed.labels[fed.split[0]] = 0
    fed.labels[fed.split[0][33]] = 2
    clients = fed.clients()

    def shares(p, batch):
        return F.one_hot(batch.y, CLASSES).double().mean(0)

    with pytest.warns(UserWarning, match=r"does not weigh its samples with batch\.weight"):
        rows = clients.map(shares, clients.initial)
    assert_close(rows, (clients.label_counts() / clients.num_samples[:, None]).as_subclass(Tensor))


def test_a_loss_that_weighs_its_samples_is_trained_together_however_large_clients_are():
    fed = Federation(sizes=(41, 4, 11))
    sizes = []
    clients = fed.clients()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained = clients.sgd(seen_by(fed, lambda fed, p, batch: clients.loss(p, batch), sizes), clients.initial)
    assert max(sizes) <= 2 * fed.training.batch_size
    assert_close(trained, bare_loop(fed, clients.initial.expand(3, -1))[0])


def test_a_loss_without_weights_is_trained_together_where_nothing_is_padded():
    fed = Federation(sizes=(8, 4, 8))
    clients = fed.clients()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained = clients.sgd(partial(ignoring, fed), clients.initial)
    assert_close(trained, bare_loop(fed, clients.initial.expand(3, -1))[0])


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_gradients_and_maps_of_a_function_without_weights_are_right_on_unequal_batches():
    fed = Federation()
    clients = fed.clients()
    gradients = clients.grad(partial(ignoring, fed), clients.initial)
    means = clients.map(lambda p, batch: fed.model(p, batch.x).mean(0), clients.initial)

    for k in range(4):
        x, y = fed.samples(k)
        net = as_module(fed.factory, clients.initial)
        assert_close(means[k], net(x).mean(0).detach())
        F.cross_entropy(net(x), y).backward()
        assert_close(gradients[k], torch.cat([p.grad.reshape(-1) for p in net.parameters()]))


def with_item(loss: Tensor) -> Tensor:
    return loss * (1.0 if loss.item() >= 0 else 0.0)


def with_if(loss: Tensor) -> Tensor:
    return loss if loss >= 0 else -loss


def with_tolist(loss: Tensor) -> Tensor:
    return loss * (1.0 if loss.tolist() >= 0 else 0.0)


@pytest.mark.parametrize("peek", [with_item, with_if, with_tolist])
def test_a_loss_that_looks_at_numbers_is_trained_one_by_one_with_a_warning(peek):
    fed = Federation(NormalisedConv)
    clients = fed.clients()

    def loss(p, batch):
        return peek(clients.loss(p, batch))

    start = clients.initial.clone()
    line = loss.__code__.co_firstlineno + 1
    function = rf"\.loss \(test_losses\.py, line {line}\)"
    with pytest.warns(UserWarning, match=rf"{function} cannot be vectorised, so clients run one by one"):
        trained = clients.sgd(loss, clients.initial)
    assert_close(trained, bare_loop(fed, start.expand(4, -1))[0])
    with pytest.warns(UserWarning, match="one by one"):
        assert_close(clients.grad(loss, start), clients.grad(clients.loss, start).as_subclass(Tensor))


@both_executors
@pytest.mark.parametrize(
    ("returned", "kind"),
    [
        (lambda value: value.expand(3), r"a tensor of shape \[3\]"),
        (lambda value: value[None], r"a tensor of shape \[1\]"),
        (lambda value: (value, value[None]), r"a tensor of shape \[1\]"),
        (lambda value: None, "a NoneType"),
    ],
    ids=["rows", "row", "pair", "nothing"],
)
def test_a_loss_that_is_no_number_is_refused_with_its_place(returned, kind, executor):
    clients = Federation(executor=executor).clients()

    def loss(p, batch):
        return returned(clients.loss(p, batch))

    line = loss.__code__.co_firstlineno
    for work in (clients.sgd, clients.grad):
        with pytest.raises(MethodError, match=rf"\.loss \(test_losses\.py, line {line}\) returned {kind}; a loss must"):
            work(loss, clients.initial)


@both_executors
@pytest.mark.parametrize("work", ["sgd", "grad", "map"])
def test_a_loss_that_closes_over_rows_of_all_clients_is_refused(work, executor):
    fed = Federation(executor=executor)
    clients = fed.clients(personal=starts_of(fed))
    personal = clients.state["personal"]

    def pulled(p, batch):
        return clients.loss(p, batch) + (p - personal).square().sum()

    with pytest.raises(ValueError, match=re.escape("by name instead: clients.sgd(loss, start, anchor=personal)")):
        getattr(clients, work)(pulled, clients.initial)
    assert torch.isfinite(personal + 1).all()
    clients.sgd(clients.loss, clients.initial)


@both_executors
def test_what_is_computed_from_rows_of_all_clients_may_not_be_closed_over_either(executor):
    clients = Federation(executor=executor).clients()
    derived = (clients.sgd(clients.loss, clients.initial) * 2)[1] + clients.num_samples[1]
    with pytest.raises(ValueError, match="holds a row for every client"):
        clients.sgd(lambda p, batch: clients.loss(p, batch) + (p - derived).sum(), clients.initial)


def test_an_extra_with_as_many_rows_as_clients_must_say_whose_they_are():
    fed = Federation()
    group = fed.group()
    clients = Clients(group)
    rows = torch.zeros(4, fed.model.size, dtype=torch.float64)

    def loss(p, batch, table):
        return clients.loss(p, batch) + 0 * table.sum()

    for work in (clients.sgd, clients.grad, clients.map):
        with pytest.raises(ValueError, match=re.escape("pass raypfl.per_client(table)")):
            work(loss, clients.initial, table=rows)

    group.share({"rows": rows})
    clients.sgd(loss, clients.initial, table=rows)
    clients.sgd(loss, clients.initial, table=per_client(rows))
    clients.sgd(loss, clients.initial, table=torch.zeros(5, 4))


@both_executors
def test_a_loss_that_is_not_a_number_names_its_clients_and_the_round(executor):
    clients = Federation(executor=executor).clients(ids=[3, 2, 1, 0], round=6)
    factors = torch.tensor([1.0, math.nan, 1.0, math.nan])
    with pytest.raises(ClientError, match=r"diverged on client 2 in round 6: mean loss nan.*training\.lr") as caught:
        clients.sgd(
            lambda p, batch, factor: factor * clients.loss(p, batch), clients.initial, factor=per_client(factors)
        )
    assert caught.value.clients == (2, 0)
    assert caught.value.repeatable


@both_executors
def test_a_client_without_training_samples_is_named_in_a_sentence(executor):
    clients = Federation(sizes=(5, 0, 3), executor=executor).clients()
    with pytest.raises(RaypflError, match=r"^Client 1 has no samples in its train split"):
        clients.sgd(clients.loss, clients.initial)


@both_executors
def test_a_loss_above_the_limit_and_a_model_that_overflows_are_refused(executor):
    fed = Federation(executor=executor, loss_limit=10.0)
    clients = fed.clients()

    def steep(p, batch, slope):
        return clients.loss(p, batch) + slope

    slopes = per_client(torch.tensor([0.0, 0.0, 100.0, 0.0], dtype=torch.float64))
    with pytest.raises(ClientError, match=r"client 2 in round 0: mean loss 10\d, limit 10\.") as caught:
        clients.sgd(steep, clients.initial, slope=slopes)
    assert caught.value.clients == (2,)
    with pytest.raises(ClientError, match="diverged"):
        clients.sgd(clients.loss, clients.initial, steps=1, lr=float("inf"))


@both_executors
@both_networks
def test_a_map_with_a_row_a_sample_is_padded_with_zeros_to_the_largest_client(factory, executor):
    fed = Federation(factory, executor=executor)
    clients = fed.clients()
    starts = starts_of(fed)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        outputs = clients.map(lambda p, batch: fed.model(p, batch.x).exp(), per_client(starts))

    assert outputs.shape == (4, 11, CLASSES)

    for k, size in enumerate(fed.sizes):
        net = as_module(factory, starts[k]).eval()
        assert_close(outputs[k, :size], net(fed.samples(k)[0]).exp().detach())
        assert not outputs[k, size:].any()


@both_executors
def test_a_vector_that_is_by_chance_as_long_as_the_largest_batch_is_not_taken_for_rows(executor):
    clients = Federation(executor=executor, sizes=(2, 3)).clients()

    def shares(p, batch):
        return batch.mean(F.one_hot(batch.y, CLASSES).to(p.dtype)) + 1

    expected = clients.label_counts() / clients.num_samples[:, None] + 1
    assert_close(clients.map(shares, clients.initial), expected.as_subclass(Tensor))


@both_executors
def test_a_mistake_that_no_way_mends_is_raised_as_the_plainest_way_raises_it(executor):
    clients = Federation(executor=executor, sizes=(4, 4)).clients()

    def mistaken(p, batch):
        return clients.loss(p, batch) + (batch.x.flatten(1) @ torch.ones(31, dtype=p.dtype)).sum()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeError, match=r"\(4x32 and 31\)|size mismatch|mat.*vec"):
            clients.sgd(mistaken, clients.initial)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("cuDNN error on CUDA: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    ],
    ids=str,
)
def test_memory_that_runs_out_is_no_reason_to_fall_back(error):
    clients = Federation().clients()
    tries = []

    def huge(p, batch):
        tries.append(1)
        raise error

    with pytest.raises(type(error), match="CUDA"):
        clients.map(huge, clients.initial, clients.batches(3, "some"))
    assert len(tries) == 1


def test_a_walk_that_has_fallen_back_does_not_try_every_step_anew():
    fed = Federation(training=replace(FP64, epochs=3))
    tries = []
    clients = fed.clients()

    def peeking(p, batch):
        tries.append(len(batch.y))
        return with_item(clients.loss(p, batch))

    theta = clients.initial.repeat(4, 1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in clients.minibatches():
            theta = batch.step(peeking, theta)

    assert len(caught) == 1
    assert_close(theta, bare_loop(fed, clients.initial.expand(4, -1))[0])


@both_executors
def test_all_that_a_client_has_is_asked_for_by_any_large_number(executor):
    fed = Federation(executor=executor, training=replace(FP64, batch_size=10**9))
    clients = fed.clients()
    batches = clients.batches(10**9, "all")
    assert [len(batch.y) for batch in batches] == list(fed.sizes)
    assert all(torch.equal(b.y.sort()[0], fed.samples(k)[1].sort()[0]) for k, b in enumerate(batches))
    whole = Federation(training=replace(FP64, batch_size=11))
    assert_close(clients.sgd(clients.loss, clients.initial), bare_loop(whole, clients.initial.expand(4, -1))[0])


def after_a_step(clients, alpha):
    """Return the loss after a step of `alpha` down its own slope."""

    def loss(p, batch):
        before = p.clone()
        (slope,) = torch.autograd.grad(clients.loss(before, batch), before, create_graph=True)
        return clients.loss(before - alpha * slope, batch)

    return loss


@both_executors
@pytest.mark.filterwarnings("ignore::raypfl.clients.context.FallbackWarning")
def test_a_loss_that_differentiates_is_trained_with_its_second_derivatives(executor):
    fed = Federation(sizes=(9,), executor=executor)
    clients = fed.clients()
    p = clients.initial
    for x, y in fed.visits(0):
        p = p.requires_grad_()
        (slope,) = torch.autograd.grad(F.cross_entropy(fed.model(p, x), y), p, create_graph=True)
        value = F.cross_entropy(fed.model(p - 0.5 * slope, x), y)
        p = (p - fed.training.lr * torch.autograd.grad(value, p)[0]).detach()
    assert_close(clients.sgd(after_a_step(clients, 0.5), clients.initial)[0], p)


@pytest.mark.filterwarnings("ignore::raypfl.clients.context.FallbackWarning")
def test_a_loss_that_differentiates_is_trained_on_unequal_batches_too():
    groups = [Federation(executor=executor).clients() for executor in EXECUTORS]
    assert_close(*(clients.sgd(after_a_step(clients, 0.1), clients.initial) for clients in groups))


def at_the_model_it_starts_from(clients, theta):
    return lambda p, batch: clients.loss(theta, batch)


def at_a_constant(clients, theta):
    return lambda p, batch: batch.mean(batch.x.flatten(1).sum(1))


def without_a_gradient(clients, theta):
    return lambda p, batch: clients.loss(p.detach(), batch)


def at_a_model_with_a_gradient(clients, theta):
    elsewhere = theta.clone().requires_grad_()
    return lambda p, batch: clients.loss(elsewhere, batch)


def steps_of(clients, loss, start, **options):
    theta = start.expand(len(clients), -1)
    for batch in clients.minibatches():
        theta = batch.step(loss, theta, **options)
    return theta


NO_GRADIENT = r"\(test_losses\.py, line {line}\) does not depend on the parameters p that are trained"


@both_executors
@pytest.mark.parametrize(
    "make", [at_the_model_it_starts_from, at_a_constant, without_a_gradient, at_a_model_with_a_gradient]
)
def test_a_loss_that_ignores_its_parameters_trains_nothing_and_is_warned_of_with_its_line(make, executor):
    clients = Federation(executor=executor).clients()
    start = clients.initial.clone()
    loss = make(clients, start)
    warning = NO_GRADIENT.format(line=loss.__code__.co_firstlineno)

    with pytest.warns(UserWarning, match=warning):
        assert torch.equal(clients.sgd(loss, start), start.expand(4, -1))
    with pytest.warns(UserWarning, match=warning):
        assert torch.equal(steps_of(clients, loss, start), start.expand(4, -1))
    with pytest.warns(UserWarning, match=warning):
        assert not clients.grad(loss, start).any()


@both_executors
@pytest.mark.parametrize("train", [Clients.sgd, steps_of])
def test_a_loss_that_ignores_its_parameters_is_warned_of_though_a_penalty_does_not(train, executor):
    clients = Federation(executor=executor).clients()
    loss = at_the_model_it_starts_from(clients, clients.initial)
    with pytest.warns(UserWarning, match=NO_GRADIENT.format(line=loss.__code__.co_firstlineno)):
        train(clients, loss, clients.initial, penalty=lambda p, batch: p.square().sum())


@both_executors
def test_a_loss_of_some_parameters_or_of_none_on_purpose_is_not_warned_of(executor):
    fed = Federation(executor=executor)
    clients = fed.clients()
    bias = fed.model.names("output layer")[-1]

    def of_the_bias(p, batch):
        return fed.model.segment(p, bias).square().sum()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for loss in (of_the_bias, lambda p, batch: 0 * p.sum()):
            clients.sgd(loss, clients.initial)
            clients.grad(loss, clients.initial)
            steps_of(clients, loss, clients.initial, penalty=lambda p, batch: p.square().sum())


@both_executors
@both_networks
@pytest.mark.parametrize("train", [Clients.sgd, steps_of, Clients.grad])
def test_a_loss_may_call_the_plain_module_of_the_network(train, factory, executor):
    clients = Federation(factory, executor=executor).clients()

    def of_the_module(p, batch):
        return batch.mean(F.cross_entropy(clients.model.module(batch.x), batch.y, reduction="none"))

    def of_the_function(p, batch):
        return batch.mean(F.cross_entropy(clients.model(p, batch.x), batch.y, reduction="none"))

    expected = train(clients, of_the_function, clients.initial)
    assert torch.equal(train(clients, of_the_module, clients.initial), expected)


@both_executors
def test_map_refuses_the_plain_module_where_it_would_compute_with_its_first_weights(executor):
    fed = Federation(executor=executor)
    clients = fed.clients()
    module = clients.model.module
    with pytest.raises(MethodError, match=r"call clients\.model\(theta, x\) with a model vector"):
        clients.map(lambda p, batch: module(batch.x), clients.initial)

    outputs = clients.map(lambda p, batch: clients.model(p, batch.x), clients.initial)
    swapped = clients.map(
        lambda p, batch: torch.func.functional_call(module, clients.model.unflatten(p), (batch.x,)), clients.initial
    )
    assert torch.equal(swapped, outputs)
    module(clients.batches(4, "test")[0].x)  # outside, it is an ordinary module
