"""A group's mini-batches, one after the other, where a local step is more than one of SGD on one model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raypfl.common.messages import PerClient, per_client
from raypfl.models.extras import of_clients
from raypfl.models.flat import FlatModel
from raypfl.objectives.batch import Batch
from raypfl.optimizers import LocalOptimizer, Memory, Update
from raypfl.training.batches import GroupSamples, Order, StepBatches
from raypfl.training.executor import Executor
from raypfl.training.loss import LocalLoss, Loss, Report

Gradient = tuple[Tensor, Tensor, Tensor]
Run = Callable[[Callable[[Executor], Gradient]], Gradient]


@dataclass(eq=False)
class MiniBatches:
    """All mini-batches of a group's local training.

    Attributes
    ----------
    keys : ``int64[K]``, of the draws in each client's first step.
    models : checks a model vector, or one a client, and gives ``[K, P+B]``.
    corrections : likewise ``[K, P]`` of what is added to gradients.
    update : gives a step for an optimizer and a learning rate; None stands for the experiment's.
    prepare : checks the loss, its start ``[K, P+B]`` and its extras, and gives what runs work on an executor
        that suits.
    losses : sums ``[K]`` of what is reported for each model that is trained, by name, where anything is.
    taken : steps ``[K]`` that these are of.
    trained : these models, as they are by now.
    """

    samples: GroupSamples
    visits: Order
    keys: Tensor
    model: FlatModel
    models: Callable[[Tensor], Tensor]
    corrections: Callable[[Tensor | None], Tensor | None]
    update: Callable[[LocalOptimizer | None, float | None], Update]
    prepare: Callable[[LocalLoss, Tensor, Mapping[str, Any]], Run]
    losses: dict[str, Tensor] = field(default_factory=dict)
    taken: dict[str, Tensor] = field(default_factory=dict)
    trained: dict[str, Tensor] = field(default_factory=dict)
    _runs: dict[str, Run] = field(default_factory=dict)
    _memories: dict[tuple[str, LocalOptimizer], Memory] = field(default_factory=dict)

    def __iter__(self) -> Iterator[MiniBatch]:
        for s in range(self.visits.index.shape[1]):
            yield MiniBatch(self, s)

    @cached_property
    def padded(self) -> Callable[..., Batch]:
        """Gathers the batches of several clients at once; see :meth:`GroupSamples.stacked`."""
        return self.samples.stacked(np.arange(len(self.keys)), self.visits)

    def mean_loss(self, of: str) -> Tensor | None:
        """Mean ``[K]`` of what is reported for the model `of`; None if nothing is."""
        return self.losses[of] / self.taken[of].clamp_min(1) if of in self.losses else None

    def run(self, of: str, loss: LocalLoss, rows: Tensor, extras: Mapping[str, Any]) -> Run:
        """What runs work for the model `of`, decided at its first step."""
        if of not in self._runs:
            self._runs[of] = self.prepare(loss, rows, extras)
            if loss.report is not None:
                self.losses[of], self.taken[of] = torch.zeros(2, len(rows), dtype=rows.dtype, device=rows.device)
        return self._runs[of]

    def memory(self, of: str, update: Update, like: Tensor) -> Memory:
        """What the optimizer remembers of the model `of`, ``[K, ...]``."""
        known = (of, update.optimizer)
        if known not in self._memories:
            self._memories[known] = update.init(like)
        return self._memories[known]


class MiniBatch:
    """One mini-batch of each client that has one left.

    Attributes
    ----------
    active : ``bool[K, 1]``, those clients.
    """

    def __init__(self, group: MiniBatches, s: int):
        device = group.keys.device
        here = np.flatnonzero(group.visits.steps > s)
        self._group = group
        self._rows = torch.from_numpy(here).to(device)
        self._everybody = len(here) == len(group.keys)
        self._keys = group.keys[self._rows] + s
        self._batches = StepBatches(
            alone=lambda: [group.samples.step(k, group.visits, s) for k in here.tolist()],
            padded=lambda: group.padded(self._rows, s, int(group.visits.counts[here, s].max())),
        )
        self.active = torch.zeros(len(group.keys), 1, dtype=torch.bool, device=device)
        self.active[self._rows] = True

    def step(
        self,
        loss: Loss,
        theta: Tensor,
        *,
        of: str = "",
        lr: float | None = None,
        optimizer: LocalOptimizer | None = None,
        penalty: Loss | None = None,
        correction: Tensor | None = None,
        report: Report = "loss",
        **extras: Any,
    ) -> PerClient:
        """One step down a loss on this mini-batch, with the experiment's clipping and weight decay.

        Parameters
        ----------
        loss, optimizer, penalty, correction, report, extras : as for :meth:`Clients.sgd`.
        theta : where the step begins, ``[K, P+B]``, or ``[P+B]`` for all; stays as it is.
        of : which of the method's models this is, so that the optimizer remembers each apart.
        lr : instead of the round's.

        Returns
        -------
        ``[K, P+B]``, in which the rows of clients that are not active are those of `theta`.
        """
        group, here, rows = self._group, self._rows, self._group.models(theta)
        size, local_loss = group.model.num_parameters, LocalLoss(group.model, loss, penalty, report)
        run, update = group.run(of, local_loss, rows, extras), group.update(optimizer, lr)
        mine = extras if self._everybody else of_clients(extras, here)
        moved = rows.clone(memory_format=torch.contiguous_format) if self._everybody else rows[here]
        gradient, reported, statistics = run(
            lambda e: e.grad(local_loss, moved, self._batches, self._keys, mine, update)
        )
        if (added := group.corrections(correction)) is not None:
            gradient += self._mine(added)
        memory = group.memory(of, update, rows[:, :size])
        active = {name: self._mine(kept) for name, kept in memory.items()}
        update.step_(moved[:, :size], gradient, active)
        moved[:, size:] = statistics
        if not self._everybody:
            for name, kept in memory.items():
                kept[here] = active[name]
        out = moved if self._everybody else rows.clone().index_copy_(0, here, moved)
        if report is not None:
            group.losses[of][here] += reported
            group.taken[of][here] += 1
        group.trained[of] = out
        return per_client(out)

    def _mine(self, rows: Tensor) -> Tensor:
        """Those of clients that are active; not a copy if all are."""
        return rows if self._everybody else rows[self._rows]
