"""Training on the server, with the optimizers that clients have."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from raypfl.common import rng
from raypfl.common.errors import Diverged, MethodError
from raypfl.federation.task import Task
from raypfl.learning.executor import DEFAULT_PRECISION, Executor, Precision
from raypfl.learning.loss import LocalLoss, LossFunction
from raypfl.learning.objectives.batch import Batch
from raypfl.learning.optimizers import SGD, LocalOptimizer, Update
from raypfl.learning.sample_pools import Pool, Pools
from raypfl.models.extras import Other
from raypfl.models.flat import FlatModel

RateSchedule = Literal["constant", "cosine"]
Item = TypeVar("Item")

PROGRESS_INTERVAL = 0.5
"""Seconds between two progress events of the same work. Shorter work has none."""


@dataclass(frozen=True)
class ServerProgress:
    """The progress of long work on the server.

    Attributes
    ----------
    round : the round's number, from 1.
    text : what the server does, such as ``"distilling"``.
    done : the number of steps so far.
    total : the number of all steps; None: unknown.
    """

    round: int
    text: str
    done: int
    total: int | None


@dataclass(frozen=True)
class ServerContext:
    """What the server computes with.

    `precision` : the precision in which the clients' network is trained.
    """

    pools: Pools
    precision: Precision
    emit: Callable[[ServerProgress], None]


class ServerTraining(ABC):
    """What a method can compute on the server in one round."""

    task: Task
    round: int
    context: ServerContext

    @abstractmethod
    def log(self, **values: float | Tensor) -> None:
        """Log numbers of this round."""

    def pool(self, name: str) -> Pool:
        """Return samples that belong to no client (``data.pools``), in mini-batches on the server's device.

        Raises
        ------
        ConfigError : if there is no such pool.
        """
        return self.context.pools.pool(name, self.round)

    def other(self, theta: Tensor, model: FlatModel | None = None) -> Other:
        """Return a model ``[P+B]`` that is not trained, such as a teacher, for use in a loss; see `clients.other`."""
        return Other(model or self.task.model, theta.detach())

    def logits(self, theta: Tensor, x: Tensor) -> Tensor:
        """Return the logits ``[n, classes]`` of a model ``[P+B]`` in evaluation mode, without gradients."""
        model = self.task.model
        with model.mode(train=False):
            outputs = Executor(model, self.context.precision).predict(theta[None], x, own_inputs=False)
        return outputs[0].to(model.dtype)

    def sgd(
        self,
        loss: LossFunction,
        start: Tensor,
        batches: Iterable[Batch],
        *,
        lr: float,
        optimizer: LocalOptimizer | None = None,
        schedule: RateSchedule = "constant",
        weight_decay: float = 0.0,
        clip_norm: float | None = None,
        train: str | Tensor | None = None,
        model: FlatModel | None = None,
        mode: Literal["train", "eval"] = "train",
        stream: str = "",
        text: str = "training on the server",
        log: str | None = None,
        **extras: Any,
    ) -> Tensor:
        """Train a model on the server, a step for each batch, as a client alone would train it.

        Parameters
        ----------
        loss : ``loss(p, batch, **extras) -> scalar`` of the parameters ``p[P]``, as for :meth:`Clients.sgd`.
        start : the model ``[P+B]`` that training starts from.
        batches : the batches of :meth:`Pool.batches`, or any others.
        lr, weight_decay, clip_norm : the learning rate, the weight decay and the largest norm of a gradient.
        optimizer : the optimizer, whose state starts empty; None: plain SGD.
        schedule : how the learning rate changes over the steps: ``constant``, or ``cosine``, which falls from `lr`
            toward 0.
        train : the segments that move (see :meth:`FlatModel.names`), or ``bool[P+B]``.
        model : the network; None: the clients'.
        mode : in ``train``, batch norm normalises by the batch and moves its statistics, and dropout is active; in
            ``eval``, neither is the case.
        stream : a name for the network's own random draws; another name gives other draws.
        text : what the display says about this work.
        log : the name under which the mean of the loss over the steps is logged.
        extras : tensors or models that are not trained (:meth:`other`), passed to the loss by name.

        Returns
        -------
        The trained model ``[P+B]``.

        Raises
        ------
        Diverged : if the loss, or what was trained, is not finite.
        """
        model = model or self.task.model
        theta = _checked_copy(model, start)
        mask = model.mask(train) if isinstance(train, str) else train
        parameter_mask = None if mask is None else model.parameters(mask)

        update = Update(optimizer or SGD(), lr, weight_decay, clip_norm, parameter_mask)
        rate = _scheduled(schedule, lr, _length(batches))
        # training.precision applies to the clients' network, not to a method's further networks.
        precision = self.context.precision if model is self.task.model else DEFAULT_PRECISION
        key = self._key("central" + stream)
        losses = Executor(model, precision).train_one(
            LocalLoss(model, loss), theta, batches, update, rate, key, extras, mode == "train"
        )

        total = theta.new_zeros(())
        steps = 0
        for value in self.progress(text, losses, total=_length(batches)):
            total = total + value
            steps += 1

        self._refuse_divergence(text, total, theta)
        if log is not None and steps:
            self.log(**{log: total / steps})
        # Batch norm updates its statistics even where nothing is to be trained: restore them.
        return theta if mask is None else torch.where(mask, theta, start)

    def descend(
        self,
        loss: Callable[[Tensor], Tensor],
        start: Tensor,
        *,
        steps: int,
        lr: float,
        optimizer: LocalOptimizer | None = None,
        schedule: RateSchedule = "constant",
        text: str = "training on the server",
    ) -> Tensor:
        """Move any tensor, such as a synthetic set, down the gradient of ``loss(tensor)``, as :meth:`sgd` does."""
        position = start.detach().clone(memory_format=torch.contiguous_format)
        flat = position.view(-1)  # shares its memory, so that a step of the optimizer moves both
        value = position.new_zeros(())
        update = Update(optimizer or SGD(), lr)
        optimizer_state = update.init(flat)
        rate = _scheduled(schedule, lr, steps)

        for step in self.progress(text, range(steps)):
            with torch.enable_grad():
                value = loss(position.requires_grad_())
                (gradient,) = torch.autograd.grad(value, position)
            position.requires_grad_(False)
            replace(update, lr=rate(step)).step_(flat, gradient.reshape(-1), optimizer_state)

        self._refuse_divergence(text, value.detach(), position)
        return position

    def progress(self, text: str, items: Iterable[Item], *, total: int | None = None) -> Iterator[Item]:
        """Yield the items; if that takes long, report progress to the listeners.

        Parameters
        ----------
        text : what the server does, such as ``"distilling"``.
        total : the number of items; None: their length, if they have one.
        """
        if total is None:
            total = _length(items)
        last_report = time.monotonic()
        for count, item in enumerate(items, start=1):
            yield item
            now = time.monotonic()
            if now - last_report >= PROGRESS_INTERVAL:
                self.context.emit(ServerProgress(self.round, text, count, total))
                last_report = now

    def _refuse_divergence(self, text: str, loss: Tensor, position: Tensor) -> None:
        if not bool(torch.isfinite(loss) & torch.isfinite(position.sum())):
            raise Diverged(
                f"{text[:1].upper()}{text[1:]} diverged in round {self.round}: the loss, or what was trained, is not "
                "finite. Lower the learning rate, or clip gradients."
            )

    def _key(self, purpose: str) -> Tensor:
        key = np.array(rng.key(self.task.seed, purpose, self.round), dtype=np.uint64)
        return torch.from_numpy(key.astype(np.int64))


def _checked_copy(model: FlatModel, start: Tensor) -> Tensor:
    if start.shape != (model.size,):
        raise MethodError(
            f"cohort.sgd trains one model vector [{model.size}] of this network, not {list(start.shape)}."
        )
    return start.detach().clone(memory_format=torch.contiguous_format)


def _scheduled(schedule: RateSchedule, lr: float, steps: int | None) -> Callable[[int], float]:
    """Return the learning rate as a function of the step."""
    if schedule == "constant":
        return lambda step: lr
    if steps is None:
        raise MethodError("A cosine schedule needs to know the number of batches; pass a list of them.")
    return lambda step: lr / 2 * (1 + math.cos(math.pi * step / steps))


def _length(items: Iterable[Any]) -> int | None:
    return len(items) if isinstance(items, Sized) else None
