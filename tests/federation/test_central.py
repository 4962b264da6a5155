"""Training on the server: as torch's own loop, with the clients' optimizers, and with progress."""

from __future__ import annotations

import io
from itertools import count

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional as F

from raypfl.common.errors import Diverged, MethodError
from raypfl.engine.events import RoundFinished, RunStarted, ServerProgress
from raypfl.federation import server_training
from raypfl.learning.augmentation import Crop, Flip
from raypfl.learning.optimizers import SGD, Adam, AdamW
from raypfl.models import FlatModel
from raypfl.results.display.console import LiveView, LogView
from raypfl.results.display.run_line import RunLine
from tests.support.federation import (
    POOLED,
    Federation,
    NormalisedConv,
    as_module,
    as_vector,
    assert_close,
    both_networks,
    dropping_mlp,
)
from tests.support.pretend_gpu import pretend_gpu


def cross_entropy(model: FlatModel):
    def loss(p: Tensor, batch) -> Tensor:
        return batch.mean(F.cross_entropy(model(p, batch.x), batch.y, reduction="none"))

    return loss


def by_torch(fed: Federation, optimizer, batches, rates, train: bool = True) -> Tensor:
    net = as_module(fed.factory, fed.context.initial).train(train)
    steps = optimizer(net.parameters())
    for batch, lr in zip(batches, rates, strict=True):
        steps.param_groups[0]["lr"] = lr
        steps.zero_grad()
        F.cross_entropy(net(batch.x), batch.y).backward()
        steps.step()
    return as_vector(net)


@both_networks
@pytest.mark.parametrize(
    ("optimizer", "of_torch"),
    [
        (SGD(momentum=0.9), lambda parameters: torch.optim.SGD(parameters, momentum=0.9)),
        (Adam(), torch.optim.Adam),
        (AdamW(), lambda parameters: torch.optim.AdamW(parameters, weight_decay=0.0)),
    ],
)
def test_the_server_trains_as_torchs_own_loop_batch_norm_included(factory, optimizer, of_torch):
    fed = Federation(factory)
    cohort = fed.cohort()
    batches = cohort.pool("auxiliary").batches(3, steps=5)
    options = {"lr": 0.02, "optimizer": optimizer, "schedule": "cosine"}
    trained = cohort.sgd(cross_entropy(fed.model), fed.context.initial, batches, **options)
    scheduler = [0.01 * (1 + torch.tensor(torch.pi * s / 5).cos().item()) for s in range(5)]
    assert_close(trained, by_torch(fed, of_torch, batches, scheduler), 1e-6)
    assert torch.equal(trained, fed.cohort().sgd(cross_entropy(fed.model), fed.context.initial, batches, **options))


def test_in_evaluation_mode_batch_norm_uses_its_statistics_unchanged():
    fed = Federation(NormalisedConv)
    batches = list(fed.cohort().pool("auxiliary").batches(3))
    trained = fed.cohort().sgd(cross_entropy(fed.model), fed.context.initial, batches, lr=0.1, mode="eval")
    assert_close(trained, by_torch(fed, lambda p: torch.optim.SGD(p, lr=0.1), batches, [0.1] * 3, train=False))
    assert torch.equal(fed.model.buffers(trained), fed.model.buffers(fed.context.initial))


def test_only_named_segments_move():
    fed = Federation()
    batches = fed.cohort().pool("auxiliary").batches(3)
    loss = cross_entropy(fed.model)
    start = fed.context.initial
    trained = fed.cohort().sgd(loss, start, batches, lr=0.1, optimizer=Adam(), train="output layer")
    assert ((trained != start) == fed.model.mask("output layer")).all()


def test_dropout_on_the_server_is_keyed_by_round_and_stream():
    fed = Federation(dropping_mlp)
    loss = cross_entropy(fed.model)
    batches = list(fed.cohort().pool("auxiliary").batches(9))

    def trained(stream: str) -> Tensor:
        return fed.cohort().sgd(loss, fed.context.initial, batches, lr=0.1, stream=stream)

    first = trained("")
    again = trained("")
    torch.rand(3)  # whatever happened to torch's own stream
    assert torch.equal(first, again) and not torch.equal(first, trained("b"))

    fed.round = 1
    assert not torch.equal(first, trained(""))


def test_batches_made_by_the_network_itself_leave_its_statistics_unchanged():
    fed = Federation(NormalisedConv)
    start = fed.context.initial
    teacher = fed.model.init(5)
    batches = list(fed.cohort().pool("auxiliary").batches(3))
    before = teacher.clone()

    def loss(p: Tensor, batch) -> Tensor:
        return batch.mean((fed.model(p, batch.x) - batch.y).square().sum(1))

    labelled = (batch._replace(y=fed.model(teacher, batch.x)) for batch in batches)
    ready = [batch._replace(y=fed.cohort().other(teacher)(batch.x)) for batch in batches]
    trained = fed.cohort().sgd(loss, start, labelled, lr=0.01)
    assert torch.equal(teacher, before) and torch.equal(trained, fed.cohort().sgd(loss, start, ready, lr=0.01))


def test_a_methods_own_network_is_trained_by_the_same_steps():
    fed = Federation()
    hyper = FlatModel(lambda: nn.Linear(2, 3), dtype=torch.float64)
    theta = hyper.init(0)
    x = torch.ones(4, 2, dtype=torch.float64)
    y = torch.zeros(4, 3, dtype=torch.float64)
    value, slope, _ = hyper.gradient(lambda p: F.mse_loss(hyper(p, x), y), theta)
    module = as_module(hyper.factory, theta)
    expected = F.mse_loss(module(x), y)
    expected.backward()

    assert_close(value, expected.detach())
    assert_close(slope, torch.cat([p.grad.reshape(-1) for p in module.parameters()]))
    stepped = theta.clone()
    optimizer = Adam()
    optimizer.step_(stepped, slope, optimizer.init(stepped), 0.1)
    by_descent = fed.cohort().descend(lambda p: F.mse_loss(hyper(p, x), y), theta, steps=1, lr=0.1, optimizer=Adam())

    assert_close(by_descent, stepped)


def test_a_gradient_in_training_mode_comes_with_the_statistics_after_it():
    fed = Federation(NormalisedConv)
    theta = fed.context.initial
    (batch,) = fed.cohort().pool("auxiliary").batches(9)
    net = as_module(fed.factory, theta).train()
    F.cross_entropy(net(batch.x), batch.y).backward()
    _, slope, moved = fed.model.gradient(lambda p: cross_entropy(fed.model)(p, batch), theta, train=True)

    assert_close(slope, torch.cat([p.grad.reshape(-1) for p in net.parameters()]))
    assert_close(moved, fed.model.buffers(as_vector(net)))
    assert torch.equal(theta, fed.context.initial)


def test_a_synthetic_set_of_any_shape_can_be_trained_by_gradients():
    fed = Federation()
    start = torch.randn(3, 2, 4, 4, generator=torch.Generator().manual_seed(0))
    moved = fed.cohort().descend(lambda x: x.square().sum(), start, steps=60, lr=0.1, optimizer=Adam())
    assert moved.shape == start.shape and moved.abs().max() < 0.1 * start.abs().max()
    assert not moved.requires_grad and not start.requires_grad


def test_divergence_and_untrainable_input_on_the_server_are_reported():
    fed = Federation()
    batches = fed.cohort().pool("auxiliary").batches(3)
    with pytest.raises(Diverged, match=r"Distilling diverged in round 0.*Lower the learning rate"):
        fed.cohort().sgd(lambda p, batch: -(p**4).sum(), fed.context.initial, batches, lr=1e200, text="distilling")
    with pytest.raises(MethodError, match=r"one model vector \[\d+\] of this network, not \[4, \d+\]"):
        fed.cohort().sgd(cross_entropy(fed.model), fed.context.initial.repeat(4, 1), batches, lr=0.1)
    with pytest.raises(MethodError, match="needs to know the number of batches"):
        fed.cohort().sgd(cross_entropy(fed.model), fed.context.initial, iter(batches), lr=0.1, schedule="cosine")


# --- progress ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("seconds", "reported"), [(0.01, []), (0.2, [3, 6, 9])])
def test_long_server_work_is_reported_at_intervals_and_short_work_never(monkeypatch, seconds, reported):
    clock = count(0.0, seconds)
    monkeypatch.setattr(server_training.time, "monotonic", lambda: next(clock))
    fed = Federation()
    fed.cohort().descend(lambda x: x.sum(), torch.zeros(2), steps=10, lr=0.1, text="distilling")
    assert fed.events == [ServerProgress(0, "distilling", steps, 10) for steps in reported]


ROUND = RoundFinished(3, 0.5, 9.0, 1, 1, 1, 0, 0, 1, 1)


def test_on_a_terminal_the_servers_work_is_shown_until_its_round_is_over():
    screen = Console(width=100, file=io.StringIO(), force_terminal=True, color_system=None)

    def seen() -> str:
        with screen.capture() as captured:
            screen.print(view.render())
        return captured.get()

    with LiveView(screen, [RunLine("feddf")]) as view:
        view.listener(0)(started())
        view.listener(0)(ServerProgress(3, "distilling", 120, 500))
        assert "round 3: distilling 120/500" in seen()
        view.listener(0)(ROUND)
        assert "distilling" not in seen() and "20 clients" in seen()


def test_without_a_terminal_the_servers_work_is_reported_after_long_silence():
    file = io.StringIO()
    now = [0.0]
    with LogView(Console(width=100, file=file), [RunLine("feddf")], lambda: now[0]) as view:
        view.listener(0)(started())
        for seconds in (1.0, 31.0, 32.0):
            now[0] = seconds
            view.listener(0)(ServerProgress(3, "distilling", int(seconds), 500))
    assert file.getvalue().count("distilling") == 1 and "feddf: round 3: distilling 31/500" in file.getvalue()


def started() -> RunStarted:
    from raypfl.experiment import Experiment

    return RunStarted("feddf", "runs/feddf", Experiment(method="feddf"), {"num_clients": 20}, 0)


# --- on another device ------------------------------------------------------------------------------------------------


def trained_and_moved(device: str) -> list[Tensor]:
    """Train on the server, on a device, by each of its two ways; returns the results."""
    fed = Federation(NormalisedConv, augmentation=[Crop(padding=1), Flip()], device=device)
    cohort = fed.cohort()
    batches = cohort.pool("auxiliary").batches(4, steps=3, augment=True)
    batches = batches.with_targets(torch.zeros(POOLED, 3, dtype=torch.float64))  # as they came from the clients
    teacher = cohort.other(fed.model.init(1))

    def loss(p: Tensor, batch, teacher) -> Tensor:
        return batch.mean((fed.model(p, batch.x) - batch.y - teacher(batch.x)).square().sum(1))

    options = {"lr": 0.1, "optimizer": Adam(), "clip_norm": 1.0, "weight_decay": 0.1, "teacher": teacher}
    trained = cohort.sgd(loss, fed.model.init(0), batches, **options)
    moved = cohort.descend(lambda at: at.square().sum(), trained, steps=2, lr=0.1, optimizer=AdamW())
    return [trained, moved]


def test_everything_the_server_trains_with_is_on_its_device():
    expected = trained_and_moved("cpu")
    with pretend_gpu() as faults:
        on_gpu = trained_and_moved("cuda")
        assert all(tensor.is_cuda for tensor in on_gpu) and not faults
    assert all(torch.equal(tensor, other) for tensor, other in zip(on_gpu, expected, strict=True))
