"""SGD of all clients of a group at once: the tensors that it trains, and the rows that still have steps to take."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from raypfl.learning.batches import StackedBatches
from raypfl.learning.loss import LocalLoss
from raypfl.learning.optimizers import Memory, Update
from raypfl.learning.optimizers.descent import Descent
from raypfl.learning.recording import StepSignature, numbered, shared_tensors
from raypfl.models.extras import Extras


@dataclass(frozen=True, eq=False)
class RankedTraining:
    """SGD of all clients of a group, those with most steps first. Steps change its tensors, of K rows, in place.

    Attributes
    ----------
    loss : the loss; without its penalty, if the update separates it.
    step : see :meth:`Vectorised._vectorised_step`.
    frozen : names of the segments that no step moves.
    keys : the keys of the draws, ``int64[K]``.
    correction : a tensor that is added to every gradient, ``[K, P]``; None: none.
    theta, statistics : the models, ``[K, P]`` and ``[K, B]``.
    losses : the sum of the losses of all steps so far, ``[K]``.
    """

    loss: LocalLoss
    step: Callable[..., Any]
    update: Update
    frozen: Set[str]
    batches: StackedBatches
    keys: Tensor
    extras: Extras
    correction: Tensor | None
    theta: Tensor
    statistics: Tensor
    memory: Memory
    losses: Tensor

    def signature(self, key: tuple[Hashable, list[Tensor]], active: ActiveRows) -> StepSignature:
        """Return the inputs of the active rows' steps and a key, by which a recording of such steps is found."""
        function_key, captured_tensors = key
        descent = active.descent
        named = {
            "theta": descent.theta,
            "statistics": self.statistics,
            "losses": self.losses,
            "keys": self.keys,
            "correction": descent.correction,
            "trained": self.update.trained,
            "decayed": self.update.decayed,
            **self.batches.tensors,
            **{f"number {name}": numbers for name, numbers in descent.update.by_row.items()},
            **{f"memory {name}": rows for name, rows in descent.memory.items()},
            **shared_tensors(self.extras),
            **numbered("segment", descent.tensors),
            **numbered("gradient", descent.gradients),
            **numbered("extra row", active.extras),
            **numbered("captured", captured_tensors),
        }
        inputs = {name: tensor for name, tensor in named.items() if tensor is not None}
        return StepSignature.of((function_key, active.count, self.frozen), inputs, self.batches.FREE_AXES)


@dataclass(frozen=True, eq=False)
class ActiveRows:
    """The first rows of a training, which still have steps to take, as views of its tensors."""

    count: int
    descent: Descent
    extras: list[Tensor]


def phases(steps: np.ndarray) -> Iterator[tuple[int, range]]:
    """Yield k and the steps that only the first k rows take, for ``steps[K]`` in descending order."""
    start = 0
    for stop in sorted(set(steps.tolist())):
        yield int((steps >= stop).sum()), range(start, stop)
        start = stop
