"""A federated data set in numbers: how much each client holds, and how far its labels are from everybody's."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from raypfl.data.datasets import SPLITS
from raypfl.data.population import DescribedData
from raypfl.data.store import ClientData
from raypfl.errors import ConfigError


@dataclass(frozen=True)
class Summary:
    """What there is to know of a partition.

    Attributes
    ----------
    name : of the data set.
    input_shape : (channels, height, width).
    class_names : one a class, or one a label.
    sizes : split -> ``int64[clients]``, samples of each client.
    counts : ``int64[clients, classes]``, each client's training samples of each class; of several labels a sample: how
        often each label is 1.
    pools : name -> number of samples.
    unseen : ``int64[U]``, clients that are never trained.
    multi_label : whether samples have several labels each.
    """

    name: str
    input_shape: tuple[int, int, int]
    class_names: list[str]
    sizes: dict[str, np.ndarray]
    counts: np.ndarray
    pools: dict[str, int]
    unseen: np.ndarray
    multi_label: bool = False

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

        All classes are at distance 1 of each other, so that it is half the sum of absolute differences, from 0 to 1;
        Zhao et al. 2018 state twice that.
        """
        together = self.counts.sum(axis=0) / max(self.counts.sum(), 1)
        return np.abs(self.shares - together).sum(axis=1) / 2


def summarised(data: ClientData) -> Summary:
    """The summary of a data set that `load_federated` opened.

    Raises
    ------
    ConfigError : for a population, whose clients are described and whose labels nobody has seen.
    """
    if isinstance(data, DescribedData):
        raise ConfigError(
            f"The clients of {data.name!r} are described, and their labels known only once a client is at work; "
            f"a summary is made of data sets that are stored."
        )
    return Summary(
        name=data.name,
        input_shape=data.input_shape,
        class_names=data.class_names,
        sizes={split: data.sizes(split) for split in SPLITS},
        counts=data.label_counts("train"),
        pools={name: len(data.pool(name)) for name in data.pools},
        unseen=data.unseen,
        multi_label=data.multi_label,
    )
