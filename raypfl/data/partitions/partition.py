"""What a partition is: a pure function of the samples' labels and a seed that assigns each sample to a client."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from raypfl.common import rng
from raypfl.common.component import Component
from raypfl.common.errors import ConfigError, DataError
from raypfl.common.registry import Registry

PARTITIONS = Registry("partition")


@dataclass(frozen=True)
class Traits:
    """What a partition may know about the samples.

    Attributes
    ----------
    labels : ``int64[N]``, each in ``range(num_classes)``. If samples have several labels each: the number of the
        combination.
    num_classes : number of classes, or of combinations.
    groups : ``int64[N]``, the index of each sample's domain, writer or the like in `group_names`; None: the data set
        has no groups.
    rows : ``int64[N]``, each sample's number in the data set; None: 0 to N - 1.
    pooled : number of training samples that went to pools.
    classes : whether there are classes; if not, all labels are 0.
    values : ``[N]``, the targets, if each is one number; else None.
    """

    labels: np.ndarray
    num_classes: int
    groups: np.ndarray | None = None
    group_names: tuple[str, ...] = ()
    rows: np.ndarray | None = None
    pooled: int = 0
    classes: bool = True
    values: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def at(self, indices: np.ndarray) -> Traits:
        """Return the traits of the samples at ``indices[n]`` alone."""
        return Traits(
            labels=self.labels[indices],
            num_classes=self.num_classes,
            groups=None if self.groups is None else self.groups[indices],
            group_names=self.group_names,
            rows=indices if self.rows is None else self.rows[indices],
            classes=self.classes,
            values=None if self.values is None else self.values[indices],
        )


class Partition(Component, ABC):
    """Assigns every sample to one client.

    A subclass overrides `owners`; its fields are its options. A description names it as ``my_module:MyPartition``.

    Attributes
    ----------
    clients : number of clients; each gets at least one sample.
    by_class : whether it needs the samples' classes; if so, samples without classes are refused.
    by_group : whether each client gets whole groups or a part of one, so that clients are named after their groups.
    least : the smallest value of each option that has one.
    """

    section: ClassVar[str] = "partition."

    by_class: ClassVar[bool] = False
    by_group: ClassVar[bool] = False
    least: ClassVar[dict[str, int]] = {"clients": 1}

    clients: int = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        for option, least in self.least.items():
            value = getattr(self, option)
            require(option, value, value >= least, f"at least {least}")

    @abstractmethod
    def owners(self, samples: Traits, seed: int) -> np.ndarray:
        """Return the client of each sample: ``int64[N]``, each in ``range(self.count(samples))``."""

    def count(self, samples: Traits) -> int:
        """Return the number of clients, for partitions that learn it from the samples."""
        return self.clients

    def alike(self, samples: Traits) -> tuple[np.ndarray, int]:
        """Return the kind of each sample, ``int64[N]``, and the number of kinds.

        A published test split is divided kind by kind, in proportion to the training samples that clients hold.
        """
        return samples.labels, samples.num_classes

    def files(self) -> tuple[Path, ...]:
        """Return the files that the partition depends on."""
        return ()

    def assign(self, samples: Traits, seed: int) -> list[np.ndarray]:
        """Return the samples of each client: an array of ascending ``int64`` indices for each.

        Raises
        ------
        ConfigError : if the samples do not allow what the options ask for.
        DataError : if `owners` leaves a client without a sample.
        """
        owner = self.checked_owners(samples, seed)
        ends = np.cumsum(np.bincount(owner, minlength=self.count(samples)))
        by_client = np.argsort(owner, kind="stable")
        return np.split(by_client, ends[:-1])

    def checked_owners(self, samples: Traits, seed: int) -> np.ndarray:
        """Return `owners`, checked: every client has a sample. Raises as `assign` does."""
        if self.by_class and not samples.classes:
            raise ConfigError(
                f"partition is {PARTITIONS.name_of(type(self))!r}, which divides samples by class, but the targets "
                "here are numbers or tokens; choose another, such as 'iid', 'lognormal' or 'by_column'."
            )

        clients = self.count(samples)
        if clients > len(samples):
            raise ConfigError(
                f"partition.clients is {clients}, but there are only {len(samples)} samples to divide; "
                f"every client needs at least one."
            )

        # The partition may be a user's, so check everything that it returns.
        owner = np.asarray(self.owners(samples, seed))
        if owner.dtype.kind not in "iu":
            raise DataError(
                f"The partition {type(self).__name__} returns {owner.dtype}{list(owner.shape)}; it must return the "
                "client of each sample, as integers."
            )
        if owner.shape != samples.labels.shape or owner.min() < 0 or owner.max() >= clients:
            raise DataError(
                f"The partition {type(self).__name__} must return a client from 0 to {clients - 1} for each of "
                f"{len(samples)} samples, but it returns {owner.size}, from {owner.min()} to {owner.max()}."
            )

        empty = np.flatnonzero(np.bincount(owner, minlength=clients) == 0)
        if empty.size:
            raise DataError(f"The partition {type(self).__name__} gives client {empty[0]} no sample.")
        return owner


@PARTITIONS.register("iid")
class IID(Partition):
    """Random samples, in equal numbers."""

    def owners(self, samples: Traits, seed: int) -> np.ndarray:
        return rng.generator(seed, "partition").permutation(len(samples)) % self.clients


def require(option: str, value: object, holds: bool, expected: str) -> None:
    """Raise a ConfigError about the value of an option, unless `holds`."""
    if not holds:
        raise ConfigError(f"partition.{option} is {value}, but must be {expected}.")


def require_enough(samples: int, clients: int, min_samples: int) -> None:
    """Raise a ConfigError if there are too few `samples` to give each of `clients` at least `min_samples`."""
    if samples < clients * min_samples:
        raise ConfigError(
            f"partition.min_samples is {min_samples}, so {clients} clients need {clients * min_samples} samples, "
            f"but there are {samples}; lower partition.min_samples or partition.clients."
        )
