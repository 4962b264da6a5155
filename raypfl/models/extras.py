"""What a loss or a predictor gets by name besides parameters and a batch: tensors, and other models.

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
        """Outputs for inputs ``x[b, ...]``."""
        return self._each(lambda theta: self.model(theta, x))

    def features(self, x: Tensor) -> Tensor:
        """Inputs of the output layer, ``[b, d]``, for inputs ``x[b, ...]``."""
        return self._each(lambda theta: self.model.features(theta, x)[0])

    def _each(self, outputs: Callable[[Tensor], Tensor]) -> Tensor:
        with self.model.mode(train=False):
            if self.theta.dim() == 1:
                return outputs(self.theta)
            rows = torch.stack([outputs(theta) for theta in unmarked(self.theta)])
            return per_client(rows) if isinstance(self.theta, PerClient) else rows


def rows_of(extras: Extras) -> dict[str, Tensor]:
    """The rows ``[K, ...]`` of the extras that differ between clients."""
    tensors = {name: e.theta if isinstance(e, Other) else e for name, e in extras.items()}
    return {name: unmarked(t) for name, t in tensors.items() if isinstance(t, PerClient)}


def with_rows(extras: Extras, rows: Mapping[str, Tensor]) -> dict[str, Any]:
    """The extras with `rows` in place of their own, or with one client's row each."""
    new = {name: replace(extras[name], theta=r) if isinstance(extras[name], Other) else r for name, r in rows.items()}
    return {**extras, **new}


def of_clients(extras: Extras, index: Tensor | slice) -> dict[str, Any]:
    """The extras of the clients at ``index[k]``."""
    return with_rows(extras, {name: per_client(rows[index]) for name, rows in rows_of(extras).items()})


def of_client(extras: Extras, k: int) -> dict[str, Any]:
    """The extras of the k-th client."""
    return with_rows(extras, {name: rows[k] for name, rows in rows_of(extras).items()})


def without_buffers(model: FlatModel, extras: dict[str, Any]) -> dict[str, Any]:
    """One client's extras, with model vectors ``[P+B]`` cut to their parameters ``[P]``, as a loss sees them."""
    if not model.num_buffers:
        return extras
    return {
        name: model.parameters(e) if isinstance(e, Tensor) and e.dim() and e.shape[-1] == model.size else e
        for name, e in extras.items()
    }
