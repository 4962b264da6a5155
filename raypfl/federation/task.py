"""What a method may know before the first round."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from raypfl.learning.objectives import Classification, Objective
from raypfl.models.flat import FlatModel


@dataclass(frozen=True)
class Task:
    """What a method may know before the first round.

    Attributes
    ----------
    model : the clients' network.
    seed : of the run.
    rounds, num_clients : of the experiment.
    num_classes : number of classes or tokens that a target is one of, or of labels or numbers that a target has.
    input_shape : of a sample, such as ``(C, H, W)``.
    objective : what is learned.
    num_samples : ``int64[num_clients]`` training samples of each client.
    networks : the method's own, by name.
    num_test_samples : ``int64[num_clients]``, in each client's test split.
    unseen : ``int64[U]``, clients that are never trained.
    pools : name -> number of samples that belong to no client.
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

    @property
    def num_trained(self) -> int:
        """Number of clients that take part in training."""
        return self.num_clients - len(self.unseen)
