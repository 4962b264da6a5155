"""Extras: the tensors, numbers and other models that a loss or a predictor gets by name, with parameters and a batch.

An extra that is :class:`PerClient` has one row for each client of the group; a loss sees the row of its own client.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from raypfl.common.messages import PerClient, per_client, unmarked
from raypfl.models.flat import FlatModel
from raypfl.models.row_number import RowNumber

Extras = Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Other:
    """A model other than the one in training: a teacher, an earlier model. It is called like a network.

    It runs in evaluation mode with its own statistics, and never changes.

    Parameters
    ----------
    theta : ``[P+B]``, or one row for each client, ``[K, P+B]``. A loss that gets the rows by name sees its own
        client's model; elsewhere a call returns the outputs of all clients' models, ``[K, b, ...]``.
    """

    model: FlatModel
    theta: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """Return the outputs for inputs ``x[b, ...]``."""
        return self._each(lambda theta: self.model(theta, x))

    def features(self, x: Tensor) -> Tensor:
        """Return the inputs of the output layer, ``[b, d]``, for inputs ``x[b, ...]``."""
        return self._each(lambda theta: self.model.features(theta, x)[0])

    def _each(self, outputs: Callable[[Tensor], Tensor]) -> Tensor:
        with self.model.mode(train=False):
            if self.theta.dim() == 1:
                return outputs(self.theta)
            rows = torch.stack([outputs(theta) for theta in unmarked(self.theta)])
            return per_client(rows) if isinstance(self.theta, PerClient) else rows


def rows_of(extras: Extras) -> dict[str, Tensor]:
    """Return the rows ``[K, ...]`` of the extras that differ between clients."""
    rows = {}
    for name, extra in extras.items():
        tensor = extra
        if isinstance(extra, Other):
            tensor = extra.theta
        elif isinstance(extra, RowNumber):
            tensor = extra.values
        if isinstance(tensor, PerClient):
            rows[name] = unmarked(tensor)
    return rows


def with_rows(extras: Extras, rows: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the extras with `rows`, which may be one client's row each, in place of those that they have."""
    replaced = dict(extras)
    for name, tensor in rows.items():
        extra = extras[name]
        if isinstance(extra, Other):
            replaced[name] = replace(extra, theta=tensor)
        elif isinstance(extra, RowNumber):
            replaced[name] = RowNumber(tensor)
        else:
            replaced[name] = tensor
    return replaced


def of_clients(extras: Extras, index: Tensor | slice) -> dict[str, Any]:
    """Return the extras of the clients at ``index[k]``."""
    return with_rows(extras, {name: per_client(rows[index]) for name, rows in rows_of(extras).items()})


def of_client(extras: Extras, k: int) -> dict[str, Any]:
    """Return the extras of the k-th client."""
    return with_rows(extras, {name: rows[k] for name, rows in rows_of(extras).items()})


def without_buffers(model: FlatModel, extras: dict[str, Any]) -> dict[str, Any]:
    """Cut the model vectors ``[P+B]`` among one client's extras to their parameters ``[P]``, as a loss sees them."""
    if not model.num_buffers:
        return extras

    cut = {}
    for name, extra in extras.items():
        is_model = isinstance(extra, Tensor) and extra.dim() and extra.shape[-1] == model.size
        cut[name] = model.parameters(extra) if is_model else extra
    return cut
