"""Local training as analyses see it: every client's model before each of its steps, and after the last."""

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
from raypfl.learning.batches import GroupSamples
from raypfl.learning.objectives import Objective
from raypfl.learning.objectives.batch import Batch
from raypfl.learning.sample_order import SampleOrder
from raypfl.learning.sample_pools import Pool
from raypfl.models.flat import FlatModel

if TYPE_CHECKING:
    from raypfl.clients.context import Context


@dataclass(frozen=True, eq=False)
class LocalStep:
    """A client that is about to take a local step, or has taken the last one of a training.

    Attributes
    ----------
    client, round : the numbers of the client and the round.
    training : the number of the training among the client's in this round, from 0; most methods have one.
    step : the number of the step, from 0; after the last one, the number of steps.
    steps : the number of steps in the training.
    theta : the model ``[P+B]`` before the step, a copy.
    start : the model ``[P+B]`` before the training, a copy.
    batch : the positions of the step's mini-batch in the client's training samples; empty after the last step.
    lr : the learning rate.
    model : the network as a function of a flat vector.
    objective : the objective of training.
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
        """Number of clients in the run, whether they take part or not."""
        return self._context.num_clients

    def samples(self, client: int | None = None) -> Batch:
        """Return all training samples of a client, by default of this one."""
        return training_samples(self._context, self.client if client is None else client)

    def pool(self, name: str) -> Pool:
        """Return samples that belong to no client (``data.pools``)."""
        return self._context.pools.pool(name, self.round)


def training_samples(context: Context, client: int) -> Batch:
    """Return all training samples of any client, as the network sees them."""
    return GroupSamples(context.samples, [context.split(client, "train")]).client(0)


class Observation(NamedTuple):
    """An analysis's record of a local step: arrays by name."""

    client: int
    training: int
    step: int
    arrays: Mapping[str, np.ndarray]


class AnalysisHooks(Protocol):
    """The client side of an analysis."""

    def before_step(self, step: LocalStep) -> Mapping[str, Any] | None: ...

    def after_training(self, step: LocalStep) -> Mapping[str, Any] | None: ...


class Observer:
    """Shows a group's local steps to analyses, and collects their observations.

    `analyses` : the analyses, by their numbers in the experiment.
    """

    def __init__(self, context: Context, analyses: Mapping[int, AnalysisHooks], ids: Sequence[int], round: int):
        self._context = context
        self._analyses = analyses
        self._ids = ids
        self._round = round
        self._trainings = 0
        self._observations: dict[int, dict[tuple[int, int, int], Observation]] = {number: {} for number in analyses}

    @property
    def observations(self) -> dict[int, list[Observation]]:
        """The observations of each analysis, in the order of clients and their steps."""
        in_order = {}
        for number, by_step in self._observations.items():
            if by_step:
                in_order[number] = [by_step[key] for key in sorted(by_step)]
        return in_order

    def training(self, start: Tensor, order: SampleOrder, lr: float) -> ObservedTraining:
        """Begin a training of the group from ``start[K, P+B]``."""
        number = self._trainings
        self._trainings += 1
        return ObservedTraining(self, number, unmarked(start).detach(), order, lr)

    def show(self, hook: str, k: int, **fields: Any) -> None:
        """Call the method `hook` of each analysis with a step of the group's k-th client.

        `fields` are the fields of :class:`LocalStep` that differ between the group's steps.
        """
        context = self._context
        step = LocalStep(
            client=self._ids[k],
            round=self._round,
            model=context.model,
            objective=context.measures.objective,
            _context=context,
            **fields,
        )
        device = context.model.device
        when = f"before step {step.step}" if hook == "before_step" else "after the training"

        for number, analysis in self._analyses.items():
            function = getattr(analysis, hook)
            # Neither random draws nor the network's mode nor autocast may differ from a run without analyses.
            with streams.forked(device), context.evaluating(), torch.autocast(device.type, enabled=False):
                try:
                    values = function(step)
                except RaypflError:
                    raise
                except Exception as error:
                    raise MethodError(
                        f"{where_defined(function)} failed {when} of client {step.client} in round {step.round}: "
                        f"{type(error).__name__}: {with_location(error)}"
                    ) from error

            if values:
                arrays = {name: _array(value) for name, value in values.items()}
                key = (step.client, step.training, step.step)
                self._observations[number][key] = Observation(*key, arrays)


@dataclass(frozen=True, eq=False)
class ObservedTraining:
    """A training that analyses see; call it before each step of the group's k-th client, with its model.

    Attributes
    ----------
    number : the number of the training in the round.
    start : the models before the training, ``[K, P+B]``.
    """

    observer: Observer
    number: int
    start: Tensor
    order: SampleOrder
    lr: float

    def __call__(self, k: int, s: int, theta: Tensor) -> None:
        self._show("before_step", k, s, theta, self.order.index[k, s, : self.order.counts[k, s]])

    def finish(self, trained: Tensor) -> None:
        """Show the trained models ``[K, P+B]``."""
        for k, theta in enumerate(unmarked(trained)):
            self._show("after_training", k, int(self.order.steps[k]), theta, np.zeros(0, dtype=np.int64))

    def _show(self, hook: str, k: int, s: int, theta: Tensor, batch: np.ndarray) -> None:
        self.observer.show(
            hook,
            k,
            training=self.number,
            step=s,
            steps=int(self.order.steps[k]),
            theta=theta.detach().clone(),
            start=self.start[k].clone(),
            batch=batch,
            lr=self.lr,
        )


def _array(value: Any) -> np.ndarray:
    return unmarked(value).detach().cpu().contiguous().numpy() if isinstance(value, Tensor) else np.asarray(value)
