"""Batches of samples."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Batch(NamedTuple):
    """One client's samples, the argument of a loss. For a group, every field has a leading client axis.

    Attributes
    ----------
    x : the inputs: normalised, ``[b, ...]``, such as images ``[b, C, H, W]``; or tokens ``int64[b, ...]``.
    y : the targets: classes ``int64[b]``, labels of zeros and ones ``int8[b, L]``, numbers ``[b]`` or ``[b, T]``, or
        tokens ``int64[b, T]``.
    weight : the samples' weights, ``[b]``: 1 for a sample and 0 for padding. A loss must weigh its samples with it, as
        :meth:`mean` does.
    """

    x: Tensor
    y: Tensor
    weight: Tensor

    def mean(self, values: Tensor) -> Tensor:
        """Return the mean of ``values[b, ...]`` over the samples of the batch, without padding."""
        weight = self.weight.reshape(-1, *[1] * (values.dim() - 1))
        return (values * weight).sum(0) / self.weight.sum().clamp_min(1)

    def subset(self, count: int) -> Batch:
        """Return at most `count` samples, spread over the labels; the largest label is among them."""
        index = spread_over_labels(self.y, count)
        return Batch(self.x[index], self.y[index], self.weight[index])


def spread_over_labels(y: Tensor, count: int) -> Tensor:
    """Return at most `count` positions in ``y[n]`` or ``y[n, L]``, in even strides over labels in descending order."""
    ranked = y[:, None].flatten(1).sum(1).argsort(descending=True, stable=True)
    return ranked[:: max(1, -(-len(y) // count))]
