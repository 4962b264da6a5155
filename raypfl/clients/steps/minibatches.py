"""A group's mini-batches one by one, for local steps other than SGD on one model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raypfl.clients.group import ClientGroup
from raypfl.clients.observation import ObservedTraining
from raypfl.clients.steps.local_training import LocalTraining, refuse_moved_statistics
from raypfl.common.errors import PrivacyError
from raypfl.common.messages import PerClient, per_client
from raypfl.common.transfer import to_device
from raypfl.learning.batches import StackedBatches, StepBatches
from raypfl.learning.executor import Executor
from raypfl.learning.loss import LocalLoss, LossFunction, ReportedLoss
from raypfl.learning.objectives.batch import Batch
from raypfl.learning.optimizers import LocalOptimizer, Memory, Perturb, Update
from raypfl.models.extras import of_clients
from raypfl.models.rows import aligned, copy_rows

KEY_STRIDE = 0x2545F4914F6CDD1D
"""Distance between the keys of successive private steps on a mini-batch: odd, so that no key comes twice, and large,
since the keys of neighbouring mini-batches are 1 apart."""


@dataclass(eq=False)
class ModelInTraining:
    """One of the models that a method trains on its mini-batches.

    Attributes
    ----------
    losses : the sum of the losses that its steps report, ``[K]``.
    steps : the number of steps that report a loss, ``[K]``.
    rows : the model after its last step, ``[K, P+B]``.
    memories : the state of each optimizer that steps on it.
    observe : the function that shows its steps to analyses; None: no analysis is due.
    """

    executor: Executor
    losses: Tensor
    steps: Tensor
    rows: Tensor
    memories: dict[LocalOptimizer, Memory] = field(default_factory=dict)
    observe: ObservedTraining | None = None


class MiniBatches:
    """All mini-batches of a group's local training.

    `num_steps` : the number of steps taken so far, over all models and mini-batches.
    """

    def __init__(self, group: ClientGroup, training: LocalTraining):
        self.group = group
        self.order = training.order
        self.keys = training.keys
        self.private_training = training.privacy
        self.rule = training.rule
        self.num_steps = 0
        self._models: dict[str, ModelInTraining] = {}
        self._active: dict[int, Tensor] = {}

    def __iter__(self) -> Iterator[MiniBatch]:
        for s in range(self.order.index.shape[1]):
            yield MiniBatch(self, s)

    @cached_property
    def alone(self) -> list[Callable[[int], Batch]]:
        """The functions that gather the batches of each client."""
        samples = self.group.samples("train")
        return [samples.steps(k, self.order, normalise_once=False) for k in range(len(self.group))]

    @cached_property
    def stacked(self) -> StackedBatches:
        """The function that gathers the batches of several clients at once."""
        return self.group.samples("train").stacked(np.arange(len(self.group)), self.order)

    def active(self, s: int) -> tuple[np.ndarray, Tensor]:
        """Return the positions of the clients that take step s, on the host and on the device."""
        active = np.flatnonzero(self.order.steps > s)
        # Clients only run out of mini-batches, so the number of active ones identifies them.
        if len(active) not in self._active:
            self._active[len(active)] = to_device(active, self.group.model.device)
        return active, self._active[len(active)]

    def model(self, of: str, loss: LocalLoss, rows: Tensor, lr: float, extras: Mapping[str, Any]) -> ModelInTraining:
        """Return the method's model named `of`; its first step decides on the executor."""
        if of not in self._models:
            executor = self.group.trainer(loss, rows, self.order, self.group.extras(extras))
            losses, steps = torch.zeros(2, len(rows), dtype=rows.dtype, device=rows.device)
            observer = self.group.observer
            observe = None if observer is None else observer.training(rows, self.order, lr)
            self._models[of] = ModelInTraining(executor, losses, steps, rows, observe=observe)
        return self._models[of]

    def report(self) -> None:
        """Report each model and, if its steps reported losses, their mean."""
        requested = self.group.context.requested
        if requested:
            requested[-1].models = round(self.num_steps / max(self.order.index.shape[1], 1))
        for model in self._models.values():
            reported = bool(model.steps.any())
            self.group.report(model.rows, model.losses / model.steps.clamp_min(1) if reported else None)
            if model.observe is not None:
                model.observe.finish(model.rows)


class MiniBatch:
    """One mini-batch of each client that has one left.

    Attributes
    ----------
    active : whether a client has a mini-batch in this step, ``bool[K, 1]``.
    """

    def __init__(self, minibatches: MiniBatches, s: int):
        order = minibatches.order
        active, rows = minibatches.active(s)
        positions = active.tolist()
        self._minibatches = minibatches
        self._number = s
        self._positions = positions
        self._rows = rows
        self._all_active = len(active) == len(minibatches.keys)
        self._keys = minibatches.keys[torch.from_numpy(active)] + s
        # No lambda refers to this object: the reference cycle would keep the samples in memory.
        self._batches = StepBatches(
            alone=lambda: [minibatches.alone[k](s) for k in positions],
            padded=lambda: minibatches.stacked(rows, s, int(order.counts[active, s].max())),
        )
        self._uses = 0
        self.active = torch.zeros(len(minibatches.keys), 1, dtype=torch.bool, device=rows.device)
        self.active[rows] = True

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
        perturb: Perturb | None = None,
        report: ReportedLoss = "loss",
        **extras: Any,
    ) -> PerClient:
        """Take one step down a loss on this mini-batch, with the experiment's clipping and weight decay.

        Parameters
        ----------
        loss, optimizer, penalty, correction, perturb, report, extras : as for :meth:`Clients.sgd`.
        theta : the models before the step, ``[K, P+B]``, or ``[P+B]`` for all; they are not modified.
        of : the name of the method's model that takes the step; the optimizer has a memory for each.
        lr : the learning rate; None: the round's.

        Returns
        -------
        ``[K, P+B]``, in which the rows of clients that are not active are those of `theta`.
        """
        self._minibatches.num_steps += 1
        group = self._minibatches.group
        active = self._rows
        rows = group.models(theta)
        num_parameters = group.model.num_parameters
        local_loss = LocalLoss(group.model, loss, penalty, report)
        update = group.update(optimizer, lr, rule=self._minibatches.rule, perturb=perturb)
        model = self._minibatches.model(of, local_loss, rows, update.lr, extras)

        active_extras = extras if self._all_active else of_clients(extras, active)
        moved = copy_rows(rows) if self._all_active else self._of_active(rows)
        keys = self._next_keys()
        if model.observe is not None:
            for k, row in zip(self._positions, moved, strict=True):
                model.observe(k, self._number, row)

        (gradient, reported, statistics), model.executor = group.context.run(
            model.executor,
            lambda executor: executor.grad(local_loss, moved, self._batches, keys, active_extras, update),
        )
        corrections = group.corrections(correction)
        if corrections is not None:
            gradient += self._of_active(corrections)

        if update.optimizer not in model.memories:
            memory = update.init(rows[:, :num_parameters])
            model.memories[update.optimizer] = {name: aligned(values) for name, values in memory.items()}
        self._descend(update, moved[:, :num_parameters], gradient, model.memories[update.optimizer])

        if self._minibatches.rule is not None:
            refuse_moved_statistics(moved[:, num_parameters:], statistics)
        moved[:, num_parameters:] = statistics
        model.rows = moved if self._all_active else rows.clone().index_copy_(0, active, moved)
        if report is not None:
            model.losses[active] += reported
            model.steps[active] += 1
        return per_client(model.rows)

    def grad(self, loss: LossFunction, at: Tensor, **extras: Any) -> PerClient:
        """Return the gradient ``[K, P]`` of each client's loss on this mini-batch, at ``[P+B]`` or ``[K, P+B]``.

        It is that of the loss alone, without clipping and weight decay; its draws are those of :meth:`step`, and no
        statistics move. Rows of clients that are not active are 0.
        """
        minibatches = self._minibatches
        group = minibatches.group
        if minibatches.rule is not None:
            raise PrivacyError(
                "batch.grad reads clients' data without noise, so privacy.noise would not hold. Choose another method, "
                "or privacy.unit=client, or leave privacy out."
            )
        local_loss = LocalLoss(group.model, loss)
        rows = group.models(at)
        active_extras = extras if self._all_active else of_clients(extras, self._rows)
        preferred = group.trainer(local_loss, rows, minibatches.order, group.extras(extras))
        active_rows = self._of_active(rows)
        gradient = group.run(
            preferred,
            lambda executor: executor.grad(local_loss, active_rows, self._batches, self._keys, active_extras)[0],
        )
        if self._all_active:
            return per_client(gradient)
        gradients = gradient.new_zeros(len(rows), gradient.shape[1])
        return per_client(gradients.index_copy_(0, self._rows, gradient))

    def _descend(self, update: Update, theta: Tensor, gradient: Tensor, memory: Memory) -> None:
        """Step the active clients' parameters in place; the memory has rows of all clients."""
        active_memory = {name: self._of_active(values) for name, values in memory.items()}
        update.step_(theta, gradient, active_memory)
        if not self._all_active:
            # The optimizer stepped on copies of the active clients' rows.
            for name, values in memory.items():
                values[self._rows] = active_memory[name]

    def _next_keys(self) -> Tensor:
        """Return the keys of a step's draws; each private step on this mini-batch gets its own noise."""
        training = self._minibatches.private_training
        if training is None:
            return self._keys
        keys = self._keys + self._uses * KEY_STRIDE
        self._uses += 1
        training.uses = max(training.uses, self._uses)
        return keys

    def _of_active(self, rows: Tensor) -> Tensor:
        """Return the rows of the active clients; not a copy if all are active."""
        return rows if self._all_active else copy_rows(rows, self._rows)
