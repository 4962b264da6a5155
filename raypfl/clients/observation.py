"""What analyses see of local training: every client's model before each of its steps, and after the last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from raypfl.common import streams
from raypfl.common.errors import MethodError, RaypflError
from raypfl.common.messages import unmarked
from raypfl.common.user_code import where_defined, with_location
from raypfl.learning.batches import GroupSamples, SampleOrder
from raypfl.learning.objectives import Objective
from raypfl.learning.objectives.batch import Batch
from raypfl.learning.pool import Pool
from raypfl.models.flat import FlatModel

if TYPE_CHECKING:
    from raypfl.clients.context import Context


@dataclass(frozen=True, eq=False)
class LocalStep:
    """A client that is about to take a local step, or has taken the last one of a training.

    Attributes
    ----------
    client, round : their numbers. step : from 0; after the last one, the number of steps.
    training : which of the trainings of the client in this round it is, from 0; most methods have one.
    theta : the model ``[P+B]`` from which the step starts, a copy. start : the one from which the training started.
    steps : how many steps the training has.
    batch : positions of the step's mini-batch in the client's training samples; none after the last one.
    lr : the learning rate.
    model : the network as a function of a flat vector. objective : what is learned.
    """

    client: int
    round: int
    training: int
    step: int
    steps: int
    theta: Tensor
    start: Tensor
    batch: np.ndarray
    lr: float
    model: FlatModel
    objective: Objective
    _context: Context = field(repr=False)

    @property
    def num_clients(self) -> int:
        """Clients of the run, whether they take part or not."""
        return self._context.num_clients

    def samples(self, client: int | None = None) -> Batch:
        """All training samples of a client, by default of this one."""
        return training_samples(self._context, self.client if client is None else client)

    def pool(self, name: str) -> Pool:
        """Samples that belong to no client (``data.pools``)."""
        return self._context.pools.pool(name, self.round)


def training_samples(context: Context, client: int) -> Batch:
    """All training samples of any client, as the network sees them."""
    return GroupSamples(context.samples, [context.split(client, "train")]).client(0)


class Observation(NamedTuple):
    """What an analysis keeps of a local step: arrays by name."""

    client: int
    training: int
    step: int
    arrays: Mapping[str, np.ndarray]


class AnalysisHooks(Protocol):
    """The client side of an analysis."""

    def before_step(self, step: LocalStep) -> Mapping[str, Any] | None: ...

    def after_training(self, step: LocalStep) -> Mapping[str, Any] | None: ...


class Observer:
    """Shows a group's local steps to analyses, and collects what they keep.

    Parameters
    ----------
    analyses : by their numbers in the experiment.
    """

    def __init__(self, context: Context, analyses: Mapping[int, AnalysisHooks], ids: Sequence[int], round: int):
        self._context = context
        self._analyses = analyses
        self._ids = ids
        self._round = round
        self._trainings = 0
        self._seen: dict[int, dict[tuple[int, int, int], Observation]] = {number: {} for number in analyses}

    @property
    def seen(self) -> dict[int, list[Observation]]:
        """What each analysis keeps, in the order of clients and their steps."""
        return {number: [seen[key] for key in sorted(seen)] for number, seen in self._seen.items() if seen}

    def training(self, start: Tensor, visits: SampleOrder, lr: float) -> ObservedTraining:
        """A training of the group from ``start[K, P+B]``."""
        number, self._trainings = self._trainings, self._trainings + 1
        return ObservedTraining(self, number, unmarked(start).detach(), visits, lr)

    def show(self, what: str, k: int, **own: Any) -> None:
        """Call the function `what` of each analysis with a step of the group's k-th client, of which `own` is known."""
        context = self._context
        seen = LocalStep(
            client=self._ids[k],
            round=self._round,
            model=context.model,
            objective=context.objective,
            _context=context,
            **own,
        )
        device = context.model.device
        when = f"before step {seen.step}" if what == "before_step" else "after the training"
        for number, analysis in self._analyses.items():
            function = getattr(analysis, what)
            # Neither random draws nor the network's mode nor autocast may differ from a run without analyses.
            with streams.forked(device), context.evaluating(), torch.autocast(device.type, enabled=False):
                try:
                    kept = function(seen)
                except RaypflError:
                    raise
                except Exception as error:
                    raise MethodError(
                        f"{where_defined(function)} failed {when} of client {seen.client} in round {seen.round}: "
                        f"{type(error).__name__}: {with_location(error)}"
                    ) from error
            if kept:
                arrays = {name: _array(value) for name, value in kept.items()}
                key = (seen.client, seen.training, seen.step)
                self._seen[number][key] = Observation(*key, arrays)


@dataclass(frozen=True, eq=False)
class ObservedTraining:
    """A training that analyses see: called before each step of the group's k-th client, with its model.

    Attributes
    ----------
    number : which one of the round's it is. start : ``[K, P+B]``.
    """

    observer: Observer
    number: int
    start: Tensor
    visits: SampleOrder
    lr: float

    def __call__(self, k: int, s: int, theta: Tensor) -> None:
        self._show("before_step", k, s, theta, self.visits.index[k, s, : self.visits.counts[k, s]])

    def ended(self, trained: Tensor) -> None:
        """Show what came out, ``[K, P+B]``."""
        for k, theta in enumerate(unmarked(trained)):
            self._show("after_training", k, int(self.visits.steps[k]), theta, np.zeros(0, dtype=np.int64))

    def _show(self, what: str, k: int, s: int, theta: Tensor, batch: np.ndarray) -> None:
        self.observer.show(
            what,
            k,
            training=self.number,
            step=s,
            steps=int(self.visits.steps[k]),
            theta=theta.detach().clone(),
            start=self.start[k].clone(),
            batch=batch,
            lr=self.lr,
        )


def _array(value: Any) -> np.ndarray:
    return unmarked(value).detach().cpu().contiguous().numpy() if isinstance(value, Tensor) else np.asarray(value)
