"""Copies of the server's state, and what a checkpoint keeps of it."""

from __future__ import annotations

from collections import OrderedDict, namedtuple

import numpy as np
import pytest
import torch

from raypfl.common.errors import CheckpointError
from raypfl.storage.tree import Copies, as_saved


def test_copies_in_the_same_memory_are_deep_and_exact():
    copies = Copies()
    transposed = torch.arange(6.0).reshape(2, 3).T
    tree = {"theta": torch.tensor([1.0, 2.0]), "past": [transposed], "count": 3}
    first = copies.of(tree)
    first["past"].append("changed by a method")
    first["theta"].requires_grad_().data.add_(1)
    address = first["theta"].data_ptr()

    tree["theta"] = torch.tensor([5.0, 6.0])
    second = copies.of(tree)
    assert second["theta"].tolist() == [5.0, 6.0] and not second["theta"].requires_grad
    assert second["theta"].data_ptr() == address != tree["theta"].data_ptr()
    assert len(second["past"]) == 1 and torch.equal(second["past"][0], transposed)
    assert second["past"][0].stride() == transposed.stride() and second["count"] == 3


def test_a_copy_of_another_shape_or_type_has_memory_of_its_own():
    copies = Copies()
    copies.of({"theta": torch.zeros(2)})
    assert copies.of({"theta": torch.ones(3)})["theta"].tolist() == [1.0, 1.0, 1.0]
    assert copies.of({"theta": torch.ones(3, dtype=torch.int64)})["theta"].dtype == torch.int64
    assert copies.of({"other": torch.ones(1)}).keys() == {"other"}


Pair = namedtuple("Pair", "first second")


def test_what_a_round_begins_with_has_nothing_that_a_checkpoint_would_not_give_back():
    theta = torch.arange(6.0)
    rows = torch.arange(6.0).reshape(2, 3)
    state = {
        "theta": theta,
        "anchor": theta,
        "head": theta[4:],
        "weights": torch.nn.Parameter(rows.T),
        "pair": Pair(torch.ones(2).expand(2, 2), np.float64(0.1)),
        3: OrderedDict(rounds=[1, None, float("inf")]),
    }
    plain = as_saved(state)
    assert plain["theta"].data_ptr() == theta.data_ptr()
    tensors = [plain["theta"], plain["anchor"], plain["head"], plain["weights"], plain["pair"][0]]
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 5
    assert all(type(tensor) is torch.Tensor and tensor.is_contiguous() for tensor in tensors)
    assert not any(tensor.requires_grad for tensor in tensors)
    for tensor, original in zip(tensors, [theta, theta, theta[4:], rows.T, torch.ones(2, 2)], strict=True):
        assert torch.equal(tensor, original)
    assert [type(plain[3]), type(plain["pair"]), type(plain["pair"][1])] == [dict, tuple, float]
    assert plain[3] == {"rounds": [1, None, float("inf")]} and plain["pair"][1] == 0.1


def test_a_sparse_tensor_is_refused_with_what_to_do():
    with pytest.raises(CheckpointError, match=r"'graph/edges' is a sparse tensor .* to_dense"):
        as_saved({"graph": {"edges": torch.eye(3).to_sparse()}})
