"""Matched images: the unrolled gradient, the effect of matching on its loss, and recovery from a bad step."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from raypfl.common.global_draws import refuse_unkeyed
from raypfl.methods.global_model.fedptr import FedPTR
from raypfl.methods.global_model.trajectory import StudentTrajectory, match
from raypfl.models import MODELS, FlatModel
from tests.support.federation import assert_close

LABELS = torch.arange(3).repeat_interleave(2)


def tiny() -> nn.Module:
    """A smooth ConvNet of two blocks, so that finite differences meet no kinks."""
    net = MODELS.get("convnet")(input_shape=(3, 8, 8), num_classes=3, depth=2, width=4)
    net.features = nn.Sequential(*(nn.Softplus() if isinstance(layer, nn.ReLU) else layer for layer in net.features))
    return net


def dense() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 10), nn.ReLU(), nn.Linear(10, 3))


MODEL = FlatModel(tiny, dtype=torch.float64)


def drawn(count: int = 2, model: FlatModel = MODEL, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images ``[K, n, ...]``, step sizes, and where K trajectories begin and end."""
    g = torch.Generator().manual_seed(seed)
    images = torch.randn(count, len(LABELS), 3, 8, 8, generator=g, dtype=model.dtype)
    rate = 0.05 + 0.01 * torch.arange(count, dtype=model.dtype)
    start = torch.stack([model.init(k) for k in range(count)])
    return images, rate, start, start + 0.05 * torch.randn(start.shape, generator=g, dtype=model.dtype)


def path(steps: int = 3, model: FlatModel = MODEL, checkpointing: bool = False) -> StudentTrajectory:
    return StudentTrajectory(model, LABELS, steps, checkpointing)


def by_hand(images: Tensor, rate: Tensor, start: Tensor, steps: int) -> Tensor:
    """Plain descent of one model."""
    w = start
    for _ in range(steps):
        theta = w.clone().requires_grad_()
        (slope,) = torch.autograd.grad(F.cross_entropy(MODEL(theta, images), LABELS), theta)
        w = w - rate * slope
    return w


@pytest.mark.parametrize("count", [1, 3])
def test_a_path_is_plain_gradient_descent_on_all_images(count):
    images, rate, start, _ = drawn(count)
    expected = torch.stack([by_hand(*client, steps=3) for client in zip(images, rate, start, strict=True)])
    assert_close(path()(start, images, rate), expected, 1e-12)
    assert_close(path(0)(start, images, rate), start)


def test_the_loss_is_one_at_the_start_zero_at_the_end_and_scale_free():
    images, rate, start, end = drawn()
    assert path(0).distance(images, rate, start, end).tolist() == [1.0, 1.0]
    assert path().distance(images, 0 * rate, start, end).tolist() == [1.0, 1.0]

    reached = path()(start, images, rate)
    assert path().distance(images, rate, start, reached).tolist() == [0.0, 0.0]
    zero = torch.zeros_like(start)
    once, twice = (path(0).distance(images, rate, c * start, c * end) for c in (1, 2))

    assert_close(once, twice)
    assert path().distance(images, rate, start, start).isfinite().all() and not zero.any()


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("count", [1, 2])
def test_the_unrolled_gradient_is_that_of_finite_differences(count, checkpointing):
    images, rate, start, end = drawn(count)
    images.requires_grad_()
    rate.requires_grad_()
    unrolled = path(checkpointing=checkpointing)

    def loss(images: Tensor, rate: Tensor) -> Tensor:
        return unrolled.distance(images, rate, start, end, unrolled=True)

    gx, gr = torch.autograd.grad(loss(images, rate).sum(), (images, rate))
    direction = torch.randn(images.shape, generator=torch.Generator().manual_seed(1), dtype=images.dtype)
    eps = 1e-5
    slope = (loss(images + eps * direction, rate) - loss(images - eps * direction, rate)).detach() / (2 * eps)

    assert_close((gx * direction).flatten(1).sum(1), slope, 1e-6)
    slope = (loss(images, rate + eps) - loss(images, rate - eps)).detach() / (2 * eps)
    assert_close(gr, slope, 1e-6)
    assert gr.abs().min() > 0


def test_checkpointed_and_plain_unrolls_have_the_same_bits():
    images, rate, start, end = drawn(2)
    matched = []
    for checkpointing in (False, True):
        x = images.clone().requires_grad_()
        loss = path(4, checkpointing=checkpointing).distance(x, rate, start, end, unrolled=True)
        matched.append((loss.detach(), *torch.autograd.grad(loss.sum(), x)))
    assert all(torch.equal(a, b) for a, b in zip(*matched, strict=True))


def test_on_a_gpu_a_checkpointed_step_does_not_wait_for_the_lock_of_the_thread_that_waits_for_it(monkeypatch):
    usual = torch.autograd.grad

    def in_another_thread(*arguments: Any, **options: Any) -> Any:
        """Do as PyTorch on a GPU, whose backward pass has a thread of its own unless that is disabled."""
        if not torch._C._is_multithreading_enabled():
            return usual(*arguments, **options)
        results: list[Any] = []
        thread = threading.Thread(target=lambda: results.append(usual(*arguments, **options)), daemon=True)
        thread.start()
        thread.join(timeout=5)
        if not results:
            pytest.fail("The backward pass waits for the thread that waits for it.")
        return results[0]

    images, rate, start, end = drawn(1)
    expected = match(path(), images, rate, start, end, 1.0, 1e-3, range(2))
    monkeypatch.setattr(torch.autograd, "grad", in_another_thread)
    with refuse_unkeyed(FedPTR().round, torch.device("cpu"), ""):
        matched = match(path(checkpointing=True), images, rate, start, end, 1.0, 1e-3, range(2))
    assert torch.equal(matched.images, expected.images)


@pytest.mark.thorough
@pytest.mark.parametrize(("factory", "lr"), [(tiny, 1000.0), (dense, 10.0)])
def test_matching_recovers_a_path_made_by_hidden_images(factory, lr):
    model = FlatModel(factory, dtype=torch.float64)
    hidden, rate, start, _ = drawn(2, model, seed=5)
    images, _, _, _ = drawn(2, model, seed=6)
    ends = path(10, model)(start, hidden, rate)
    before = [tensor.clone() for tensor in (images, rate, start, ends)]
    matched = match(path(10, model), images, rate, start, ends, lr, 1e-5, range(20))

    assert (matched.last < 0.5 * matched.first).all() and (matched.step_size != rate).all()
    assert matched.images.shape == images.shape and matched.ok.all()
    assert all(torch.equal(a, b) for a, b in zip(before, (images, rate, start, ends), strict=True))

    reached = path(10, model).distance(matched.images, matched.step_size, start, ends)
    assert_close(reached, matched.last, 1e-12)


def test_a_trajectory_that_does_not_move_changes_nothing():
    images, rate, start, end = drawn(2)
    end[1] = start[1]
    matched = match(path(), images, rate, start, end, 100.0, 1e-3, range(3))
    assert torch.equal(matched.images[1], images[1]) and matched.step_size[1] == rate[1]
    assert not torch.equal(matched.images[0], images[0]) and matched.ok.tolist() == [True, False]


@pytest.mark.parametrize("alone", [False, True])
def test_after_a_non_finite_loss_the_last_finite_set_is_kept(alone):
    model = FlatModel(dense)
    images, rate, start, end = drawn(2, model)
    rate[0] = 1e30  # its first loss is not finite
    rows = slice(0, 1) if alone else slice(None)
    matched = match(path(4, model), *(t[rows] for t in (images, rate, start, end)), 1.0, 0.0, range(3))

    assert torch.equal(matched.images[0], images[0]) and not matched.ok[0]
    wild = match(path(4, model), images[1:], rate[1:], start[1:], end[1:], 1e12, 0.0, range(6))
    assert wild.ok.all() and wild.last.isfinite().all() and wild.images.isfinite().all()

    if not alone:
        rest = match(path(4, model), images[1:], rate[1:], start[1:], end[1:], 1.0, 0.0, range(3))
        assert_close(matched.images[1:], rest.images, 1e-5)


@pytest.mark.parametrize(
    ("shape", "classes", "depth", "count"),
    [
        ((1, 28, 28), 10, 3, 317_706),
        ((3, 32, 32), 10, 3, 320_010),
        ((3, 32, 32), 100, 3, 504_420),
        ((3, 64, 64), 200, 4, 857_160),
        ((3, 64, 64), 200, 3, 1_938_120),
        ((3, 32, 32), 10, 4, 452_490),
    ],
)
def test_the_convnet_has_the_papers_parameters_and_no_statistics(shape, classes, depth, count):
    model = FlatModel(lambda: MODELS.get("convnet")(input_shape=shape, num_classes=classes, depth=depth))
    assert (model.num_parameters, model.num_buffers) == (count, 0)
    assert model(model.init(0), torch.zeros(2, *shape)).shape == (2, classes)
