"""What the clients of one process share."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from torch import Tensor

from raypfl.evaluation.measures import Measures
from raypfl.models.flat import FlatModel
from raypfl.objectives import Objective
from raypfl.training.batches import Samples
from raypfl.training.executor import Executor
from raypfl.training.pool import Pools
from raypfl.training.sequential import Sequential
from raypfl.training.settings import TrainingSettings

ROOM = 512 * 2**20


@dataclass(eq=False)
class Context:
    """What the clients of one process share: the network, the samples, the settings. Built once, used by every group.

    Attributes
    ----------
    split : ``split(client, name) -> int64[n]`` sample numbers of one client's split.
    measures : what is learned, and by which metrics models are judged.
    pools : samples that belong to no client.
    networks : further networks of the method (:meth:`raypfl.Method.networks`).
    loss_limit : a training loss above it is a failure.
    evaluation_batch : samples a model and forward pass, where nothing is trained.
    scale : the value of a full pixel.
    unseen : clients that are never trained.
    room : bytes on the device for test images that were made worse, since every personal model is tested on the same.
    corrupted : those images, by how.
    """

    model: FlatModel
    executor: Executor
    samples: Samples
    split: Callable[[int, str], np.ndarray]
    num_clients: int
    num_classes: int
    training: TrainingSettings
    seed: int
    pools: Pools = field(kw_only=True)
    measures: Measures = field(default_factory=Measures)
    networks: Mapping[str, FlatModel] = field(default_factory=dict)
    loss_limit: float = 1e6
    evaluation_batch: int = 512
    scale: float = 255.0
    room: float = ROOM
    unseen: frozenset[int] = frozenset()
    corrupted: dict[Any, Tensor] = field(default_factory=dict)
    _unions: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def objective(self) -> Objective:
        """What is learned."""
        return self.measures.objective

    @cached_property
    def initial(self) -> Tensor:
        """The model that every client and the server begin with, ``[P+B]``."""
        return self.model.init(self.seed)

    def everyone(self, split: str) -> np.ndarray:
        """The union of the splits of all clients that are trained, ``int64[N]``."""
        if split not in self._unions:
            trained = (client for client in range(self.num_clients) if client not in self.unseen)
            self._unions[split] = np.concatenate([self.split(client, split) for client in trained])
        return self._unions[split]

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Within: the clients' network and the method's own are in evaluation mode."""
        with contextlib.ExitStack() as modes:
            for network in (self.model, *self.networks.values()):
                modes.enter_context(network.mode(train=False))
            yield

    @cached_property
    def one_by_one(self) -> Sequential:
        """The executor for what cannot be vectorised."""
        executor = self.executor
        return executor if isinstance(executor, Sequential) else Sequential(self.model, executor.precision)  # type: ignore[attr-defined]

    @cached_property
    def unlaid(self) -> Sequential:
        """The executor for what does not work on images channels last."""
        return Sequential(self.model, replace(self.one_by_one.precision, channels_last=False))
