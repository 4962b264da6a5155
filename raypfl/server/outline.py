"""What a run's models need to know of its data, without the samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from raypfl.data import ClientData

_SHARED = ("input_shape", "num_classes", "kind", "discrete", "scale", "mean", "std", "unseen")


@dataclass(frozen=True, kw_only=True)
class DataOutline:
    """Shapes, normalisation and sizes of federated data, whose samples are opened when a method asks for some.

    Attributes
    ----------
    input_shape, num_classes, kind, discrete, scale, mean, std, unseen : as of :class:`raypfl.data.FederatedData`.
    counts : samples in each client's ``train`` and ``test`` split, ``int64[num_clients]`` each.
    load : opens the data.
    """

    input_shape: tuple[int, ...]
    num_classes: int
    kind: str
    discrete: bool
    scale: float
    mean: np.ndarray
    std: np.ndarray
    unseen: np.ndarray
    counts: Mapping[str, np.ndarray]
    load: Callable[[], ClientData]

    @classmethod
    def of(cls, data: ClientData) -> DataOutline:
        """The outline of data that are open."""
        counts = {split: data.sizes(split) for split in ("train", "test")}
        return cls(**{name: getattr(data, name) for name in _SHARED}, counts=counts, load=lambda: data)

    @cached_property
    def data(self) -> ClientData:
        return self.load()

    @property
    def num_clients(self) -> int:
        return len(self.counts["train"])

    def sizes(self, split: str = "train") -> np.ndarray:
        """The number of samples in each client's ``train`` or ``test`` split: ``int64[num_clients]``."""
        return self.counts[split]

    def indices(self, client: int, split: str = "train") -> np.ndarray:
        """Numbers of a client's samples, ``int64[n]``."""
        return self.data.indices(client, split)

    def take(self, where: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and labels, ``[n, ...]`` each, of the samples with these numbers."""
        return self.data.take(where)
