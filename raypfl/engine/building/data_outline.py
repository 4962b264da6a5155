"""What a run's models need to know of its data, without the samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from raypfl.data import ClientData


@dataclass(frozen=True, kw_only=True)
class DataOutline:
    """Shapes, normalisation and sizes of federated data; the data are opened when anything else is needed.

    Attributes
    ----------
    attributes : attributes of :class:`raypfl.data.FederatedData`, by name, for which the data need not be opened.
    counts : number of samples in each client's ``train`` and ``test`` split, ``int64[num_clients]`` each.
    """

    attributes: Mapping[str, Any] = field(default_factory=dict)
    counts: Mapping[str, np.ndarray]
    load: Callable[[], ClientData]

    @classmethod
    def of(cls, data: ClientData) -> DataOutline:
        """Return the outline of data that are open already."""
        counts = {"train": data.sizes("train"), "test": data.sizes("test")}
        return cls(counts=counts, load=lambda: data)

    @cached_property
    def data(self) -> ClientData:
        """The data themselves."""
        return self.load()

    @property
    def num_clients(self) -> int:
        """Number of clients."""
        return len(self.counts["train"])

    def sizes(self, split: str = "train") -> np.ndarray:
        """Return the number of samples in each client's ``train`` or ``test`` split: ``int64[num_clients]``."""
        return self.counts[split]

    def indices(self, client: int, split: str = "train") -> np.ndarray:
        """Return the numbers of a client's samples, ``int64[n]``."""
        return self.data.indices(client, split)

    def __getattr__(self, name: str) -> Any:
        # Copying and pickling look for special methods, for which no data should be opened.
        if name.startswith("__"):
            raise AttributeError(name)
        return self.attributes[name] if name in self.attributes else getattr(self.data, name)
