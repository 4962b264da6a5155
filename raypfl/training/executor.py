"""What runs a function of one client for a whole group: all clients at once, or one by one.

A *loss* here is a :class:`LocalLoss` of one client's trainable parameters ``p[P]``, a batch and extras; a *function* is
the same with any output. Extras are ``{name: tensor}``; those that are :class:`PerClient` have a row for each client.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raypfl.models.extras import Extras
from raypfl.models.flat import FlatModel
from raypfl.models.predictor import Predictor
from raypfl.objectives.batch import Batch
from raypfl.optimizers import Update
from raypfl.training.batches import Batches, GroupSamples, Order
from raypfl.training.loss import LocalLoss, Loss


@dataclass(frozen=True)
class Precision:
    """How the forward and backward passes are computed: bf16 autocast or not, and the layout of images."""

    autocast: bool = False
    channels_last: bool = False

    def context(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        """The autocast context for `device`."""
        return torch.autocast(device.type, torch.bfloat16) if self.autocast else contextlib.nullcontext()

    def layout(self, x: Tensor) -> Tensor:
        """A batch of images in the chosen layout."""
        return x.contiguous(memory_format=torch.channels_last) if self.channels_last and x.dim() == 4 else x


AS_IT_IS = Precision()
"""No autocast, and images in the layout that they have."""


class Executor(ABC):
    """Runs functions of one client for a group. All executors agree up to floating-point rounding."""

    def __init__(self, model: FlatModel, precision: Precision = AS_IT_IS):
        self.model = model
        self.precision = precision

    @abstractmethod
    def sgd(
        self,
        loss: LocalLoss,
        start: Tensor,
        samples: GroupSamples,
        visits: Order,
        update: Update,
        keys: Tensor,
        extras: Extras,
        correction: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Train from ``start[K, P+B]``; returns ``(trained[K, P+B], mean reported loss[K])``.

        ``correction[K, P]`` is added to all gradients.
        """

    @abstractmethod
    def grad(
        self, loss: LocalLoss, at: Tensor, batches: Batches, keys: Tensor, extras: Extras, update: Update | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradient of each client's loss on its batch: ``(gradients[K, P], reported[K], statistics[K, B] after it)``.

        If the optimizer of `update` needs per-sample gradients, the gradient is what it makes of them.
        """

    @abstractmethod
    def map(self, function: Loss, at: Tensor, batches: list[Batch], keys: Tensor, extras: Extras) -> Tensor:
        """``[K, ...]``: the function of each client's ``at[k]`` and batch; autograd goes through it.

        If it gives a row for each sample, clients with fewer samples than the largest are padded with rows of zeros.
        """

    @abstractmethod
    def predict(self, at: Tensor | Predictor, x: Tensor, own: bool) -> Tensor:
        """Outputs ``[K, b, ...]`` of K models, ``[K, P+B]`` or a predictor's, without gradients.

        The caller sets evaluation mode. `x` is ``[K, b, ...]``, inputs for each model, or ``[b, ...]``, for all models.
        """


def copied(rows: Tensor, order: Tensor | None = None) -> Tensor:
    """A contiguous copy with rows in this order, in memory from NumPy: its huge pages take a tenth of the time."""
    if rows.stride(0) == 0:
        order = None  # one row for all clients
    if rows.device.type != "cpu":
        return rows.clone(memory_format=torch.contiguous_format) if order is None else rows[order]
    copy = torch.from_numpy(np.empty(rows.shape, rows.new_empty(0).numpy().dtype))
    return copy.copy_(rows) if order is None else torch.index_select(rows.detach(), 0, order, out=copy)


def forked(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Restores torch's global random streams on exit, so that they may be seeded by key within."""
    return torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])
