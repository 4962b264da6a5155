"""A federated data set in numbers: the sizes of clients, and how much their labels differ."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from raypfl.common.errors import ConfigError
from raypfl.data.client_names import ClientNames
from raypfl.data.datasets.population import DescribedData
from raypfl.data.datasets.settings import SPLITS
from raypfl.data.store import ClientData, FederatedData

_RANGES = 10
"""Number of ranges in which targets that are numbers are counted."""


@dataclass(frozen=True)
class Summary:
    """A partition in numbers.

    Attributes
    ----------
    name : the data set's name.
    input_shape : shape of a sample.
    class_names : a name for each class, label or token; if targets are numbers: for each range, with as many targets as
        every other.
    sizes : split -> ``int64[clients]``, samples of each client.
    counts : ``int64[clients, classes]``, each client's training samples of each class. If samples have several labels:
        how often each label is 1; if targets are tokens: how often each is a target.
    pools : name -> number of samples.
    unseen : ``int64[U]``, clients that are never trained.
    kind : kind of the targets, one of :data:`raypfl.learning.objectives.KINDS`.
    client_names : the clients' names; None: clients have numbers only.
    features : the network's inputs in order, if they have names: the name, and the mean and deviation that standardise
        it; 0 and 1 for indicators of categories, which are not standardised.
    vocabulary : the word of each token of the inputs, if they are texts.
    numbers : the numbers to predict in order, if targets are numbers: the name, and the mean and deviation of the
        training samples of all clients but the unseen.
    """

    name: str
    input_shape: tuple[int, ...]
    class_names: list[str]
    sizes: dict[str, np.ndarray]
    counts: np.ndarray
    pools: dict[str, int]
    unseen: np.ndarray
    kind: str = "classes"
    client_names: ClientNames | None = None
    features: list[tuple[str, float, float]] | None = None
    vocabulary: list[str] | None = None
    numbers: list[tuple[str, float, float]] | None = None

    @property
    def unit(self) -> str:
        """What `class_names` are names of, in the singular."""
        return {"classes": "class", "labels": "label", "numbers": "range", "tokens": "token"}[self.kind]

    @property
    def units(self) -> str:
        """What `class_names` are names of, in the plural."""
        return "classes" if self.unit == "class" else f"{self.unit}s"

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
        """The number of classes that each client trains on: ``int64[clients]``."""
        return (self.counts > 0).sum(axis=1)

    @property
    def unseen_with_new_classes(self) -> np.ndarray:
        """The unseen clients whose set of classes no trained client has: ``int64[...]``."""
        holds = self.counts > 0
        trained_sets = {row.tobytes() for row in np.delete(holds, self.unseen, axis=0)}
        is_new = [holds[client].tobytes() not in trained_sets for client in self.unseen]
        return self.unseen[np.array(is_new, dtype=bool)]

    @property
    def entropy(self) -> np.ndarray:
        """Shannon's entropy of each client's label mix in bits, ``float[clients]``: from 0 to log2(classes)."""
        shares = self.shares
        return np.abs((shares * np.log2(np.where(shares > 0, shares, 1.0))).sum(axis=1))

    @property
    def distance(self) -> np.ndarray:
        """Earth mover's distance of each client's label mix from that of all clients together: ``float[clients]``.

        All classes are at distance 1 from each other, so this is half the sum of absolute differences, from 0 to 1;
        Zhao et al. 2018 state twice that.
        """
        overall = self.counts.sum(axis=0) / max(self.counts.sum(), 1)
        return np.abs(self.shares - overall).sum(axis=1) / 2


def summarised(data: ClientData) -> Summary:
    """Summarise a data set that `load_federated` opened.

    Raises
    ------
    ConfigError : for a population, whose labels are known only when its clients work.
    """
    if isinstance(data, DescribedData):
        raise ConfigError(
            f"{data.name!r} is a population, whose labels are known only when a client works; there are summaries only "
            f"of stored data sets."
        )

    names, counts = _count_targets(data)
    return Summary(
        name=data.name,
        input_shape=data.input_shape,
        class_names=names,
        sizes={split: data.sizes(split) for split in SPLITS},
        counts=counts,
        pools={name: len(data.pool(name)) for name in data.pools},
        unseen=data.unseen,
        kind=data.kind,
        client_names=data.client_names,
        features=_features(data),
        vocabulary=data.vocabulary,
        numbers=_numbers(data) if data.kind == "numbers" else None,
    )


def _features(data: FederatedData) -> list[tuple[str, float, float]] | None:
    """Return the features with mean and deviation, in units of the inputs; None: they have no names or no moments."""
    names = data.feature_names
    if names is None or len(data.mean) != len(names):
        return None
    means = (data.mean * data.scale).tolist()
    deviations = (data.std * data.scale).tolist()
    return list(zip(names, means, deviations, strict=True))


def _numbers(data: FederatedData) -> list[tuple[str, float, float]]:
    """Return the numbers to predict with mean and deviation."""
    seen = np.setdiff1d(np.arange(data.num_clients), data.unseen)
    targets = data.labels[np.concatenate([data.indices(client) for client in seen])]
    numbers = targets.reshape(len(targets), -1).astype(np.float64)
    return list(zip(data.class_names, numbers.mean(0).tolist(), numbers.std(0).tolist(), strict=True))


def _count_targets(data: FederatedData) -> tuple[list[str], np.ndarray]:
    """Return names, and how often each client's training samples have each: ``int64[clients, names]``."""
    if data.kind in ("classes", "labels"):
        return data.class_names, data.label_counts("train")

    targets = [data.labels[data.indices(client, "train")] for client in range(data.num_clients)]
    if data.kind == "tokens":
        # The padding of a sequence, -1, is no token.
        tokens = (client_targets[client_targets >= 0] for client_targets in targets)
        return data.class_names, _count_each(tokens, data.num_classes)

    # If a sample has several numbers, its first one counts.
    numbers = [client_targets.reshape(len(client_targets), -1)[:, 0] for client_targets in targets]
    edges = np.unique(np.quantile(np.concatenate(numbers), np.linspace(0, 1, _RANGES + 1)))
    names = [f"{low:.3g} to {high:.3g}" for low, high in itertools.pairwise(edges)]
    # All numbers are equal: there is a single edge.
    if not names:
        names = [f"{edges[0]:.3g}"]
    ranges = (np.searchsorted(edges[1:-1], client_numbers) for client_numbers in numbers)
    return names, _count_each(ranges, len(names))


def _count_each(values: Iterable[np.ndarray], num_values: int) -> np.ndarray:
    """Return how often each client has each value from 0: ``int64[clients, num_values]``."""
    return np.stack([np.bincount(client_values, minlength=num_values) for client_values in values])
