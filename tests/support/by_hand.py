"""What tests that compute rounds by hand share: a step, an average, and a comparison of named tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from tests.support.federation import Federation, assert_close

MLP = ("1.weight", "1.bias", "3.weight", "3.bias")
"""The tensors of `small_mlp`, in their order."""


def descend(loss: Tensor, tensors: Iterable[Tensor], lr: float = 0.1) -> None:
    """Take a step of gradient descent on leaf tensors, in place."""
    tensors = list(tensors)
    slopes = torch.autograd.grad(loss, tensors)
    with torch.no_grad():
        for tensor, slope in zip(tensors, slopes, strict=True):
            tensor -= lr * slope


def leaves(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return copies of tensors that `descend` may change."""
    return [tensor.detach().clone().requires_grad_() for tensor in tensors]


def mean_by_samples(fed: Federation, rows: Mapping[int, Tensor], clients: Sequence[int]) -> Tensor:
    """Return the mean of these clients' tensors, weighted by their training samples."""
    total = sum(fed.sizes[client] for client in clients)
    return sum(fed.sizes[client] / total * rows[client].detach() for client in clients)


def assert_parts_close(fed: Federation, vector: Tensor, expected: Mapping[str, Tensor]) -> None:
    """Assert that the named tensors of a model vector have these values."""
    tensors = fed.model.unflatten(vector)
    for name, value in expected.items():
        assert_close(tensors[name], value)
