"""Copies of the server's state."""

from __future__ import annotations

import torch

from raypfl.storage.tree import Copies


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
