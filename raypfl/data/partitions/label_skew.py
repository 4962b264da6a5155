"""Partitions whose clients differ in the classes that they hold."""

from __future__ import annotations

from math import inf
from typing import ClassVar, Literal

import numpy as np

from raypfl.common import rng
from raypfl.common.errors import ConfigError
from raypfl.data.partitions.allocation import apportion, draw_owners, equal_sizes, fit_margins, raise_to_minimum
from raypfl.data.partitions.partition import PARTITIONS, Partition, Traits, require, require_enough


@PARTITIONS.register("dirichlet")
class Dirichlet(Partition):
    """Each class divided over the clients by a Dirichlet draw (Yurochkin et al. 2019; cf. Hsu et al. 2019).

    Attributes
    ----------
    alpha : concentration; small: few classes a client, and clients of very unequal size; large: near IID.
    min_samples : smallest size of a client. Draws that give a client fewer are discarded.
    tries : maximum number of draws.
    when_short : what happens if all draws are discarded. ``move``: random samples of the largest clients move to those
        with too few; ``refuse``: an error.
    reserve : samples of every class that every client gets first, independent of the draw (PerAda: 2).
    cap : a client that holds `cap` times the mean number of samples, samples in pools included, gets none of the
        remaining classes (PerAda, FedML: 1); None: no limit.
    balanced : whether to rescale the drawn shares so that all clients have the same size.
    """

    by_class = True
    least: ClassVar = {"clients": 1, "min_samples": 1, "tries": 1, "reserve": 0}

    alpha: float = 0.3
    min_samples: int = 10
    tries: int = 10
    when_short: Literal["move", "refuse"] = "move"
    reserve: int = 0
    cap: float | None = None
    balanced: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require("alpha", self.alpha, 0 < self.alpha < inf, "a finite number above 0")
        require("when_short", repr(self.when_short), self.when_short in ("move", "refuse"), "'move' or 'refuse'")
        require("cap", self.cap, self.cap is None or self.cap >= 1, "at least 1, since all samples are allocated")
        if self.balanced and self.cap is not None:
            raise ConfigError("partition.balanced gives all clients one size, so partition.cap has no effect.")

    def owners(self, samples: Traits, seed: int) -> np.ndarray:
        require_enough(len(samples), self.clients, self.min_samples)
        available = np.bincount(samples.labels, minlength=samples.num_classes)
        self._require_reserve(available)

        draws = rng.generator(seed, "partition")
        mean_size = (len(samples) + samples.pooled) / self.clients
        for _ in range(self.tries):
            counts = self._draw_counts(available, mean_size, draws)
            if counts.sum(axis=0).min() >= self.min_samples:
                break
        else:
            if self.when_short == "refuse":
                raise ConfigError(
                    f"None of {self.tries} Dirichlet({self.alpha}) draws gives each of {self.clients} clients "
                    f"{self.min_samples} samples; raise partition.alpha or partition.tries, lower "
                    f"partition.min_samples, or set partition.when_short to 'move'."
                )

        owner = draw_owners(samples.labels, counts, draws)
        return raise_to_minimum(owner, self.clients, self.min_samples, draws)

    def _draw_counts(self, available: np.ndarray, mean_size: float, draws: np.random.Generator) -> np.ndarray:
        """Draw how many samples of each class each client gets: ``int64[num_classes, clients]``."""
        shares = draws.dirichlet(np.full(self.clients, self.alpha), size=len(available))
        rest = available - self.reserve * self.clients * (available > 0)
        reserved = np.broadcast_to((self.reserve * (available > 0))[:, None], shares.shape)

        if self.balanced:
            sizes = equal_sizes(available.sum(), self.clients) - reserved.sum(axis=0)
            return reserved + fit_margins(shares * rest[:, None], rest, sizes)
        if self.cap is not None:
            return self._capped_counts(shares, rest, reserved, self.cap * mean_size)
        return reserved + apportion(rest, shares)

    @staticmethod
    def _capped_counts(shares: np.ndarray, rest: np.ndarray, reserved: np.ndarray, limit: float) -> np.ndarray:
        """Allocate class by class, without the clients that already hold `limit` samples."""
        counts = reserved.copy()
        for label, share in enumerate(shares):
            is_below = counts.sum(axis=0) < limit
            weights = share * is_below
            # With a small alpha, the shares of all clients below the limit may underflow to 0.
            if not weights.sum() > 0:
                weights = is_below
            if rest[label]:
                counts[label] += apportion(rest[label], weights)
        return counts

    def _require_reserve(self, available: np.ndarray) -> None:
        scarce = np.flatnonzero((available > 0) & (available < self.reserve * self.clients))
        if scarce.size:
            raise ConfigError(
                f"partition.reserve is {self.reserve}, so {self.clients} clients need "
                f"{self.reserve * self.clients} samples of each class, but class {scarce[0]} has "
                f"{available[scarce[0]]}; lower partition.reserve or partition.clients."
            )


@PARTITIONS.register("dirichlet_mix")
class DirichletMix(Partition):
    """Each client's label mix from a Dirichlet draw over the classes (Hsu et al. 2019; PeFLL, Scott et al. 2024).

    All samples are used, so mixes shift towards the classes of which samples would be left over.

    Attributes
    ----------
    alpha : concentration of a client's mix; small: few classes a client; large: all classes in equal numbers.
    balanced : whether clients have equal sizes; if not, each class is divided in proportion to its share in the
        clients' mixes.
    min_samples : smallest size of a client; the largest clients give samples to those with fewer.
    """

    by_class = True
    least: ClassVar = {"clients": 1, "min_samples": 1}

    alpha: float = 0.3
    balanced: bool = True
    min_samples: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        require("alpha", self.alpha, 0 < self.alpha < inf, "a finite number above 0")

    def owners(self, samples: Traits, seed: int) -> np.ndarray:
        require_enough(len(samples), self.clients, self.min_samples)
        draws = rng.generator(seed, "partition")
        available = np.bincount(samples.labels, minlength=samples.num_classes)
        mixes = draws.dirichlet(np.full(samples.num_classes, self.alpha), size=self.clients).T

        if self.balanced:
            sizes = equal_sizes(len(samples), self.clients)
            counts = fit_margins(mixes * sizes, available, sizes)
            return draw_owners(samples.labels, counts, draws)

        # A class that no client's mix has would have no weights to divide it by.
        counts = apportion(available, np.maximum(mixes, np.finfo(float).tiny))
        owner = draw_owners(samples.labels, counts, draws)
        return raise_to_minimum(owner, self.clients, self.min_samples, draws)


@PARTITIONS.register("classes_per_client")
class ClassesPerClient(Partition):
    """The same number of classes for every client, and nearly the same number of clients for every class.

    Shamsian et al. 2021 (pFedHN); PeFLL.

    Attributes
    ----------
    classes : number of classes of each client.
    equal : whether the clients that own a class divide its samples equally, not in proportion to U(0.4, 0.6) draws.
    """

    by_class = True
    least: ClassVar = {"clients": 1, "classes": 1}

    classes: int = 2
    equal: bool = False

    def owners(self, samples: Traits, seed: int) -> np.ndarray:
        draws = rng.generator(seed, "partition")
        owned = self._draw_classes(samples.num_classes, draws)
        available = np.bincount(samples.labels, minlength=samples.num_classes)

        num_owners = owned.sum(axis=0)
        scarce = np.flatnonzero(num_owners > available)
        if scarce.size:
            label = int(scarce[0])
            raise ConfigError(
                f"partition.classes is {self.classes} and partition.clients is {self.clients}, so class {label} "
                f"would be shared by {num_owners[label]} clients, but it has only {available[label]} samples."
            )

        # Each owner gets one sample of a class first, then its share of the rest.
        weights = owned.T * (1.0 if self.equal else draws.uniform(0.4, 0.6, size=owned.T.shape))
        counts = owned.T + apportion(available - num_owners, weights)
        return draw_owners(samples.labels, counts, draws)

    def _draw_classes(self, num_classes: int, draws: np.random.Generator) -> np.ndarray:
        """Draw which client owns which class: ``bool[clients, num_classes]``.

        Clients come in blocks, and each block repeats one random order of the classes. A block is the smallest one in
        which every class is owned equally often.
        """
        if self.classes > num_classes:
            raise ConfigError(f"partition.classes is {self.classes}, but there are {num_classes} classes.")
        if self.clients * self.classes < num_classes:
            raise ConfigError(
                f"partition.classes is {self.classes} and partition.clients is {self.clients}, which is too few for "
                f"each of {num_classes} classes to belong to a client; raise one of them."
            )

        block_size = num_classes // np.gcd(num_classes, self.classes)
        block, place = np.divmod(np.arange(self.clients), block_size)
        orders = draws.permuted(np.tile(np.arange(num_classes), (block[-1] + 1, 1)), axis=1)
        positions = (place[:, None] * self.classes + np.arange(self.classes)) % num_classes

        owned = np.zeros((self.clients, num_classes), dtype=bool)
        np.put_along_axis(owned, orders[block[:, None], positions], True, axis=1)
        return owned


@PARTITIONS.register("label_sorted")
class LabelSorted(Partition):
    """Samples sorted by label, or by a numeric target, and cut into equal parts.

    No partition into equal parts makes clients differ more in their labels.
    """

    def owners(self, samples: Traits, seed: int) -> np.ndarray:
        if not samples.classes and samples.values is None:
            raise ConfigError("partition is 'label_sorted', but targets are neither classes nor one number a sample.")

        targets = samples.labels if samples.values is None else samples.values
        order = np.argsort(targets, kind="stable")
        owner = np.empty(len(samples), dtype=np.int64)
        owner[order] = np.arange(len(samples)) * self.clients // len(samples)
        return owner
