"""Clients that are described, not stored: their samples are made or read where and when a client works."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections import OrderedDict
from typing import Any, ClassVar

import numpy as np

from raypfl.common.errors import ConfigError, DataError, did_you_mean
from raypfl.data.datasets.raw_data import RawData, as_array
from raypfl.data.datasets.settings import SPLITS, DataConfig
from raypfl.data.datasets.source import DATASETS
from raypfl.learning.objectives import kind_of

CACHE_BYTES = 64 << 20
"""Bytes of samples that a process keeps, of the clients that it read last."""

_STORED = {"classes": np.int64, "labels": np.int8, "numbers": np.float32, "tokens": np.int64}
_PLACES = 32
# A sample's number packs its client's, its split's, and its place there into 64 bits.


class Population(ABC):
    """Any number of clients, each described by how many samples it has and a way to get them.

    Subclass it and name the class in the description as ``data: my_module:MyClients``; further arguments of its
    constructor are its options. Every process makes its own instance; `samples` must return the same arrays each time
    and everywhere. The class decides who holds what, so `partition` and the fractions in `data` have no effect.

    Parameters
    ----------
    config : the description's `data`, whose `root` may name the folder of its files.

    Attributes
    ----------
    describes_clients : tells a population from a data set that a partition divides.
    num_clients, num_classes : their numbers. If targets are labels or numbers: how many a sample has; if they are
        tokens: how many there are.
    input_shape : of a sample; of an image, (channels, height, width).
    kind : kind of the targets, ``classes``, ``labels``, ``numbers`` or ``tokens``; see
        :data:`raypfl.learning.objectives.KINDS`.
    discrete : whether inputs are tokens, ``int64``, which networks get unchanged.
    scale, mean, std : networks get ``(inputs / scale - mean) / std`` of other inputs.
    """

    describes_clients: ClassVar[bool] = True

    num_clients: int
    num_classes: int
    input_shape: tuple[int, ...]
    kind: str = "classes"
    discrete: bool = False
    scale: float = 1.0
    mean: float = 0.0
    std: float = 1.0

    def __init__(self, config: DataConfig):
        self.config = config

    @abstractmethod
    def sizes(self, split: str) -> np.ndarray:
        """The number of samples in each client's split ``train``, ``val`` or ``test``: ``int64[num_clients]``."""

    @abstractmethod
    def samples(self, client: int, split: str) -> tuple[np.ndarray, np.ndarray]:
        """One client's split: inputs ``[n, ...]``, uint8, float32, float64 or tokens, and targets of `kind`."""


class DescribedData:
    """A population with the interface of :class:`raypfl.data.FederatedData`; samples are fetched client by client.

    Its pickle holds the description alone. `pools` and `unseen` are empty.
    """

    def __init__(self, config: DataConfig):
        self.population: Population = DATASETS.get(config.name)(config, **config.options)
        for name in ("num_clients", "num_classes", "input_shape"):
            if not hasattr(self.population, name):
                raise ConfigError(f"The data set {config.name!r} is not complete: it must have {name}.")
        self.config = config
        self.name = config.name
        self.num_clients, self.num_classes = self.population.num_clients, self.population.num_classes
        self.input_shape = self.population.input_shape
        self.scale = self.population.scale
        self.kind, self.discrete = self.population.kind, self.population.discrete
        channels = self.input_shape[0] if len(self.input_shape) == 3 else 1
        self.mean = np.full(channels, self.population.mean, np.float32)
        self.std = np.full(channels, self.population.std, np.float32)
        self.pools: tuple[str, ...] = ()
        self.unseen = np.zeros(0, dtype=np.int64)
        self._sizes: dict[str, np.ndarray] = {}
        self._kept: OrderedDict[tuple[int, str], tuple[np.ndarray, np.ndarray]] = OrderedDict()
        self._bytes = 0

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the class's name and numbers and of all clients' sizes, the same on every machine."""
        parts = (self.name, self.num_clients, self.num_classes, self.input_shape, self.scale, self.mean, self.std)
        digest = hashlib.sha256(repr((*parts, self.kind, self.config.options)).encode())
        for split in SPLITS:
            digest.update(np.ascontiguousarray(self.sizes(split)).data)
        return digest.hexdigest()

    def sizes(self, split: str = "train") -> np.ndarray:
        """The number of samples in each client's split: ``int64[num_clients]``."""
        if split not in SPLITS:
            raise ConfigError(f"There is no split called {split!r}; {did_you_mean(split, SPLITS)}")
        if split not in self._sizes:
            sizes = np.asarray(self.population.sizes(split))
            if sizes.shape != (self.num_clients,) or sizes.dtype.kind not in "iu" or (sizes < 0).any():
                raise DataError(
                    f"{self.name}.sizes({split!r}) must be a whole number, 0 or more, for each of {self.num_clients} "
                    f"clients; it is {sizes.dtype}{list(sizes.shape)}."
                )
            self._sizes[split] = sizes
        return self._sizes[split]

    def pool(self, name: str) -> np.ndarray:
        """Raises a ConfigError, since a population has no pools."""
        raise ConfigError(f"There is no pool called {name!r}: the population {self.name} describes clients only.")

    def indices(self, client: int, split: str = "train") -> np.ndarray:
        """Numbers of a client's samples, ``int64[n]``, for `take`; nothing is fetched."""
        if not 0 <= client < self.num_clients:
            raise ConfigError(f"There is no client {client}; clients are numbered from 0 to {self.num_clients - 1}.")
        count = int(self.sizes(split)[client])
        return (len(SPLITS) * client + SPLITS.index(split) << _PLACES) + np.arange(count)

    def take(self, where: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and targets, ``[n, ...]`` each, of the samples that have these numbers."""
        owner, place = where >> _PLACES, where & ((1 << _PLACES) - 1)
        cuts = np.flatnonzero(np.diff(owner)) + 1
        runs = zip(np.split(owner, cuts), np.split(place, cuts), strict=True)
        parts = []
        for owners, places in runs:
            if len(owners):
                client, split = divmod(int(owners[0]), len(SPLITS))
                fetched, targets = self._samples(client, SPLITS[split])
                parts.append((fetched[places], targets[places]))
        if not parts:
            inputs = np.zeros((0, *self.input_shape), np.int64 if self.discrete else np.float32)
            return inputs, np.zeros((0, *[1] * (self.kind in ("labels", "tokens"))), _STORED[self.kind])
        return np.concatenate([inputs for inputs, _ in parts]), np.concatenate([targets for _, targets in parts])

    def _samples(self, client: int, split: str) -> tuple[np.ndarray, np.ndarray]:
        held = self._kept.pop((client, split), None)
        if held is None:
            held = self._fetched(client, split)
            self._bytes += held[0].nbytes + held[1].nbytes
        self._kept[client, split] = held
        while self._bytes > CACHE_BYTES and len(self._kept) > 1:
            _, (inputs, labels) = self._kept.popitem(last=False)
            self._bytes -= inputs.nbytes + labels.nbytes
        return held

    def _fetched(self, client: int, split: str) -> tuple[np.ndarray, np.ndarray]:
        given = self.population.samples(client, split)
        inputs, labels = (as_array(part, "samples") for part in given)
        count = int(self.sizes(split)[client])
        known = (np.int64,) if self.discrete else (np.uint8, np.float32, np.float64)
        if inputs.shape != (count, *self.input_shape) or inputs.dtype not in known:
            found, expected = f"{inputs.dtype}{list(inputs.shape)}", [count, *self.input_shape]
            types = " or ".join(np.dtype(one).name for one in known[:2])
            raise DataError(
                f"{self.name} returns inputs {found} for client {client}'s {split} split; by its sizes and "
                f"input_shape they must be {types} {expected}."
            )
        if labels.dtype.kind in "iu" and self.kind != "numbers":
            stored = labels.astype(_STORED[self.kind])
            labels = stored if np.array_equal(stored, labels) else labels
        self._check(labels, count, f"{split} split of client {client}")
        return inputs, labels

    def _check(self, targets: np.ndarray, count: int, where: str) -> None:
        kind = f"targets of kind {self.kind!r}"
        if targets.shape[:1] != (count,) or kind_of(targets) != self.kind:
            found = f"{targets.dtype}{list(targets.shape)}"
            raise DataError(f"{self.name} returns {found} for the {where}; it must return {count} {kind}.")
        try:
            if count:
                RawData(np.zeros((count, 1)), targets, [""] * self.num_classes)
        except DataError as error:
            raise DataError(f"{self.name} returns wrong targets for the {where}: {error}") from error

    def __repr__(self) -> str:
        shape, targets = "x".join(map(str, self.input_shape)), f"{self.num_classes} {self.kind}"
        return f"DescribedData({self.name}: {self.num_clients} clients, samples of {shape}, {targets})"

    def __reduce__(self) -> tuple[Any, ...]:
        return DescribedData, (self.config,)


def is_described(config: DataConfig) -> bool:
    """Whether the data set is a population, which needs no partition."""
    entry = DATASETS.get(config.name)
    return isinstance(entry, type) and issubclass(entry, Population)
