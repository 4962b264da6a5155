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
from raypfl.common.errors import MethodError
from raypfl.federation.task import Task
from raypfl.learning.executor import DEFAULT_PRECISION, Executor, Precision
from raypfl.learning.loss import LocalLoss, LossFunction
from raypfl.learning.objectives.batch import Batch
from raypfl.learning.optimizers import SGD, LocalOptimizer, Update
from raypfl.learning.pool import Pool, Pools
from raypfl.models.extras import Other
from raypfl.models.flat import FlatModel

Schedule = Literal["constant", "cosine"]
Item = TypeVar("Item")

INTERVAL = 0.5
"""Seconds between two events about the same work. Shorter work has no event."""


@dataclass(frozen=True)
class ServerProgress:
    """The progress of long work on the server: `done` steps of `total`, or of an unknown number."""

    round: int
    text: str
    done: int
    total: int | None


@dataclass(frozen=True)
class ServerContext:
    """What the server computes with.

    Attributes
    ----------
    pools : as the server reads them.
    precision : in which the clients' network is trained.
    emit : called with the progress of long work.
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
        """Samples that belong to no client (``data.pools``), in mini-batches on the server's device.

        Raises
        ------
        ConfigError : if there is no such pool.
        """
        return self.context.pools.pool(name, self.round)

    def other(self, theta: Tensor, model: FlatModel | None = None) -> Other:
        """A model ``[P+B]`` that is not trained, for use in a loss: a teacher; see `clients.other`."""
        return Other(model or self.task.model, theta.detach())

    def sgd(
        self,
        loss: LossFunction,
        start: Tensor,
        batches: Iterable[Batch],
        *,
        lr: float,
        optimizer: LocalOptimizer | None = None,
        schedule: Schedule = "constant",
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
        start : ``[P+B]``.
        batches : what :meth:`Pool.batches` gives, or any batches.
        lr, optimizer, weight_decay, clip_norm : of the steps; None: plain SGD. Its state starts empty.
        schedule : of the learning rate over the steps: ``constant``; or ``cosine``, which falls from `lr` toward 0.
        train : the segments that move (see :meth:`FlatModel.names`), or ``bool[P+B]``.
        model : the network; None: the clients'.
        mode : in ``train``, batch norm normalises by the batch and moves its statistics, and dropout is at work; in
            ``eval``, neither is.
        stream : another name, other draws of the network's own.
        text : what is going on, for the display.
        log : the name under which the mean of the loss over the steps is logged.
        extras : passed to the loss by name: tensors, or models that are not trained (:meth:`other`).

        Returns
        -------
        ``[P+B]``.

        Raises
        ------
        MethodError : if it diverged.
        """
        model = model or self.task.model
        theta, moving = _whole(model, start), model.mask(train) if isinstance(train, str) else train
        trained = None if moving is None else model.parameters(moving)
        update = Update(optimizer or SGD(), lr, weight_decay, clip_norm, trained)
        rate = _scheduled(schedule, lr, _length(batches))
        executor = Executor(model, self.context.precision if model is self.task.model else DEFAULT_PRECISION)
        local_loss, key = LocalLoss(model, loss), self._key("central" + stream, theta.device)
        losses = executor.train_one(local_loss, theta, batches, update, rate, key, extras, mode == "train")
        total, done = theta.new_zeros(()), 0
        for value in self.progress(text, losses, total=_length(batches)):
            total, done = total + value, done + 1
        self._refuse_divergence(text, total, theta)
        if log is not None and done:
            self.log(**{log: total / done})
        return theta if moving is None else torch.where(moving, theta, start)

    def descend(
        self,
        loss: Callable[[Tensor], Tensor],
        start: Tensor,
        *,
        steps: int,
        lr: float,
        optimizer: LocalOptimizer | None = None,
        schedule: Schedule = "constant",
        text: str = "training on the server",
    ) -> Tensor:
        """Move any tensor, such as a synthetic set, down the gradient of ``loss(tensor)``, as :meth:`sgd` does."""
        at = start.detach().clone(memory_format=torch.contiguous_format)
        flat, value = at.view(-1), at.new_zeros(())
        update = Update(optimizer or SGD(), lr)
        memory, rate = update.init(flat), _scheduled(schedule, lr, steps)
        for step in self.progress(text, range(steps)):
            with torch.enable_grad():
                value = loss(at.requires_grad_())
                (slope,) = torch.autograd.grad(value, at)
            at.requires_grad_(False)
            replace(update, lr=rate(step)).step_(flat, slope.reshape(-1), memory)
        self._refuse_divergence(text, value.detach(), at)
        return at

    def progress(self, text: str, items: Iterable[Item], *, total: int | None = None) -> Iterator[Item]:
        """Yield the items; if that takes long, report progress to the listeners.

        Parameters
        ----------
        text : what is going on, such as ``"distilling"``.
        total : how many there are; None: as many as the items have a length.
        """
        total, last = _length(items) if total is None else total, time.monotonic()
        for done, item in enumerate(items, start=1):
            yield item
            if (now := time.monotonic()) - last >= INTERVAL:
                self.context.emit(ServerProgress(self.round, text, done, total))
                last = now

    def _refuse_divergence(self, text: str, loss: Tensor, at: Tensor) -> None:
        if not bool(torch.isfinite(loss) & torch.isfinite(at.sum())):
            raise MethodError(
                f"{text[:1].upper()}{text[1:]} diverged in round {self.round}: the loss or what was trained is no "
                "finite number. Lower the learning rate, or clip gradients."
            )

    def _key(self, purpose: str, device: torch.device) -> Tensor:
        key = np.array(rng.key(self.task.seed, purpose, self.round), dtype=np.uint64)
        return torch.from_numpy(key.astype(np.int64)).to(device)


def _whole(model: FlatModel, start: Tensor) -> Tensor:
    if start.shape != (model.size,):
        raise MethodError(
            f"cohort.sgd trains one model vector [{model.size}] of this network; it was given {list(start.shape)}."
        )
    return start.detach().clone(memory_format=torch.contiguous_format)


def _scheduled(schedule: Schedule, lr: float, steps: int | None) -> Callable[[int], float]:
    """The learning rate of each step."""
    if schedule == "constant":
        return lambda step: lr
    if steps is None:
        raise MethodError("A cosine schedule must know how many batches there are; give it a list of them.")
    return lambda step: lr / 2 * (1 + math.cos(math.pi * step / steps))


def _length(items: Iterable[Any]) -> int | None:
    return len(items) if isinstance(items, Sized) else None
