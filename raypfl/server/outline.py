"""What a run's models must know of its data, where the data themselves need not be."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property

import numpy as np

from raypfl.data import ClientData


class DataOutline:
    """Shapes, normalisation and sizes of federated data, whose samples are opened when a method asks for some.

    Attributes
    ----------
    input_shape, num_classes, kind, discrete, scale, mean, std, num_clients, unseen : as of
        :class:`raypfl.data.FederatedData`.

    Parameters
    ----------
    sizes : of each client's ``train`` and ``test`` split, ``int64[num_clients]`` each.
    data : opens the data.
    """

    def __init__(
        self,
        *,
        input_shape: tuple[int, ...],
        num_classes: int,
        kind: str,
        discrete: bool,
        scale: float,
        mean: np.ndarray,
        std: np.ndarray,
        unseen: np.ndarray,
        sizes: Mapping[str, np.ndarray],
        data: Callable[[], ClientData],
    ):
        self.input_shape, self.num_classes, self.kind = input_shape, num_classes, kind
        self.discrete = discrete
        self.scale, self.mean, self.std = scale, mean, std
        self.unseen = unseen
        self.num_clients = len(sizes["train"])
        self._sizes = sizes
        self._open = data

    @classmethod
    def of(cls, data: ClientData) -> DataOutline:
        """The outline of data that are open."""
        return cls(
            input_shape=data.input_shape,
            num_classes=data.num_classes,
            kind=data.kind,
            discrete=data.discrete,
            scale=data.scale,
            mean=data.mean,
            std=data.std,
            unseen=data.unseen,
            sizes={split: data.sizes(split) for split in ("train", "test")},
            data=lambda: data,
        )

    @cached_property
    def data(self) -> ClientData:
        """The data."""
        return self._open()

    def sizes(self, split: str = "train") -> np.ndarray:
        """The number of samples in each client's ``train`` or ``test`` split: ``int64[num_clients]``."""
        return self._sizes[split]

    def indices(self, client: int, split: str = "train") -> np.ndarray:
        """Numbers of a client's samples, ``int64[n]``."""
        return self.data.indices(client, split)

    def take(self, where: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and labels, ``[n, ...]`` each, of the samples that have these numbers."""
        return self.data.take(where)
