"""What cuDNN does to the tensors of a network on a GPU, seen on an H200, and what keeps them views of a vector."""

from __future__ import annotations

import copy
import itertools
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

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
