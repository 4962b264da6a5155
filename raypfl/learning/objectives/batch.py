"""Batches of samples."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Batch(NamedTuple):
    """One client's samples in the form that a loss gets. For a group, every field has a leading client axis.

    Attributes
    ----------
    x : ``[b, ...]``, normalised, as images ``[b, C, H, W]``; or ``int64[b, ...]`` tokens.
    y : ``int64[b]`` classes, ``int8[b, L]`` labels of zeros and ones, ``[b]`` or ``[b, T]`` numbers, or ``int64[b, T]``
        tokens.
    weight : ``[b]``, 1 for a sample and 0 for padding. A loss must weigh its samples with it, as :meth:`mean` does.
    """

    x: Tensor
    y: Tensor
    weight: Tensor

    def mean(self, values: Tensor) -> Tensor:
        """Mean of ``values[b, ...]`` over the samples of the batch, without padding."""
        weight = self.weight.reshape(-1, *[1] * (values.dim() - 1))
        return (values * weight).sum(0) / self.weight.sum().clamp_min(1)

    def subset(self, count: int) -> Batch:
        """At most `count` samples, spread over the labels; the largest label is among them."""
        index = spread_over_labels(self.y, count)
        return Batch(self.x[index], self.y[index], self.weight[index])


def spread_over_labels(y: Tensor, count: int) -> Tensor:
    """At most `count` positions in ``y[n]`` or ``y[n, L]``, in even strides over the labels in descending order."""
    ranked = y[:, None].flatten(1).sum(1).argsort(descending=True, stable=True)
    return ranked[:: max(1, -(-len(y) // count))]
