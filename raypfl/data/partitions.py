"""Ways to deal samples out to clients: pure functions of the labels and a seed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from raypfl import rng
from raypfl.errors import ConfigError, DataError
from raypfl.registry import Registry

PARTITIONS = Registry("partition")

# How often a Dirichlet draw that leaves a client short is thrown away before samples are moved instead.
_TRIES = 10


@dataclass(frozen=True, kw_only=True)
class Partition(ABC):
    """Gives every sample to one client.

    A partition of your own overrides `owners` and is named in the config as ``my_module:MyPartition``; its fields are
    its options.

    Attributes
    ----------
    clients : how many there are; none goes empty.
    """

    clients: int = 20

    def __post_init__(self) -> None:
        _require("clients", self.clients, self.clients >= 1, "at least 1")

    @abstractmethod
    def owners(self, labels: np.ndarray, num_classes: int, seed: int) -> np.ndarray:
        """The client of each sample.

        Parameters
        ----------
        labels : ``int64[N]``, each in ``range(num_classes)``.

        Returns
        -------
        ``int64[N]``, each in ``range(clients)``.
        """

    def assign(self, labels: np.ndarray, num_classes: int, seed: int) -> list[np.ndarray]:
        """The samples of each client: `clients` arrays of ascending ``int64`` indices into `labels`.

        Raises
        ------
        ConfigError : if the samples cannot be dealt out as the options ask.
        DataError : if `owners` leaves a client without a sample.
        """
        owner = self.checked_owners(labels, num_classes, seed)
        ends = np.cumsum(np.bincount(owner, minlength=self.clients))
        return np.split(np.argsort(owner, kind="stable"), ends[:-1])

    def checked_owners(self, labels: np.ndarray, num_classes: int, seed: int) -> np.ndarray:
        """`owners`, after making sure that no client goes empty. Raises as `assign` does."""
        if self.clients > len(labels):
            raise ConfigError(
                f"partition.clients is {self.clients}, but there are only {len(labels)} training samples; "
                f"every client needs at least one."
            )
        owner = self.owners(labels, num_classes, seed)
        if owner.shape != labels.shape or owner.min() < 0 or owner.max() >= self.clients:
            raise DataError(
                f"The partition {type(self).__name__} must name a client from 0 to {self.clients - 1} for each of "
                f"{len(labels)} samples, but it names {owner.size}, which range from {owner.min()} to {owner.max()}."
            )
        empty = np.flatnonzero(np.bincount(owner, minlength=self.clients) == 0)
        if empty.size:
            raise DataError(f"The partition {type(self).__name__} gives client {empty[0]} no sample.")
        return owner


@PARTITIONS.register("iid")
@dataclass(frozen=True, kw_only=True)
class IID(Partition):
    """Samples at random, in equal numbers."""

    def owners(self, labels: np.ndarray, num_classes: int, seed: int) -> np.ndarray:
        return rng.generator(seed, "partition").permutation(len(labels)) % self.clients


@PARTITIONS.register("dirichlet")
@dataclass(frozen=True, kw_only=True)
class Dirichlet(Partition):
    """Each class divided over the clients by a Dirichlet draw (Yurochkin et al. 2019; cf. Hsu et al. 2019).

    Attributes
    ----------
    alpha : concentration; small: few classes a client, and clients of very unequal size; large: near IID.
    min_samples : of every client. Draws that leave one with fewer are repeated a few times; then the largest clients
        give samples, taken at random, to those short.
    """

    alpha: float = 0.3
    min_samples: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        _require("alpha", self.alpha, self.alpha > 0, "above 0")
        _require("min_samples", self.min_samples, self.min_samples >= 1, "at least 1")

    def owners(self, labels: np.ndarray, num_classes: int, seed: int) -> np.ndarray:
        _require_enough(len(labels), self.clients, self.min_samples)
        draws = rng.generator(seed, "partition")
        available = np.bincount(labels, minlength=num_classes)
        for _ in range(_TRIES):
            shares = draws.dirichlet(np.full(self.clients, self.alpha), size=num_classes)
            counts = apportion(available, shares)
            if counts.sum(axis=0).min() >= self.min_samples:
                break
        return top_up(deal(labels, counts, draws), self.clients, self.min_samples, draws)


@PARTITIONS.register("classes_per_client")
@dataclass(frozen=True, kw_only=True)
class ClassesPerClient(Partition):
    """The same number of classes for every client, and nearly the same number of clients for every class.

    Attributes
    ----------
    classes : of each client. The clients that own a class divide its samples in proportion to draws from U(0.4, 0.6).
    """

    classes: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        _require("classes", self.classes, self.classes >= 1, "at least 1")

    def owners(self, labels: np.ndarray, num_classes: int, seed: int) -> np.ndarray:
        draws = rng.generator(seed, "partition")
        owned = self._ownership(num_classes, draws)
        available = np.bincount(labels, minlength=num_classes)
        at_least = owned.sum(axis=0)
        scarce = np.flatnonzero(at_least > available)
        if scarce.size:
            label = int(scarce[0])
            raise ConfigError(
                f"partition.classes is {self.classes} and partition.clients is {self.clients}, so that class {label} "
                f"would be shared by {at_least[label]} clients, but it has only {available[label]} samples."
            )
        weights = owned.T * draws.uniform(0.4, 0.6, size=owned.T.shape)
        return deal(labels, owned.T + apportion(available - at_least, weights), draws)

    def _ownership(self, num_classes: int, draws: np.random.Generator) -> np.ndarray:
        """Which client owns which class: ``bool[clients, num_classes]``.

        Clients come in blocks, and each block deals a shuffled round of classes over and over. A block is as long as
        it takes for every class to be owned equally often in it.
        """
        if self.classes > num_classes:
            raise ConfigError(f"partition.classes is {self.classes}, but there are {num_classes} classes.")
        if self.clients * self.classes < num_classes:
            raise ConfigError(
                f"partition.classes is {self.classes} and partition.clients is {self.clients}, which is too few for "
                f"each of {num_classes} classes to belong to a client; raise one of them."
            )
        block, place = np.divmod(np.arange(self.clients), num_classes // np.gcd(num_classes, self.classes))
        rounds = draws.permuted(np.tile(np.arange(num_classes), (block[-1] + 1, 1)), axis=1)
        turns = (place[:, None] * self.classes + np.arange(self.classes)) % num_classes
        owned = np.zeros((self.clients, num_classes), dtype=bool)
        np.put_along_axis(owned, rounds[block[:, None], turns], True, axis=1)
        return owned


@PARTITIONS.register("lognormal")
@dataclass(frozen=True, kw_only=True)
class LogNormal(Partition):
    """Samples at random, in numbers drawn from a log-normal distribution.

    Attributes
    ----------
    sigma : standard deviation of the logarithm of a client's number of samples; 0: all equal.
    min_samples : of every client; the largest clients give samples to those short.
    """

    sigma: float = 1.0
    min_samples: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        _require("sigma", self.sigma, self.sigma >= 0, "at least 0")
        _require("min_samples", self.min_samples, self.min_samples >= 1, "at least 1")

    def owners(self, labels: np.ndarray, num_classes: int, seed: int) -> np.ndarray:
        _require_enough(len(labels), self.clients, self.min_samples)
        draws = rng.generator(seed, "partition")
        sizes = apportion(len(labels), draws.lognormal(0.0, self.sigma, size=self.clients))
        owner = draws.permutation(np.repeat(np.arange(self.clients), sizes))
        return top_up(owner, self.clients, self.min_samples, draws)


def apportion(total: np.ndarray | int, weights: np.ndarray) -> np.ndarray:
    """Cut totals into whole parts in proportion to weights, each part rounded up or down.

    Parameters
    ----------
    total : ``int[...]``, what to cut.
    weights : ``float[..., K]``, not negative, and not all zero along the last axis.

    Returns
    -------
    ``int64[..., K]``, which adds up to `total` along the last axis.
    """
    edges = np.cumsum(weights, axis=-1, dtype=np.float64)
    cuts = np.rint(edges / edges[..., -1:] * np.asarray(total)[..., None]).astype(np.int64)
    return np.diff(cuts, axis=-1, prepend=0)


def deal(labels: np.ndarray, counts: np.ndarray, draws: np.random.Generator) -> np.ndarray:
    """Owners, at random, such that client k gets ``counts[c, k]`` of the samples of class c.

    Parameters
    ----------
    labels : ``int64[N]``
    counts : ``int64[num_classes, clients]``; row c adds up to the number of samples of class c.

    Returns
    -------
    ``int64[N]``
    """
    shuffled = draws.permutation(len(labels))
    by_class = shuffled[np.argsort(labels[shuffled], kind="stable")]
    owner = np.empty(len(labels), dtype=np.int64)
    owner[by_class] = np.repeat(np.tile(np.arange(counts.shape[1]), len(counts)), counts.ravel())
    return owner


def top_up(owner: np.ndarray, clients: int, minimum: int, draws: np.random.Generator) -> np.ndarray:
    """Move random samples from the largest clients to those with fewer than `minimum`, until there are none.

    Parameters
    ----------
    owner : ``int64[N]``, with N at least ``clients * minimum``.

    Returns
    -------
    ``int64[N]``; `owner` itself where nobody is short.
    """
    sizes = np.bincount(owner, minlength=clients)
    missing = np.maximum(minimum - sizes, 0)
    if not missing.any():
        return owner
    rank = rank_within(owner, draws)
    given = np.flatnonzero(rank >= _level(sizes, missing.sum()))[: missing.sum()]
    topped = owner.copy()
    topped[given] = np.repeat(np.arange(clients), missing)
    return topped


def rank_within(group: np.ndarray, draws: np.random.Generator) -> np.ndarray:
    """Number the members of each group 0, 1, 2, ... in random order: ``int64[N]`` for ``int64[N]`` group ids."""
    shuffled = draws.permutation(len(group))
    order = shuffled[np.argsort(group[shuffled], kind="stable")]
    sizes = np.bincount(group)
    rank = np.empty(len(group), dtype=np.int64)
    rank[order] = np.arange(len(group)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return rank


def _level(sizes: np.ndarray, needed: int) -> int:
    """The highest level such that what clients hold above it is at least `needed`."""
    low, high = 0, int(sizes.max())
    while low < high:
        middle = (low + high + 1) // 2
        enough = np.maximum(sizes - middle, 0).sum() >= needed
        low, high = (middle, high) if enough else (low, middle - 1)
    return low


def _require(option: str, value: float, holds: bool, expected: str) -> None:
    if not holds:
        raise ConfigError(f"partition.{option} is {value}, but must be {expected}.")


def _require_enough(samples: int, clients: int, min_samples: int) -> None:
    if samples < clients * min_samples:
        raise ConfigError(
            f"partition.min_samples is {min_samples}, so that {clients} clients need {clients * min_samples} samples, "
            f"but there are {samples}; lower partition.min_samples or partition.clients."
        )
