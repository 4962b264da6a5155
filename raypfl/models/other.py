"""Another model beside the one that is trained: a teacher, an earlier model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from raypfl.common.messages import PerClient, per_client, unmarked
from raypfl.models.flat import FlatModel


@dataclass(frozen=True, eq=False)
class Other:
    """A model as it is: in evaluation mode, with its own statistics, none of which move. It calls like a network.

    Parameters
    ----------
    theta : ``[P+B]``. With a row for each client, ``[K, P+B]``, it is passed to a loss by name, which then has that
        client's; elsewhere it gives the outputs of all clients' models, ``[K, b, ...]``.
    """

    model: FlatModel
    theta: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """Outputs for inputs ``x[b, ...]``."""
        return self._each(lambda theta: self.model(theta, x))

    def features(self, x: Tensor) -> Tensor:
        """What goes into the output layer for inputs ``x[b, ...]``: ``[b, d]``."""
        return self._each(lambda theta: self.model.features(theta, x)[0])

    def _each(self, outputs: Callable[[Tensor], Tensor]) -> Tensor:
        with self.model.mode(train=False):
            if self.theta.dim() == 1:
                return outputs(self.theta)
            rows = torch.stack([outputs(theta) for theta in unmarked(self.theta)])
            return per_client(rows) if isinstance(self.theta, PerClient) else rows
