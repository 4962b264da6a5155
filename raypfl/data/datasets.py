"""Data sets by name, and what a reader of one returns."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from raypfl.errors import ConfigError, DataError
from raypfl.registry import Registry

DATASETS = Registry("data set")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which samples there are, and which of a client's are held out.

    Attributes
    ----------
    name : a registered data set, or ``module:attribute`` of a reader of your own: a function that takes this
        configuration and returns `RawData`, or a class of clients that are described (:class:`raypfl.data.Population`).
    root : folder of the data set's files, for readers that need one.
    download : let a reader that can fetch a published data set do so.
    image, label : names of the columns that hold images and labels, for readers of tables.
    test_fraction, val_fraction : share of each client's samples that is held out for test and validation. A published
        test split takes the place of `test_fraction`.
    auxiliary_fraction : share of the training samples that goes to the pool ``auxiliary`` and to no client.
    cache : folder of the prepared data; None: ``$RAYPFL_CACHE``, else ``~/.cache/raypfl``.
    split : ``auto``: a published test split, where there is one, is divided over the clients class by class in
        proportion to their training samples; ``merged``: it is merged with the training samples first, and each client
        holds out `test_fraction` of its own.

    Raises
    ------
    ConfigError : if the fractions are out of range or leave nothing to train on.
    """

    name: str = "digits"
    root: str | None = None
    download: bool = False
    image: str = "image"
    label: str = "label"
    test_fraction: float = 0.25
    val_fraction: float = 0.0
    auxiliary_fraction: float = 0.0
    cache: str | None = None
    split: Literal["auto", "merged"] = "auto"

    def __post_init__(self) -> None:
        for field in ("test_fraction", "val_fraction", "auxiliary_fraction"):
            value = getattr(self, field)
            if not 0 <= value < 1:
                raise ConfigError(f"data.{field} is {value}, but must be at least 0 and below 1.")
        if self.test_fraction + self.val_fraction >= 1:
            raise ConfigError(
                f"data.test_fraction is {self.test_fraction} and data.val_fraction is {self.val_fraction}, which "
                f"leaves nothing to train on."
            )
        if self.split not in ("auto", "merged"):
            raise ConfigError(f"data.split is {self.split!r}, but must be 'auto' or 'merged'.")


@dataclass(frozen=True)
class RawData:
    """A data set as a reader hands it over.

    Attributes
    ----------
    inputs : ``uint8[N, C, H, W]``, or an iterable of such blocks, in order, so that not all need be in memory at once.
    labels : ``int64[N]``, each in ``range(len(class_names))``.
    class_names : one a class.
    scale : the value of a full pixel, by which inputs are divided.
    test_mask : ``bool[N]``, the samples that were published as a test split; None: no such split was published.

    Raises
    ------
    DataError : if the parts do not fit together.
    """

    inputs: np.ndarray | Iterable[np.ndarray]
    labels: np.ndarray
    class_names: list[str]
    scale: float = 255.0
    test_mask: np.ndarray | None = None

    def __post_init__(self) -> None:
        if not len(self.labels):
            raise DataError("The data set has no samples.")
        strange = np.flatnonzero((self.labels < 0) | (self.labels >= len(self.class_names)))
        if strange.size:
            label = self.labels[strange[0]]
            raise DataError(f"Sample {strange[0]} has label {label}, but there are {len(self.class_names)} classes.")
        if self.test_mask is not None and self.test_mask.shape != self.labels.shape:
            raise DataError(f"There are {self.labels.size} labels, but {self.test_mask.size} marks of the test split.")

    def blocks(self) -> Iterable[np.ndarray]:
        """The inputs, block by block: ``uint8[n, C, H, W]`` each."""
        return [self.inputs] if isinstance(self.inputs, np.ndarray) else self.inputs
