"""What cuDNN does to the tensors of a network on a GPU, seen on an H200, and what keeps them views of a vector."""

from __future__ import annotations

import copy
import itertools
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._prims_common import suggest_memory_format
from torch.nn import functional as F
from torch.nn.modules import rnn

from raypfl.common.user_warnings import user_warnings
from raypfl.models import FlatModel
from tests.support.federation import NormalisedConv
from tests.support.pretend_gpu import pretend_gpu


class Recurrent(nn.Module):
    """A recurrent layer and a head, for ``x[b, 5, 3]``."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(3, 4, batch_first=True)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.layer(x)
        return self.head(states)


def move_weights(layer: nn.RNNBase) -> None:
    """Give the weights memory of their own, as ``flatten_parameters`` does on a GPU."""
    with torch.no_grad():
        for weight in layer._flat_weights:
            weight.set_(weight.clone())


@pytest.fixture
def moving(monkeypatch):
    monkeypatch.setattr(nn.RNNBase, "flatten_parameters", move_weights)


def test_steps_of_a_vector_reach_a_recurrent_layer_whose_weights_cudnn_would_move(moving):
    model = FlatModel(Recurrent, dtype=torch.float64)
    theta = model.init(1)
    x = torch.randn(2, 5, 3, dtype=torch.float64)
    expected = model.as_module(theta)

    def loss(outputs: Tensor) -> Tensor:
        return outputs.square().sum()

    with model.bound() as bound, bound:
        bound.bind(theta)
        for _ in range(2):
            gradients = torch.autograd.grad(loss(model.module(x)), bound.tensors)
            with torch.no_grad():
                theta.sub_(torch.cat([gradient.reshape(-1) for gradient in gradients]), alpha=0.1)

    for _ in range(2):
        gradients = torch.autograd.grad(loss(expected(x)), list(expected.parameters()))
        with torch.no_grad():
            for weight, gradient in zip(expected.parameters(), gradients, strict=True):
                weight.sub_(gradient, alpha=0.1)
    trained = torch.cat([weight.detach().reshape(-1) for weight in expected.parameters()])
    torch.testing.assert_close(theta, trained, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(model(theta, x), expected(x), rtol=1e-12, atol=1e-12)


def test_a_copy_of_such_a_network_can_be_pickled_and_has_weights_of_its_own(moving):
    model = FlatModel(Recurrent)
    module = pickle.loads(pickle.dumps(copy.deepcopy(model.module)))
    assert {weight.data_ptr() for weight in module.layer._flat_weights} == {
        weight.data_ptr() for weight in module.layer.parameters()
    }


@pytest.fixture
def cudnn_in_recurrent_layers(monkeypatch):
    """Let torch.lstm refuse gradients in evaluation mode, and second derivatives, as cuDNN does on a GPU."""
    usual = torch.lstm
    calls: list[bool] = []

    def lstm(*arguments: Any) -> Any:
        *_, training, _, _ = arguments
        calls.append(torch.backends.cudnn.enabled)
        outputs = usual(*arguments)
        if not torch.backends.cudnn.enabled:
            return outputs

        def refuse(gradient: Tensor) -> None:
            if not training:
                raise RuntimeError("cudnn RNN backward can only be called in training mode")
            if torch.is_grad_enabled():
                raise RuntimeError("Double backwards is not supported for CuDNN RNNs")

        for output in outputs:
            if output.requires_grad:
                output.register_hook(refuse)
        return outputs

    monkeypatch.setattr(rnn._VF, "lstm", lstm)
    return calls


def test_a_recurrent_layer_on_a_gpu_has_gradients_in_evaluation_mode(moving, cudnn_in_recurrent_layers):
    calls = cudnn_in_recurrent_layers
    with pretend_gpu():
        model = FlatModel(Recurrent, device="cuda")
        theta = model.init(0)
        x = torch.randn(2, 5, 3, device="cuda")
        for train in (True, False):
            model.gradient(lambda p: model(p, x).square().sum(), theta, train=train)
        with model.mode(train=False):
            with torch.no_grad():
                model(theta, x)
            p = theta.requires_grad_()
            (gradient,) = torch.autograd.grad(model(p, x).square().sum(), p, create_graph=True)
            torch.autograd.grad(gradient.square().sum(), p)
    # In training, and in an evaluation that takes no gradients.
    assert [with_cudnn for with_cudnn, _ in itertools.groupby(calls)] == [True, False, True, False]
    assert torch.backends.cudnn.enabled


def test_a_recurrent_layer_on_a_gpu_leaves_cudnn_under_autocast_which_would_round_to_fp16(
    moving, cudnn_in_recurrent_layers
):
    with pretend_gpu():
        model = FlatModel(Recurrent, device="cuda")
        theta = model.init(0)
        try:
            torch.set_autocast_enabled("cuda", True)
            model.gradient(lambda p: model(p, torch.randn(2, 5, 3, device="cuda")).sum(), theta, train=True)
        finally:
            torch.set_autocast_enabled("cuda", False)
    assert not any(cudnn_in_recurrent_layers)


class HalfNormalised(nn.Module):
    """Batch norm of the first half of the channels of ``x[b, 4, h, w]``."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.chunk(2, dim=1)[0])


def test_a_part_of_the_channels_has_them_last_too(monkeypatch):
    enabled = []
    usual = F.batch_norm

    def batch_norm(*arguments, **options) -> Tensor:
        enabled.append(torch.backends.cudnn.enabled)
        return usual(*arguments, **options)

    monkeypatch.setattr(F, "batch_norm", batch_norm)
    x = torch.randn(3, 4, 5, 6)
    last = x.contiguous(memory_format=torch.channels_last)
    # PyTorch brings the input of cuDNN's batch norm into this layout.
    assert suggest_memory_format(last.chunk(2, dim=1)[0]) == torch.channels_last
    assert suggest_memory_format(x.chunk(2, dim=1)[0]) == torch.contiguous_format
    with pretend_gpu():
        model = FlatModel(HalfNormalised, device="cuda")
        for images in (x, last):
            model(model.init(0), images.cuda())
    assert [state for state, _ in itertools.groupby(enabled)] == [True, False]


def test_batch_norm_on_a_gpu_leaves_cudnn_where_it_would_read_a_view_of_a_vector_in_whole_lines(monkeypatch):
    enabled = []
    usual = F.batch_norm

    def batch_norm(*arguments, **options) -> Tensor:
        enabled.append(torch.backends.cudnn.enabled)
        if fails:
            raise ValueError("no such batch")
        return usual(*arguments, **options)

    fails = False
    monkeypatch.setattr(F, "batch_norm", batch_norm)
    with pretend_gpu():
        model = FlatModel(NormalisedConv, device="cuda")
        theta = model.init(0)
        x = torch.randn(4, 2, 4, 4, device="cuda")
        last = x.contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(model(theta, x), model(theta, last))
        model.as_module(theta)(last)
        fails = True
        with pytest.raises(ValueError, match="no such batch"):
            model(theta, last)
        model_on_cpu = FlatModel(NormalisedConv)
        with pytest.raises(ValueError, match="no such batch"):
            model_on_cpu(theta.cpu(), last.cpu())

    # A pretended GPU calls it twice.
    assert [state for state, _ in itertools.groupby(enabled)] == [True, False, True]
    assert torch.backends.cudnn.enabled


def test_what_torch_says_of_how_weights_lie_in_memory_is_no_warning_of_a_run():
    with user_warnings() as texts:
        warnings.warn(
            "RNN module weights are not part of single contiguous chunk of memory. They are compacted at every call.",
            stacklevel=1,
        )
        warnings.warn("A warning of the user's", stacklevel=1)
    assert texts == {"A warning of the user's"}
