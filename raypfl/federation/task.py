"""What a method may know before the first round."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor, nn

from raypfl.common import rng
from raypfl.learning.objectives import Classification, Objective
from raypfl.models.flat import FlatModel


@dataclass(frozen=True)
class Task:
    """What a method may know before the first round.

    Attributes
    ----------
    model : the clients' network; if they have different architectures, the output layer that these have in common.
    seed : the run's seed.
    rounds, num_clients : the experiment's numbers of rounds and of clients.
    num_classes : the number of classes or tokens that a target is one of, or of labels or numbers that a target has.
    input_shape : the shape of a sample, such as ``(C, H, W)``.
    objective : what the clients learn, such as classification.
    num_samples : ``int64[num_clients]``, the training samples of each client.
    networks : the method's further networks by name.
    num_test_samples : ``int64[num_clients]``, the samples of each client's test split.
    unseen : ``int64[U]``, the clients that are never trained.
    pools : name -> the number of a pool's samples, which belong to no client.
    discrete : whether samples are tokens, ``int64``, which networks get unchanged.
    architecture_of : the number of each client's architecture, ``int64[num_clients]``; None: all have the same.
    """

    model: FlatModel
    seed: int
    rounds: int
    num_clients: int
    num_classes: int
    input_shape: tuple[int, ...]
    num_samples: np.ndarray
    networks: Mapping[str, FlatModel] = field(default_factory=dict)
    num_test_samples: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    unseen: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    pools: Mapping[str, int] = field(default_factory=dict)
    objective: Objective = field(default_factory=Classification)
    discrete: bool = False
    architecture_of: np.ndarray | None = None

    def new_network(self, name: str, factory: Callable[[], nn.Module]) -> FlatModel:
        """Return a further network, for :meth:`Method.networks`, with the clients' dtype and device.

        Parameters
        ----------
        name : its name, from which its seed follows.
        factory : builds it, without arguments.
        """
        return FlatModel(factory, self._seed_of(name), self.model.dtype, self.model.device)

    def initial(self, name: str) -> Tensor:
        """Return an initial vector ``[P+B]`` of one of `networks`."""
        return self.networks[name].init(self._seed_of(name))

    def _seed_of(self, name: str) -> int:
        return rng.key(self.seed, name) % 2**31

    def by_architecture(self, clients: Sequence[int] | np.ndarray) -> list[np.ndarray]:
        """Return the positions of the clients that have each architecture, ``int64[n]``; one array if all have one."""
        if self.architecture_of is None:
            return [np.arange(len(clients))]
        numbers = self.architecture_of[np.asarray(clients) % len(self.architecture_of)]
        return [np.flatnonzero(numbers == number) for number in np.unique(numbers)]

    @property
    def trained(self) -> np.ndarray:
        """The clients that take part in training, ``int64[num_trained]``."""
        return np.setdiff1d(np.arange(self.num_clients), self.unseen)

    @property
    def num_trained(self) -> int:
        """The number of clients that take part in training."""
        return self.num_clients - len(self.unseen)
