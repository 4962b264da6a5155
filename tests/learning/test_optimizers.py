"""Optimizers step as torch's own do, on one vector or many; the reference is ``torch.optim`` in float64."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import raypfl
from raypfl.common.errors import ConfigError
from raypfl.learning.optimizers import SGD, Adam, AdamW, LocalOptimizer, Update
from tests.support.federation import assert_close

LR = 0.05

SAME = {
    "sgd": (SGD(), torch.optim.SGD, {}),
    "momentum": (SGD(momentum=0.9), torch.optim.SGD, {"momentum": 0.9}),
    "nesterov": (SGD(momentum=0.8, nesterov=True), torch.optim.SGD, {"momentum": 0.8, "nesterov": True}),
    "adam": (Adam(), torch.optim.Adam, {}),
    "adam, other betas": (Adam(beta1=0.5, beta2=0.9, eps=0.1), torch.optim.Adam, {"betas": (0.5, 0.9), "eps": 0.1}),
    "adamw": (AdamW(), torch.optim.AdamW, {"weight_decay": 0.0}),
}


def gradients(*shape: int, steps: int = 6) -> Iterator[Tensor]:
    draws = torch.Generator().manual_seed(1)
    for step in range(steps):
        yield torch.randn(shape, generator=draws, dtype=torch.float64) * 10.0 ** (step - 3)


def stepped(update: Update, start: Tensor) -> Tensor:
    theta = start.clone()
    memory = update.init(theta)
    for grad in gradients(*start.shape):
        update.step_(theta, grad, memory)
    return theta


def by_torch(kind: type[torch.optim.Optimizer], start: Tensor, clip_norm: float | None = None, **options) -> Tensor:
    rows = [nn.Parameter(row.clone()) for row in start]
    optimizers = [kind([row], lr=LR, **options) for row in rows]  # type: ignore[call-arg]
    for grad in gradients(*start.shape):
        for row, g, optimizer in zip(rows, grad, optimizers, strict=True):
            row.grad = g.clone()
            if clip_norm is not None:
                nn.utils.clip_grad_norm_([row], clip_norm)
            optimizer.step()

    return torch.stack([row.detach() for row in rows])


@pytest.mark.parametrize("clip_norm", [None, 0.3])
@pytest.mark.parametrize("weight_decay", [0.0, 0.2])
@pytest.mark.parametrize("name", SAME)
def test_steps_are_those_of_torch_optim(name, weight_decay, clip_norm):
    optimizer, kind, options = SAME[name]
    start = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(3, 4)
    update = Update(optimizer, LR, weight_decay, clip_norm)
    expected = by_torch(kind, start, clip_norm, **options | {"weight_decay": weight_decay})
    assert_close(stepped(update, start), expected, 1e-12)
    assert (expected - start).abs().max() > 1e-3


@pytest.mark.parametrize("name", SAME)
def test_a_row_steps_like_a_vector_alone(name):
    update = Update(SAME[name][0], LR)
    start = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(3, 4)
    theta = start[0].clone()
    memory = update.init(start[0])
    for grad in gradients(3, 4):
        update.step_(theta, grad[0], memory)
    assert_close(theta, stepped(update, start)[0], 1e-14)


@pytest.mark.parametrize("name", SAME)
def test_rows_may_stop_early_and_each_counts_its_own_steps(name):
    update = Update(SAME[name][0], LR)
    start = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(3, 4)
    theta = start.clone()
    memory = update.init(theta)

    for step, grad in enumerate(gradients(3, 4)):
        active = 3 if step < 2 else 1
        update.step_(theta[:active], grad[:active].clone(), {name: rows[:active] for name, rows in memory.items()})

    assert_close(theta[0], stepped(update, start)[0], 1e-14)

    for grad in gradients(3, 4):
        update.step_(theta[1:], grad[1:].clone(), {name: rows[1:] for name, rows in memory.items()})
    alone = start[1:].clone()
    row_memory = update.init(start[1:])
    for grad in [*list(gradients(3, 4))[:2], *gradients(3, 4)]:
        update.step_(alone, grad[1:].clone(), row_memory)
    assert_close(theta[1:], alone, 1e-14)


@pytest.mark.parametrize("optimizer", [SGD(momentum=0.9), Adam(), AdamW()])
def test_untrained_entries_keep_their_bits_and_decay_acts_on_named_entries_only(optimizer):
    start = torch.linspace(-1, 1, 4, dtype=torch.float64).expand(2, 4).clone()
    trained = torch.tensor([True, True, True, False])
    decayed = torch.tensor([True, False, False, False])
    masked, bare = (
        stepped(Update(optimizer, LR, weight_decay, None, trained, decayed), start) for weight_decay in (0.3, 0.0)
    )

    assert torch.equal(masked[:, 3], start[:, 3])
    assert torch.equal(masked[:, 1:], bare[:, 1:])
    assert (masked[:, 0] != bare[:, 0]).all()


def test_a_custom_rule_is_its_step_and_its_memory():
    class Signs(LocalOptimizer):
        """Sign descent on an average of gradients."""

        keep: float = 0.5

        def init(self, theta):
            return {"average": torch.zeros_like(theta)}

        def step_(self, theta, grad, memory, lr):
            theta.sub_(memory["average"].lerp_(grad, 1 - self.keep).sign_(), alpha=lr)

    assert Signs(keep=0.1) == Signs(keep=0.1) != Signs()
    moved = stepped(Update(Signs(keep=0.0), LR), torch.zeros(2, 3, dtype=torch.float64))
    signs = sum(grad.sign() for grad in gradients(2, 3))
    assert_close(moved, -LR * torch.as_tensor(signs))


def test_a_rule_without_a_step_says_so():
    class Nothing(LocalOptimizer):
        """No step."""

    with pytest.raises(NotImplementedError, match="Nothing is not complete: define step_"):
        stepped(Update(Nothing(), LR), torch.zeros(2, 3))


@pytest.mark.parametrize("method", ["scaffold", "feddc", "fednova", "mime", "mimelite"])
def test_methods_whose_steps_are_those_of_sgd_refuse_others_before_the_run(tmp_path, method):
    settings = {"training": {"optimizer": "adam"}, "engine": {"backend": "inline"}}
    with pytest.raises(ConfigError, match=f"method is '{method}', whose local steps are those of SGD.*optimizer=sgd"):
        raypfl.run(raypfl.Experiment(method=method, rounds=1, output=str(tmp_path), **settings))
    assert not any(tmp_path.iterdir())
