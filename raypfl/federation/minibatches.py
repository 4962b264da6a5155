"""A group's mini-batches, one after the other, where a local step is more than one of SGD on one model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raypfl.federation.batches import Batch, GroupSamples, Order, StepBatches
from raypfl.federation.executor import Executor, Loss, SGDRule
from raypfl.federation.extras import chosen
from raypfl.messages import PerClient, per_client, plain

Gradient = tuple[Tensor, Tensor, Tensor]
Run = Callable[[Callable[[Executor], Gradient]], Gradient]


@dataclass(eq=False)
class Walk:
    """All mini-batches of a group's local training.

    Attributes
    ----------
    keys : ``int64[K]``, of the draws in each client's first step.
    prepare : checks a loss, its start ``[K, P+B]`` and its extras, and gives what runs work on an executor that suits.
    losses : mean training loss ``[K]`` of each model that was trained, by name.
    trained : these models, as they are by now.
    """

    samples: GroupSamples
    visits: Order
    rule: SGDRule
    keys: Tensor
    prepare: Callable[[Loss, Tensor, Mapping[str, Any]], Run]
    losses: dict[str, Tensor] = field(default_factory=dict)
    trained: dict[str, Tensor] = field(default_factory=dict)
    _runs: dict[str, Run] = field(default_factory=dict)
    _velocities: dict[str, Tensor] = field(default_factory=dict)

    def __iter__(self) -> Iterator[MiniBatch]:
        for s in range(self.visits.index.shape[1]):
            yield MiniBatch(self, s)

    @cached_property
    def padded(self) -> Callable[..., Batch]:
        """Gathers the batches of several clients at once; see :meth:`GroupSamples.walk`."""
        return self.samples.walk(np.arange(len(self.keys)), self.visits)

    def run(self, of: str, loss: Loss, rows: Tensor, extras: Mapping[str, Any]) -> Run:
        """What runs work for the model `of`, decided at its first step."""
        if of not in self._runs:
            self._runs[of] = self.prepare(loss, rows, extras)
            self.losses[of] = torch.zeros(len(rows), dtype=rows.dtype, device=rows.device)
        return self._runs[of]

    def velocity(self, of: str, like: Tensor) -> Tensor | None:
        """The momentum of the model `of`, ``[K, P]``."""
        if self.rule.momentum and of not in self._velocities:
            self._velocities[of] = torch.zeros_like(like)
        return self._velocities.get(of)


class MiniBatch:
    """One mini-batch of each client that has one left.

    Attributes
    ----------
    active : ``bool[K, 1]``, those clients.
    """

    def __init__(self, walk: Walk, s: int):
        device = walk.keys.device
        here = np.flatnonzero(walk.visits.steps > s)
        self._walk = walk
        self._rows = torch.from_numpy(here).to(device)
        self._everybody = len(here) == len(walk.keys)
        self._keys = walk.keys[self._rows] + s
        self._batches = StepBatches(
            alone=lambda: [walk.samples.step(k, walk.visits, s) for k in here.tolist()],
            padded=lambda: walk.padded(self._rows, s, int(walk.visits.counts[here, s].max())),
        )
        self.active = torch.zeros(len(walk.keys), 1, dtype=torch.bool, device=device)
        self.active[self._rows] = True

    def step(self, loss: Loss, theta: Tensor, *, of: str = "", lr: float | None = None, **extras: Any) -> PerClient:
        """One step of SGD down a loss on this mini-batch, with the experiment's momentum, clipping and weight decay.

        Parameters
        ----------
        loss, extras : as for :meth:`Clients.sgd`.
        theta : ``[K, P+B]``, where the step begins; stays as it is.
        of : which of the method's models this is, so that each has a momentum of its own.
        lr : instead of the round's.

        Returns
        -------
        ``[K, P+B]``, in which the rows of clients that are not active are those of `theta`.
        """
        walk, here, rows = self._walk, self._rows, plain(theta)
        run = walk.run(of, loss, rows, extras)
        mine = extras if self._everybody else chosen(extras, here)
        moved = rows.clone(memory_format=torch.contiguous_format) if self._everybody else rows[here]
        gradient, losses, statistics = run(lambda e: e.grad(loss, moved, self._batches, self._keys, mine))
        size = gradient.shape[1]
        velocity = walk.velocity(of, rows[:, :size])
        mine_of = None if velocity is None else self._mine(velocity)
        (walk.rule if lr is None else replace(walk.rule, lr=lr)).step_(moved[:, :size], gradient, mine_of)
        moved[:, size:] = statistics
        if velocity is not None and mine_of is not None and not self._everybody:
            velocity[here] = mine_of
        out = moved if self._everybody else rows.clone().index_copy_(0, here, moved)
        walk.losses[of][here] += losses / torch.from_numpy(walk.visits.steps).to(losses)[here]
        walk.trained[of] = out
        return per_client(out)

    def _mine(self, rows: Tensor) -> Tensor:
        """Those of clients that are active; not a copy if all are."""
        return rows if self._everybody else rows[self._rows]
