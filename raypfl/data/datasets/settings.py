"""The ``data`` section of an experiment: its data set, its pools, and what each client holds out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from raypfl.common.errors import ConfigError
from raypfl.data.datasets.source import DIVIDED, DataSource
from raypfl.learning.augmentation import Augmentation

SPLITS = ("train", "val", "test")
"""The splits of a client, in the order of their codes in the store; pools come after them."""


@dataclass(frozen=True, kw_only=True)
class DataConfig(DataSource):
    """The data set of an experiment, and which of a client's samples are held out.

    Attributes
    ----------
    rare : smallest number of samples with the same combination of labels, for samples with several labels each; rarer
        combinations count as one when a partition divides the samples.
    pools : samples that belong to no client, by name: a share of the training samples, or another data set. Methods may
        need a pool called ``auxiliary``; pools called ``ood/...`` are test data.
    test_fraction : share of each client's samples held out for testing; a published test split replaces it.
    val_fraction : share of each client's samples held out for validation.
    unseen_fraction : share of the clients that are never trained.
    cache : folder of the prepared data; None: ``$RAYPFL_CACHE``, or else ``~/.cache/raypfl``.
    augmentation : random transformations of training images, in order. In YAML: a list of names, or of mappings with
        `name` and options.

    Raises
    ------
    ConfigError : if a number is out of range, a pool is not described, or the shares leave no training samples.
    """

    rare: Annotated[int, DIVIDED] = 2000
    pools: dict[str, Any] = field(default_factory=dict)
    test_fraction: Annotated[float, DIVIDED] = 0.25
    val_fraction: Annotated[float, DIVIDED] = 0.0
    unseen_fraction: Annotated[float, DIVIDED] = 0.0
    cache: str | None = None
    augmentation: tuple[Augmentation, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.normalise != "clients":
            raise ConfigError(
                f"data.normalise is {self.normalise!r}, but is for pools from other data sets; write "
                f"data.pools.NAME.normalise={self.normalise}."
            )

        for name in ("test_fraction", "val_fraction", "unseen_fraction"):
            _require_share(f"data.{name}", getattr(self, name))
        if self.test_fraction + self.val_fraction >= 1:
            raise ConfigError(
                f"data.test_fraction is {self.test_fraction} and data.val_fraction is {self.val_fraction}, which "
                f"leaves no training samples."
            )

        for name, pool in self.pools.items():
            _require_pool(name, pool)
        pooled_share = sum(self.shares().values())
        if pooled_share >= 1:
            raise ConfigError(
                f"data.pools take {pooled_share:g} of the training samples, which leaves none to train on."
            )

        object.__setattr__(self, "augmentation", tuple(self.augmentation))
        for augmentation in self.augmentation:
            if not isinstance(augmentation, Augmentation):
                raise ConfigError(
                    f"data.augmentation has {augmentation!r}; from Python it must be an object such as "
                    f"raypfl.learning.augmentation.Flip()."
                )

    def shares(self) -> dict[str, float]:
        """Return the pools that take a share of the training samples."""
        return {name: pool for name, pool in self.pools.items() if not isinstance(pool, DataSource)}

    def sources(self) -> dict[str, DataSource]:
        """Return the pools that come from other data sets."""
        return {name: pool for name, pool in self.pools.items() if isinstance(pool, DataSource)}


def _require_pool(name: str, pool: Any) -> None:
    if name in SPLITS:
        raise ConfigError(f"data.pools has a pool called {name!r}, which is the name of a split; choose another.")
    if isinstance(pool, int | float) and not isinstance(pool, bool):
        _require_share(f"data.pools.{name}", pool)
    elif not isinstance(pool, DataSource):
        raise ConfigError(
            f"data.pools.{name} is {pool!r}, but must be a share of the training samples, such as 0.1, or a data set, "
            f"such as {{name: cifar100, root: ...}} (from Python: raypfl.data.datasets.DataSource)."
        )


def _require_share(option: str, value: float) -> None:
    if not 0 <= value < 1:
        raise ConfigError(f"{option} is {value}, but must be at least 0 and below 1.")
