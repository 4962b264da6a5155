"""A group's mini-batches one by one, for a local step that is more than one of SGD on one model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raypfl.clients.group import ClientGroup
from raypfl.clients.observation import ObservedTraining
from raypfl.common.messages import PerClient, per_client
from raypfl.learning.batches import SampleOrder, StackedBatches, StepBatches
from raypfl.learning.executor import Executor
from raypfl.learning.loss import LocalLoss, LossFunction, ReportedLoss
from raypfl.learning.optimizers import LocalOptimizer, Memory, SampleRule
from raypfl.learning.privacy import PrivateTraining
from raypfl.models.extras import of_clients


@dataclass(eq=False)
class ModelInTraining:
    """One of the models that a method trains on its mini-batches.

    Attributes
    ----------
    executor : what its gradients are computed with.
    losses : ``[K]``, sums of what its steps report. steps : ``[K]``, how many these are.
    rows : ``[K, P+B]``, the model after its last step.
    observe : shows its steps to analyses.
    """

    executor: Executor
    losses: Tensor
    steps: Tensor
    rows: Tensor
    memories: dict[LocalOptimizer, Memory] = field(default_factory=dict)
    observe: ObservedTraining | None = None


class MiniBatches:
    """All mini-batches of a group's local training."""

    def __init__(
        self,
        group: ClientGroup,
        visits: SampleOrder,
        keys: Tensor,
        branch: PrivateTraining | None,
        rule: SampleRule | None,
    ):
        self.group = group
        self.visits = visits
        self.keys = keys
        self.branch = branch
        self.rule = rule
        self._models: dict[str, ModelInTraining] = {}

    def __iter__(self) -> Iterator[MiniBatch]:
        for s in range(self.visits.index.shape[1]):
            yield MiniBatch(self, s)

    @cached_property
    def stacked(self) -> StackedBatches:
        """Gathers the batches of several clients at once."""
        return self.group.samples("train").stacked(np.arange(len(self.group)), self.visits)

    def trained(self, of: str, loss: LocalLoss, rows: Tensor, lr: float, extras: Mapping[str, Any]) -> ModelInTraining:
        """The model `of`; its first step decides on the executor."""
        if of not in self._models:
            executor = self.group.trainer(loss, rows, self.visits, self.group.extras(extras))
            losses, steps = torch.zeros(2, len(rows), dtype=rows.dtype, device=rows.device)
            observer = self.group.observer
            observe = None if observer is None else observer.training(rows, self.visits, lr)
            self._models[of] = ModelInTraining(executor, losses, steps, rows, observe=observe)
        return self._models[of]

    def report(self) -> None:
        """Report each model and, where its steps reported any, its mean losses."""
        for model in self._models.values():
            reported = bool(model.steps.any())
            self.group.report(model.rows, model.losses / model.steps.clamp_min(1) if reported else None)
            if model.observe is not None:
                model.observe.ended(model.rows)


class MiniBatch:
    """One mini-batch of each client that has one left.

    Attributes
    ----------
    active : ``bool[K, 1]``, those clients.
    """

    def __init__(self, steps: MiniBatches, s: int):
        samples, visits, device = steps.group.samples("train"), steps.visits, steps.keys.device
        here = np.flatnonzero(visits.steps > s)
        self._steps = steps
        self._number = s
        self._rows = torch.from_numpy(here).to(device)
        self._everybody = len(here) == len(steps.keys)
        self._keys = steps.keys[self._rows] + s
        self._batches = StepBatches(
            alone=lambda: [samples.step(k, visits, s) for k in here.tolist()],
            padded=lambda: steps.stacked(self._rows, s, int(visits.counts[here, s].max())),
        )
        self._uses = 0
        self.active = torch.zeros(len(steps.keys), 1, dtype=torch.bool, device=device)
        self.active[self._rows] = True

    def step(
        self,
        loss: LossFunction,
        theta: Tensor,
        *,
        of: str = "",
        lr: float | None = None,
        optimizer: LocalOptimizer | None = None,
        penalty: LossFunction | None = None,
        correction: Tensor | None = None,
        report: ReportedLoss = "loss",
        **extras: Any,
    ) -> PerClient:
        """One step down a loss on this mini-batch, with the experiment's clipping and weight decay.

        Parameters
        ----------
        loss, optimizer, penalty, correction, report, extras : as for :meth:`Clients.sgd`.
        theta : where the step begins, ``[K, P+B]``, or ``[P+B]`` for all; it does not change.
        of : which of the method's models this is: the optimizer has a memory for each.
        lr : instead of the round's.

        Returns
        -------
        ``[K, P+B]``, in which the rows of clients that are not active are those of `theta`.
        """
        group, here, rows = self._steps.group, self._rows, self._steps.group.models(theta)
        size, local_loss = group.model.num_parameters, LocalLoss(group.model, loss, penalty, report)
        update = group.update(optimizer, lr, rule=self._steps.rule)
        trained = self._steps.trained(of, local_loss, rows, update.lr, extras)
        mine = extras if self._everybody else of_clients(extras, here)
        moved = rows.clone(memory_format=torch.contiguous_format) if self._everybody else rows[here]
        keys = self._keys_of_use()
        if trained.observe is not None:
            for k, model in zip(here.tolist(), moved, strict=True):
                trained.observe(k, self._number, model)
        (gradient, reported, statistics), trained.executor = group.context.run(
            trained.executor, lambda e: e.grad(local_loss, moved, self._batches, keys, mine, update)
        )
        if (added := group.corrections(correction)) is not None:
            gradient += self._mine(added)
        if update.optimizer not in trained.memories:
            trained.memories[update.optimizer] = update.init(rows[:, :size])
        memory = trained.memories[update.optimizer]
        active = {name: self._mine(kept) for name, kept in memory.items()}
        update.step_(moved[:, :size], gradient, active)
        if self._steps.rule is not None:
            group.refuse_moved_statistics(moved[:, size:], statistics)
        moved[:, size:] = statistics
        if not self._everybody:
            for name, kept in memory.items():
                kept[here] = active[name]
        trained.rows = moved if self._everybody else rows.clone().index_copy_(0, here, moved)
        if report is not None:
            trained.losses[here] += reported
            trained.steps[here] += 1
        return per_client(trained.rows)

    def _keys_of_use(self) -> Tensor:
        """Keys of a step's draws. Where steps are private, each on this mini-batch has noise of its own."""
        if (branch := self._steps.branch) is None:
            return self._keys
        keys = self._keys + self._uses * 0x2545F4914F6CDD1D
        self._uses += 1
        branch.uses = max(branch.uses, self._uses)
        return keys

    def _mine(self, rows: Tensor) -> Tensor:
        """Those of clients that are active; not a copy if all are."""
        return rows if self._everybody else rows[self._rows]
