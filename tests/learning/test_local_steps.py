"""Local training by rules other than SGD; penalties, corrections and reported losses; per-sample gradients."""

from __future__ import annotations

import gc
import inspect
import re
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from raypfl.common.errors import ClientError, MethodError, PrivacyError
from raypfl.common.messages import per_client, unmarked
from raypfl.learning.optimizers import SGD, Adam, AdamW, LocalOptimizer, Update
from raypfl.learning.privacy import PrivacySettings
from raypfl.methods import MTL, Ditto, FedProto, FedProx, PFedMe
from tests.support.federation import (
    EXECUTORS,
    FP64,
    Federation,
    NormalisedConv,
    as_module,
    as_vector,
    assert_close,
    bare_loop,
    both_executors,
    both_networks,
    dropping_mlp,
    gradient,
    small_mlp,
    starts_of,
    torch_sgd,
)

BY_TORCH = {"adam": (Adam(eps=1e-3), torch.optim.Adam), "adamw": (AdamW(eps=1e-3), torch.optim.AdamW)}


@both_executors
@both_networks
@pytest.mark.parametrize("name", BY_TORCH)
def test_training_by_another_rule_is_the_bare_loop_with_torchs(name, factory, executor):
    optimizer, kind = BY_TORCH[name]
    training = replace(FP64, optimizer=optimizer, lr=0.01, weight_decay=0.1, clip_norm=0.5, epochs=2)
    fed = Federation(factory, executor=executor, training=training)
    starts = starts_of(fed)
    clients = fed.clients()
    trained = clients.sgd(clients.loss, per_client(starts))
    options = {"lr": 0.01, "weight_decay": 0.1, "clip_norm": 0.5, "eps": 1e-3, "kind": kind}

    for k, start in enumerate(starts):
        net = as_module(factory, start)
        losses = torch_sgd(net, fed.visits(k), **options)
        assert_close(trained[k], as_vector(net))
        assert_close(clients.losses[k], torch.tensor(np.mean(losses), dtype=torch.float64))


@both_executors
@pytest.mark.parametrize("optimizer", [Adam(), SGD(momentum=0.9)])
def test_stepping_with_a_custom_rule_is_training_with_it(optimizer, executor):
    fed = Federation(NormalisedConv, executor=executor, training=replace(FP64, epochs=2))
    clients = fed.clients()
    theta = clients.initial
    beside = clients.initial

    for batch in clients.minibatches():
        theta = batch.step(clients.loss, theta, of="one", optimizer=optimizer, lr=0.01)
        beside = batch.step(clients.loss, beside, of="other")

    assert_close(theta, unmarked(clients.sgd(clients.loss, clients.initial, optimizer=optimizer, lr=0.01)))
    assert_close(beside, unmarked(clients.sgd(clients.loss, clients.initial)))


def pull(p: Tensor, batch, anchor: Tensor) -> Tensor:
    return 0.3 * (p - anchor).square().sum()


class HeavyBall(LocalOptimizer):
    """Momentum whose step puts a new tensor into the memory."""

    def init(self, theta):
        return {"momentum": torch.zeros_like(theta)}

    def step_(self, theta, grad, memory, lr):
        memory["momentum"] = 0.9 * memory["momentum"] + grad
        theta.sub_(memory["momentum"], alpha=lr)


@both_executors
def test_a_rule_may_put_new_tensors_into_its_memory(executor):
    training = replace(FP64, optimizer=HeavyBall(), epochs=3)
    fed = Federation(executor=executor, training=training)
    clients = fed.clients()
    expected = clients.sgd(clients.loss, clients.initial, optimizer=SGD(momentum=0.9))
    assert_close(clients.sgd(clients.loss, clients.initial), unmarked(expected))

    rows = clients.initial.repeat(len(clients), 1)
    for batch in clients.minibatches():
        rows = batch.step(clients.loss, rows)
    assert_close(rows, unmarked(expected))


class Swaps(LocalOptimizer):
    def step_(self, theta, grad, memory, lr):
        old = memory["old"]
        memory["old"] = memory["new"]
        memory["new"] = old


def test_a_rule_may_move_what_it_remembers_from_one_name_to_another():
    memory = {"new": torch.ones(3), "old": torch.zeros(3)}
    tensors = dict(memory)
    Update(Swaps(), lr=0.1).step_(torch.zeros(3), torch.zeros(3), memory)
    assert torch.equal(tensors["new"], torch.zeros(3)) and torch.equal(tensors["old"], torch.ones(3))


class Returns(LocalOptimizer):
    def step_(self, theta, grad, memory, lr):
        return theta - lr * grad


class Adds(LocalOptimizer):
    def step_(self, theta, grad, memory, lr):
        memory["last"] = grad


class Counts(LocalOptimizer):
    def init(self, theta):
        return {"steps": 0}


@pytest.mark.parametrize(
    ("optimizer", "sentence"),
    [
        (Returns(), r"Returns\.step_ .* returned \[.*\]; it must return nothing, and change theta in place"),
        (Adds(), r"Adds\.step_ .* adds or removes 'last' in the memory, which must keep the names that init"),
        (Counts(), r"Counts\.init .* returned a dict; it must return a dict of tensors \[\.\.\., P\] or"),
    ],
)
@both_executors
def test_a_rule_that_cannot_take_a_step_is_refused_in_a_sentence(optimizer, sentence, executor):
    clients = Federation(executor=executor).clients()
    with pytest.raises(MethodError, match=sentence):
        clients.sgd(clients.loss, clients.initial, optimizer=optimizer)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"epochs": 0.5}, "epochs of a local training is 0.5; it must be a whole number, at least 0."),
        ({"steps": 2.5}, "steps of a local training is 2.5; it must be"),
        ({"epochs": -1}, "epochs of a local training is -1; it must be"),
        ({"batch_size": 0}, "batch_size of a local training is 0; it must be a whole number, at least 1."),
        ({"optimizer": Adam}, "The optimizer of a training is the class Adam; it must be an object such as Adam()"),
        ({"optimizer": "adam"}, "The optimizer of a training is a str; it must be"),
        ({"lr": torch.full((4,), 0.1)}, "lr of a training is a tensor of shape [4]; it must be one number"),
        ({"lr": "0.1"}, "lr of a training is a str; it must be one number"),
    ],
)
def test_options_of_a_training_that_cannot_be_meant_are_refused_in_a_sentence(options, sentence):
    clients = Federation().clients()
    with pytest.raises(MethodError, match=re.escape(sentence)):
        clients.sgd(clients.loss, clients.initial, **options)


@both_executors
def test_a_penalty_is_minimised_and_not_reported(executor):
    fed = Federation(NormalisedConv, executor=executor)
    clients = fed.clients()

    def both(p, batch, anchor):
        return clients.loss(p, batch) + pull(p, batch, anchor)

    starts = per_client(starts_of(fed))
    extras = {"anchor": clients.initial}
    whole = clients.sgd(both, starts, **extras)
    reported_whole = clients.losses
    apart = clients.sgd(clients.loss, starts, penalty=pull, **extras)
    reported = clients.losses
    pair = clients.sgd(lambda p, b, anchor: (clients.loss(p, b), pull(p, b, anchor)), starts, **extras)

    assert torch.equal(apart, whole) and torch.equal(pair, whole)
    assert torch.equal(clients.losses, reported)
    assert (reported_whole - reported > 0.1).all()

    theta = starts
    for batch in clients.minibatches():
        theta = batch.step(clients.loss, theta, penalty=pull, **extras)
    assert_close(theta, unmarked(whole))
    assert_close(clients.losses, reported)


def test_several_steps_on_a_mini_batch_report_their_mean():
    clients = Federation().clients()
    theta: Tensor = clients.initial
    for batch in clients.minibatches():
        for _ in range(3):
            theta = batch.step(clients.loss, theta, lr=1e-9)
    tripled = clients.losses
    clients.sgd(clients.loss, clients.initial, lr=1e-9)
    assert_close(tripled, clients.losses, 1e-6)


@pytest.mark.parametrize("method", [FedProx(mu=9.0), Ditto(lam=9.0), MTL(lam=9.0), PFedMe(lam=9.0), FedProto(lam=9.0)])
def test_a_method_with_a_penalty_reports_the_objective(method):
    training = replace(FP64, lr=1e-9, batch_size=100)  # so that the loss is that of the model as it began
    fed = Federation(method=method, training=training)
    clients = fed.clients(personal=starts_of(fed), model=starts_of(fed))
    size = fed.model.segments["3.weight"].shape if isinstance(method, FedProto) else (fed.model.size,)
    method.train(clients, torch.ones(size, dtype=torch.float64))
    assert set(clients.losses.round(decimals=5).tolist()) <= {
        round(float(x), 5) for at in (starts_of(fed), torch.ones(4, fed.model.size)) for x in objective(fed, at)
    }


def objective(fed: Federation, rows: Tensor) -> list[Tensor]:
    pairs = [(as_module(fed.factory, row.double()), *fed.samples(k)) for k, row in enumerate(rows)]
    return [F.cross_entropy(net(x), y).detach() for net, x, y in pairs]


@both_executors
@pytest.mark.parametrize("training", [FP64, replace(FP64, momentum=0.9, epochs=2)], ids=["plain", "momentum"])
def test_a_correction_is_added_to_every_gradient_and_not_reported(training, executor):
    fed = Federation(executor=executor, training=training)
    clients = fed.clients()
    starts = starts_of(fed)
    slopes = torch.randn(4, fed.model.size, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    trained = clients.sgd(clients.loss, per_client(starts), correction=per_client(slopes))
    by_penalty = clients.sgd(
        clients.loss, per_client(starts), penalty=lambda p, batch, slope: p @ slope, slope=per_client(slopes)
    )

    assert_close(trained, unmarked(by_penalty))
    theta = per_client(starts)
    for batch in clients.minibatches():
        theta = batch.step(clients.loss, theta, correction=per_client(slopes))
    assert_close(theta, unmarked(by_penalty))

    common = clients.sgd(clients.loss, per_client(starts), correction=slopes[0])
    assert_close(common[0], unmarked(trained)[0])


@both_executors
def test_under_a_surrogate_loss_the_objective_is_reported_and_moves_nothing(executor):
    fed = Federation(NormalisedConv, executor=executor)
    clients = fed.clients()
    starts = starts_of(fed)
    trained = clients.sgd(clients.loss, per_client(starts))
    objective = clients.losses

    def surrogate(p, batch):
        return 3 * clients.loss(p, batch)

    same = clients.sgd(surrogate, per_client(starts), report=clients.loss, lr=0.1 / 3)
    assert_close(same, unmarked(trained))
    assert_close(clients.losses, objective)


@both_executors
def test_training_that_reports_nothing_has_no_loss_but_divergence_is_still_an_error(executor):
    clients = Federation(executor=executor).clients()
    clients.sgd(lambda p, batch: -3 * clients.loss(p, batch), clients.initial, report=None)
    assert clients.losses is None

    for batch in clients.minibatches():
        batch.step(clients.loss, clients.initial, report=None)
    assert clients.losses is None

    clients.sgd(clients.loss, clients.initial, steps=0)
    assert clients.losses is None
    with pytest.raises(ClientError, match="Training diverged on client 0 in round 0: its model is not finite"):
        clients.sgd(clients.loss, clients.initial, report=None, lr=float("inf"))
    # A method's own mistake, which a lower learning rate does not mend.
    with pytest.raises(ClientError, match="Client 0 was to train in round 0 from a model with nan or infinity"):
        clients.sgd(clients.loss, clients.initial * float("nan"))


@pytest.mark.parametrize("reporting", [0, 1], ids=["the first", "the second"])
def test_the_training_loss_is_the_mean_over_the_steps_that_report_it(reporting):
    fed = Federation(training=replace(FP64, steps=2))
    clients = fed.clients()
    theta = fed.context.initial
    for s, batch in enumerate(clients.minibatches()):
        if s == reporting:
            x, y = fed.visits(1)[s]
            k = 1
            expected = F.cross_entropy(as_module(fed.factory, unmarked(theta).expand(4, -1)[k]).train()(x), y)
        theta = batch.step(clients.loss, theta, report="loss" if s == reporting else None)

    assert_close(clients.losses[k], expected.detach())


def test_an_extra_that_no_function_takes_is_named():
    clients = Federation().clients()
    with pytest.raises(MethodError, match="'ancor' is not an option of the training, and neither the loss nor"):
        clients.sgd(clients.loss, clients.initial, penalty=pull, anchor=clients.initial, ancor=1.0)
    with pytest.raises(MethodError, match="did you mean 'penalty'"):
        clients.sgd(clients.loss, clients.initial, penality=pull)


def test_an_extra_that_a_function_needs_and_does_not_get_is_named():
    clients = Federation().clients()
    batch = next(clients.minibatches())
    for loss, others in ((pull, {}), (clients.loss, {"penalty": pull}), (clients.loss, {"report": pull})):
        for work in (clients.sgd, batch.step):
            with pytest.raises(MethodError, match=r"pull \(.*line \d+\) is called with \(p, batch\), but.*'anchor'"):
                work(loss, clients.initial, **others)


def test_a_training_without_extras_reads_no_signature(monkeypatch):
    """It would take as long as a short step, in every round."""
    clients = Federation().clients()
    monkeypatch.setattr(inspect, "signature", lambda function: pytest.fail(f"read that of {function}"))
    clients.sgd(clients.loss, clients.initial)


def test_a_type_error_within_a_loss_stays_one():
    def wrong(p, batch):
        return len(3)

    clients = Federation().clients()
    with pytest.raises(TypeError, match="has no len"):
        clients.sgd(wrong, clients.initial)


def test_a_model_or_correction_of_the_wrong_shape_is_refused_in_a_sentence():
    fed = Federation(NormalisedConv)
    clients = fed.clients()
    size = fed.model.size
    parameters = fed.model.num_parameters
    batch = next(clients.minibatches())

    for wrong in (clients.initial[:parameters], clients.initial.repeat(3, 1), clients.initial[None, None]):
        message = re.escape(f"has the shape {list(wrong.shape)}; it must be a vector of {size} numbers")
        for work in (clients.sgd, batch.step):
            with pytest.raises(MethodError, match="A model to train " + message):
                work(clients.loss, wrong)

    with pytest.raises(MethodError, match=f"A correction has the shape .* {parameters} or {size} numbers"):
        clients.sgd(clients.loss, clients.initial, correction=torch.zeros(5))
    assert_close(
        batch.step(clients.loss, clients.initial), unmarked(batch.step(clients.loss, clients.initial.repeat(4, 1)))
    )


@both_executors
def test_a_mini_batch_is_freed_when_the_next_one_is_taken(executor):
    clients = Federation(executor=executor).clients()
    theta: Tensor = clients.initial
    references = []

    gc.disable()
    try:
        for batch in clients.minibatches():
            theta = batch.step(clients.loss, theta)
            references.append(weakref.ref(batch))
        assert [reference() for reference in references[:-1]] == [None] * (len(references) - 1)
    finally:
        gc.enable()


def test_the_number_of_local_steps_the_input_shape_and_the_seed_are_known():
    fed = Federation(training=replace(FP64, epochs=2))
    clients = fed.clients()
    assert clients.num_steps().tolist() == [len(fed.visits(k)) for k in range(4)]
    assert clients.num_steps(steps=7).tolist() == [7] * 4
    assert clients.num_steps(epochs=1, batch_size=7).tolist() == [1, 1, 2, 1]
    assert clients.input_shape == fed.inputs.shape[1:] and clients.seed == fed.seed


class Clipped(SGD):
    """Gradients of single samples, clipped; and noise."""

    per_sample = True

    norm: float = 0.5
    noise: float = 0.0

    def reduce(self, gradients, weight):
        lengths = gradients.norm(dim=-1, keepdim=True)
        return super().reduce(gradients * (self.norm / lengths).clamp_max(1.0), weight)

    def finish(self, total, count, draws):
        return super().finish(total + self.noise * self.norm * draws.normal(), count, draws)


def clipped_by_hand(fed: Federation, start: Tensor, k: int) -> Tensor:
    theta = start
    for x, y in fed.visits(k):
        total = torch.zeros_like(theta)
        for i in range(len(y)):
            slope = gradient(fed, theta, k, (x[i : i + 1], y[i : i + 1]))
            total += slope * min(1.0, 0.5 / float(slope.norm()))
        theta = theta - fed.training.lr * total / len(y)

    return theta


@both_executors
@pytest.mark.parametrize("room", [1, 10**9], ids=["a sample at a time", "whole batches"])
def test_per_sample_gradients_are_clipped_without_changes_to_the_loss(room, executor, monkeypatch):
    monkeypatch.setattr("raypfl.learning.optimizers.descent.MAX_GRADIENT_NUMBERS", room)
    fed = Federation(executor=executor, training=replace(FP64, optimizer=Clipped()))
    clients = fed.clients()
    starts = starts_of(fed)
    trained = clients.sgd(clients.loss, per_client(starts))
    walked = per_client(starts)
    for batch in clients.minibatches():
        walked = batch.step(clients.loss, walked)

    for k, start in enumerate(starts):
        expected = clipped_by_hand(fed, start, k)
        assert_close(trained[k], expected)
        assert_close(walked[k], expected)

    assert (unmarked(trained) - bare_loop(fed, starts)[0]).abs().max() > 1e-3


@both_executors
@pytest.mark.parametrize("factory", [small_mlp, dropping_mlp])
def test_a_per_sample_rule_that_takes_the_mean_is_the_plain_rule(factory, executor):
    class Asking(Adam):
        """Adam, the long way round."""

        per_sample = True

    rows = []
    reported = []
    for optimizer in (Adam(eps=1e-3), Asking(eps=1e-3)):
        clients = Federation(small_mlp, executor=executor, training=replace(FP64, optimizer=optimizer)).clients()
        rows.append(unmarked(clients.sgd(clients.loss, clients.initial, train="3")))
        reported.append(clients.losses)

    assert_close(rows[1], rows[0])
    assert_close(reported[1], reported[0])


@pytest.mark.parametrize("factory", [small_mlp, dropping_mlp])
def test_noise_is_keyed_by_client_and_step_whatever_the_group_and_the_executor(factory):
    training = replace(FP64, optimizer=Clipped(noise=0.4), epochs=2)
    rows = {}
    for executor in EXECUTORS:
        clients = Federation(factory, executor=executor, training=training).clients()
        rows[executor] = unmarked(clients.sgd(clients.loss, clients.initial))
        alone = Federation(factory, executor=executor, training=training).clients([2])
        assert_close(alone.sgd(alone.loss, alone.initial), rows[executor][2:3], 1e-12)

    assert_close(rows["vectorised"], rows["sequential"])
    quiet = Federation(factory, training=replace(training, optimizer=Clipped())).clients()
    moved = rows["vectorised"] - unmarked(quiet.sgd(quiet.loss, quiet.initial))
    assert len({round(float(row.norm()), 6) for row in moved}) == 4


def test_noise_has_the_set_deviation_and_is_new_in_each_step():
    training = replace(FP64, optimizer=Clipped(norm=1e-9, noise=1e9), lr=1.0, steps=1, batch_size=4)
    clients = Federation(training=training).clients()
    first = unmarked(clients.sgd(clients.loss, clients.initial)) - clients.initial
    assert float(first.std()) == pytest.approx(1 / 4, rel=0.1)
    both = unmarked(clients.sgd(clients.loss, clients.initial, steps=2)) - clients.initial
    second = both - first
    assert float((first * second).mean() / first.square().mean()) == pytest.approx(0.0, abs=0.1)


def test_untrained_entries_get_no_noise():
    fed = Federation(executor="sequential", training=replace(FP64, optimizer=Clipped(noise=1.0)))
    clients = fed.clients()
    head = fed.model.mask("3")
    seen = []

    def loss(p, batch):
        seen.append(p[~head])
        return clients.loss(p, batch)

    clients.sgd(loss, clients.initial, train="3", epochs=2)
    assert all(torch.equal(rows, clients.initial[~head]) for rows in seen)


def test_an_optimizer_with_a_rule_for_per_sample_gradients_is_refused_under_noise():
    private = PrivacySettings(noise=1.0)
    clients = Federation(training=replace(FP64, optimizer=Clipped()), privacy=private).clients()
    with pytest.raises(PrivacyError, match=r"Clipped and privacy\.noise each have a rule for per-sample gradients"):
        clients.sgd(clients.loss, clients.initial)


def test_batch_norm_is_refused_for_per_sample_gradients():
    clients = Federation(NormalisedConv, training=replace(FP64, optimizer=Clipped())).clients()
    with pytest.raises(MethodError, match="Clipped needs the gradient of each sample, but batch norm"):
        clients.sgd(clients.loss, clients.initial)


def test_a_subclass_of_sgd_with_another_step_is_not_treated_as_sgd():
    class Signs(SGD):
        """Sign descent."""

        def step_(self, theta, grad, memory, lr):
            theta.sub_(grad.sign(), alpha=lr)

    signs: LocalOptimizer = Signs()
    clients = Federation().clients()
    moved = unmarked(clients.sgd(clients.loss, clients.initial, optimizer=signs, steps=1)) - clients.initial
    assert set(moved.abs().round(decimals=12).unique().tolist()) <= {0.0, 0.1}
