"""Clients that are described, not stored: their samples are generated or read when a client works, where it works."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from raypfl.common.errors import ConfigError, DataError, did_you_mean
from raypfl.data.client_names import ClientNames, refuse_unknown_client
from raypfl.data.datasets.raw_data import RawData, as_array
from raypfl.data.datasets.settings import SPLITS, DataConfig
from raypfl.data.datasets.source import DATASETS
from raypfl.learning.objectives import kind_of

CACHE_BYTES = 64 << 20
"""Most bytes of samples that a process keeps, of the clients that it read last."""

_TARGET_TYPES = {"classes": np.int64, "labels": np.int8, "numbers": np.float32, "tokens": np.int64}
# A sample's number has 64 bits: its row within its client's split in the lower 32, client and split in the upper.
_ROW_BITS = 32


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
    describes_clients : True, which distinguishes a population from a data set that a partition divides.
    num_clients : number of clients.
    num_classes : number of classes or, if targets are tokens, of tokens; if they are labels or numbers, how many of
        them a sample has.
    input_shape : shape of a sample; of an image, (channels, height, width).
    kind : kind of the targets, ``classes``, ``labels``, ``numbers`` or ``tokens``; see
        :data:`raypfl.learning.objectives.KINDS`.
    discrete : whether inputs are tokens, ``int64``, which networks get unchanged.
    scale, mean, std : networks get ``(inputs / scale - mean) / std`` of other inputs.
    client_names : a name for each client; None: clients have numbers only.
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
    client_names: Sequence[str] | None = None

    def __init__(self, config: DataConfig):
        self.config = config

    @abstractmethod
    def sizes(self, split: str) -> np.ndarray:
        """Return how many samples each client has in a split (``train``, ``val``, ``test``): ``int64[num_clients]``."""

    @abstractmethod
    def samples(self, client: int, split: str) -> tuple[np.ndarray, np.ndarray]:
        """Return a client's split: inputs ``[n, ...]``, uint8, float32, float64 or tokens, and targets of `kind`."""


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
        self.num_clients = self.population.num_clients
        self.num_classes = self.population.num_classes
        self.input_shape = self.population.input_shape
        self.scale = self.population.scale
        self.kind = self.population.kind
        self.discrete = self.population.discrete

        channels = self.input_shape[0] if len(self.input_shape) == 3 else 1
        self.mean = np.full(channels, self.population.mean, np.float32)
        self.std = np.full(channels, self.population.std, np.float32)
        self.pools: tuple[str, ...] = ()
        self.unseen = np.zeros(0, dtype=np.int64)

        names = self.population.client_names
        if names is not None and len(names) != self.num_clients:
            raise DataError(
                f"{config.name}.client_names must be a name for each of {self.num_clients} clients, but has "
                f"{len(names)}."
            )

        self._sizes: dict[str, np.ndarray] = {}
        # The client that was read last is last in the cache.
        self._cache: OrderedDict[tuple[int, str], tuple[np.ndarray, np.ndarray]] = OrderedDict()
        self._cached_bytes = 0

    @cached_property
    def client_names(self) -> ClientNames | None:
        """The names that the population gives its clients; None: clients have numbers only."""
        names = self.population.client_names
        if names is None:
            return None
        return ClientNames(np.arange(self.num_clients), [str(name) for name in names])

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the class's name and numbers and of all clients' sizes, the same on every machine."""
        description = (
            self.name,
            self.num_clients,
            self.num_classes,
            self.input_shape,
            self.scale,
            self.mean,
            self.std,
            self.kind,
            self.config.options,
        )
        digest = hashlib.sha256(repr(description).encode())
        for split in SPLITS:
            digest.update(np.ascontiguousarray(self.sizes(split)).data)
        return digest.hexdigest()

    def sizes(self, split: str = "train") -> np.ndarray:
        """Return the number of samples in each client's split: ``int64[num_clients]``."""
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
        """Raise a ConfigError, since a population has no pools."""
        raise ConfigError(f"There is no pool called {name!r}: the population {self.name} describes clients only.")

    def indices(self, client: int, split: str = "train") -> np.ndarray:
        """Return the numbers of a client's samples, ``int64[n]``, for `take`; nothing is fetched."""
        refuse_unknown_client(client, self.num_clients)
        rows = np.arange(int(self.sizes(split)[client]))
        client_and_split = len(SPLITS) * client + SPLITS.index(split)
        return (client_and_split << _ROW_BITS) + rows

    def take(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return inputs and targets, ``[n, ...]`` each, of the samples ``indices[n]``."""
        if not len(indices):
            return self._no_samples()

        owners = indices >> _ROW_BITS
        rows = indices & ((1 << _ROW_BITS) - 1)

        # Samples of one client and split that follow each other are taken together.
        starts = np.flatnonzero(np.diff(owners)) + 1
        inputs = []
        targets = []
        for part_owners, part_rows in zip(np.split(owners, starts), np.split(rows, starts), strict=True):
            client, split = divmod(int(part_owners[0]), len(SPLITS))
            client_inputs, client_targets = self._samples(client, SPLITS[split])
            inputs.append(client_inputs[part_rows])
            targets.append(client_targets[part_rows])
        return np.concatenate(inputs), np.concatenate(targets)

    def _no_samples(self) -> tuple[np.ndarray, np.ndarray]:
        inputs = np.zeros((0, *self.input_shape), np.int64 if self.discrete else np.float32)
        shape = (0, 1) if self.kind in ("labels", "tokens") else (0,)
        return inputs, np.zeros(shape, _TARGET_TYPES[self.kind])

    def _samples(self, client: int, split: str) -> tuple[np.ndarray, np.ndarray]:
        """Return a client's split, from the cache if it is there."""
        samples = self._cache.pop((client, split), None)
        if samples is None:
            samples = self._fetch(client, split)
            self._cached_bytes += sum(part.nbytes for part in samples)

        self._cache[client, split] = samples
        while self._cached_bytes > CACHE_BYTES and len(self._cache) > 1:
            _, oldest = self._cache.popitem(last=False)
            self._cached_bytes -= sum(part.nbytes for part in oldest)
        return samples

    def _fetch(self, client: int, split: str) -> tuple[np.ndarray, np.ndarray]:
        """Get a client's split from the population, and check it."""
        inputs, targets = (as_array(part, "samples") for part in self.population.samples(client, split))
        count = int(self.sizes(split)[client])

        types = (np.int64,) if self.discrete else (np.uint8, np.float32, np.float64)
        if inputs.shape != (count, *self.input_shape) or inputs.dtype not in types:
            expected_types = " or ".join(np.dtype(dtype).name for dtype in types[:2])
            raise DataError(
                f"{self.name} returns inputs {inputs.dtype}{list(inputs.shape)} for client {client}'s {split} split; "
                f"by its sizes and input_shape they must be {expected_types} {[count, *self.input_shape]}."
            )

        if targets.dtype.kind in "iu" and self.kind != "numbers":
            converted = targets.astype(_TARGET_TYPES[self.kind])
            # Values that the type cannot hold are left as they are, and refused below.
            if np.array_equal(converted, targets):
                targets = converted
        self._check_targets(targets, count, f"{split} split of client {client}")
        return inputs, targets

    def _check_targets(self, targets: np.ndarray, count: int, place: str) -> None:
        if targets.shape[:1] != (count,) or kind_of(targets) != self.kind:
            raise DataError(
                f"{self.name} returns {targets.dtype}{list(targets.shape)} for the {place}; it must return {count} "
                f"targets of kind {self.kind!r}."
            )
        try:
            if count:
                RawData(np.zeros((count, 1)), targets, [""] * self.num_classes)
        except DataError as error:
            raise DataError(f"{self.name} returns wrong targets for the {place}: {error}") from error

    def __repr__(self) -> str:
        shape = "x".join(map(str, self.input_shape))
        return (
            f"DescribedData({self.name}: {self.num_clients} clients, samples of {shape}, "
            f"{self.num_classes} {self.kind})"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return DescribedData, (self.config,)


def is_described(config: DataConfig) -> bool:
    """Return whether the data set is a population, which needs no partition."""
    entry = DATASETS.get(config.name)
    return isinstance(entry, type) and issubclass(entry, Population)
