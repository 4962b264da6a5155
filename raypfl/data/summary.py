"""A federated data set in numbers: the sizes of clients, and how far their labels are from the labels of all."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from raypfl.common.errors import ConfigError
from raypfl.data.datasets.population import DescribedData
from raypfl.data.datasets.settings import SPLITS
from raypfl.data.store import ClientData, FederatedData

_RANGES = 10
"""Of targets that are numbers, for which a summary counts ranges."""


@dataclass(frozen=True)
class Summary:
    """A partition in numbers.

    Attributes
    ----------
    name : of the data set.
    input_shape : of a sample.
    class_names : one for each class, label or token; if targets are numbers: ranges with equally many of them.
    sizes : split -> ``int64[clients]``, samples of each client.
    counts : ``int64[clients, classes]``, each client's training samples of each class; of several labels a sample: how
        often each label is 1; of tokens: how often each is a target.
    pools : name -> number of samples.
    unseen : ``int64[U]``, clients that are never trained.
    kind : of the targets, one of :data:`raypfl.learning.objectives.KINDS`.
    """

    name: str
    input_shape: tuple[int, ...]
    class_names: list[str]
    sizes: dict[str, np.ndarray]
    counts: np.ndarray
    pools: dict[str, int]
    unseen: np.ndarray
    kind: str = "classes"

    @property
    def one(self) -> str:
        """What `class_names` are names of, in the singular."""
        return {"classes": "class", "labels": "label", "numbers": "range", "tokens": "token"}[self.kind]

    @property
    def several(self) -> str:
        """The same in the plural."""
        return "classes" if self.one == "class" else f"{self.one}s"

    @property
    def num_clients(self) -> int:
        return len(self.counts)

    @property
    def shares(self) -> np.ndarray:
        """Each client's label mix, ``float[clients, classes]``: rows add up to 1, or to 0 where there is nothing."""
        total = self.counts.sum(axis=1, keepdims=True)
        return np.divide(self.counts, total, out=np.zeros(self.counts.shape), where=total > 0)

    @property
    def classes_held(self) -> np.ndarray:
        """``int64[clients]``, how many classes each client trains on."""
        return (self.counts > 0).sum(axis=1)

    @property
    def entropy(self) -> np.ndarray:
        """``float[clients]``, Shannon's, of each client's label mix, in bits: from 0 to log2(classes)."""
        shares = self.shares
        return np.abs((shares * np.log2(np.where(shares > 0, shares, 1.0))).sum(axis=1))

    @property
    def distance(self) -> np.ndarray:
        """``float[clients]``, earth mover's, between a client's label mix and that of all clients together.

        All classes are at distance 1 from each other, so this is half the sum of absolute differences, from 0 to 1;
        Zhao et al. 2018 state twice that.
        """
        together = self.counts.sum(axis=0) / max(self.counts.sum(), 1)
        return np.abs(self.shares - together).sum(axis=1) / 2


def summarised(data: ClientData) -> Summary:
    """The summary of a data set that `load_federated` opened.

    Raises
    ------
    ConfigError : for a population, whose labels are known only when its clients work.
    """
    if isinstance(data, DescribedData):
        raise ConfigError(
            f"{data.name!r} is a population, whose labels are known only when a client works; there are summaries only "
            f"of stored data sets."
        )
    names, counts = _held(data)
    return Summary(
        name=data.name,
        input_shape=data.input_shape,
        class_names=names,
        sizes={split: data.sizes(split) for split in SPLITS},
        counts=counts,
        pools={name: len(data.pool(name)) for name in data.pools},
        unseen=data.unseen,
        kind=data.kind,
    )


def _held(data: FederatedData) -> tuple[list[str], np.ndarray]:
    """Names, and how often each client's training samples have each: ``int64[clients, names]``."""
    if data.kind in ("classes", "labels"):
        return data.class_names, data.label_counts("train")
    own = [data.labels[data.indices(client, "train")] for client in range(data.num_clients)]
    if data.kind == "tokens":
        return data.class_names, np.stack([_counted(one[one >= 0], data.num_classes) for one in own])
    first = [one.reshape(len(one), -1)[:, 0] for one in own]  # of several numbers, the first
    edges = np.unique(np.quantile(np.concatenate(first), np.linspace(0, 1, _RANGES + 1)))
    names = [f"{low:.3g} to {high:.3g}" for low, high in itertools.pairwise(edges)] or [f"{edges[0]:.3g}"]
    return names, np.stack([_counted(np.searchsorted(edges[1:-1], one), len(names)) for one in first])


def _counted(values: np.ndarray, count: int) -> np.ndarray:
    return np.bincount(values, minlength=count)
