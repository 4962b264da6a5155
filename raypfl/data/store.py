"""Federated data: samples in a memory-mapped Arrow file, and a second file of which client holds which."""

from __future__ import annotations

import hashlib
import os
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from raypfl.common.errors import ConfigError, DataError, did_you_mean
from raypfl.data.arrow_file import Arrays, Unreadable, open_arrays, open_or_build
from raypfl.data.client_names import ClientNames, refuse_unknown_client
from raypfl.data.datasets.population import DescribedData, is_described
from raypfl.data.datasets.settings import SPLITS, DataConfig
from raypfl.data.partitions import Partition
from raypfl.data.prepare import holdings_key, prepare_holdings, prepare_samples, samples_key
from raypfl.data.shared_storage import copy_to_this_machine
from raypfl.learning.objectives import kind_of
from raypfl.learning.sample_pools import checked_pool


@dataclass(frozen=True, eq=False, repr=False)
class FederatedData:
    """Samples, and the clients that hold them: a read-only view of memory-mapped files.

    A pickle takes a few hundred bytes. Unpickling opens the same files without reading samples; on a machine that does
    not have them, it raises :class:`PreparedDataMissing`.

    Attributes
    ----------
    name : the data set's name.
    inputs : ``[N, ...]``, as in `RawData`; networks get ``(inputs / scale - mean) / std``, or tokens unchanged.
    labels : ``[N]`` or ``[N, ...]``, as in `RawData`; -1, or NaN, for samples of a pool that has other classes.
    class_names : a name for each class, label, number or token.
    scale : the value of a full pixel.
    mean, std : ``float32[C]``, mean and standard deviation of ``inputs / scale`` over the training samples of all
        clients but the unseen; by channel of images, else by the last axis.
    num_clients : number of clients, which are numbered from 0.
    unseen : ``int64[U]``, the clients that are never trained, ascending.
    pools : names of the pools, whose samples belong to no client, e.g. ``auxiliary``.
    pool_moments : name -> (mean, std), as above, for each pool with ``normalise: own``.
    feature_names, indicators, vocabulary : as in `RawData`.
    fingerprint : SHA-256 of the samples and of who holds them, the same on every machine.
    """

    name: str
    inputs: np.ndarray
    labels: np.ndarray
    class_names: list[str]
    scale: float
    mean: np.ndarray
    std: np.ndarray
    num_clients: int
    unseen: np.ndarray
    pools: tuple[str, ...]
    pool_moments: dict[str, tuple[np.ndarray, np.ndarray]]
    feature_names: list[str] | None
    indicators: list[bool] | None
    vocabulary: list[str] | None
    fingerprint: str
    _splits: dict[str, tuple[np.ndarray, np.ndarray]]
    _pools: dict[str, np.ndarray]
    _samples: Arrays
    _origin: _Origin

    @cached_property
    def client_names(self) -> ClientNames | None:
        """The clients' names, if the partition divides samples by groups; None: clients have numbers only."""
        columns = self._samples.columns
        if not self._origin.by_group or "group" not in columns:
            return None

        splits = list(SPLITS)
        if self._origin.data.split == "auto" and columns["published_test"].any():
            # The partition does not divide these. Those of a group without training samples go to any client.
            splits.remove("test")
        samples = np.concatenate([self._splits[split][1] for split in splits])
        clients = np.concatenate([np.repeat(np.arange(self.num_clients), self.sizes(split)) for split in splits])
        return ClientNames.of_groups(clients, columns["group"][samples], self._samples.about["group_names"])

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    @property
    def kind(self) -> str:
        """The kind of the targets, one of :data:`raypfl.learning.objectives.KINDS`."""
        return kind_of(self.labels)

    @property
    def discrete(self) -> bool:
        """Whether inputs are tokens."""
        return self.inputs.dtype == np.int64

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of a sample; of an image, (channels, height, width)."""
        return tuple(self.inputs.shape[1:])

    def indices(self, client: int, split: str = "train") -> np.ndarray:
        """Return the ascending indices ``int64[n]`` of a split's samples in `inputs` and `labels`; there may be none.

        Raises
        ------
        ConfigError : if there is no such client or split.
        """
        refuse_unknown_client(client, self.num_clients)
        offsets, samples = self._split(split)
        return samples[offsets[client] : offsets[client + 1]]

    def pool(self, name: str) -> np.ndarray:
        """Return the samples of a pool: ascending indices ``int64[M]`` into `inputs` and `labels`.

        Raises
        ------
        ConfigError : if there is no such pool.
        """
        return self._pools[checked_pool(name, self._pools)]

    def take(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return inputs and labels, ``[n, ...]`` each, of the samples ``indices[n]``."""
        return self.inputs[indices], self.labels[indices]

    def sizes(self, split: str = "train") -> np.ndarray:
        """Return the number of samples in each client's split: ``int64[num_clients]``."""
        offsets, _ = self._split(split)
        return np.diff(offsets)

    def label_counts(self, split: str = "train") -> np.ndarray:
        """Return the number of samples of each class in each client's split: ``int64[num_clients, num_classes]``.

        If samples have several labels, this is how often each label is 1.

        Raises
        ------
        ConfigError : if targets are numbers or tokens.
        """
        if self.kind not in ("classes", "labels"):
            raise ConfigError(f"The targets of {self.name!r} are {self.kind}, so there are no classes to count.")

        offsets, samples = self._split(split)
        if self.kind == "labels":
            totals = np.cumsum(self.labels[samples], axis=0, dtype=np.int64)
            totals_before = np.concatenate([np.zeros((1, self.num_classes), np.int64), totals])
            return np.diff(totals_before[offsets], axis=0)

        client = np.repeat(np.arange(self.num_clients), self.sizes(split))
        cell = client * self.num_classes + self.labels[samples]
        counts = np.bincount(cell, minlength=self.num_clients * self.num_classes)
        return counts.reshape(self.num_clients, self.num_classes)

    def _split(self, split: str) -> tuple[np.ndarray, np.ndarray]:
        """Return offsets and samples: those of client k are ``samples[offsets[k] : offsets[k + 1]]``."""
        if split not in self._splits:
            raise ConfigError(f"There is no split called {split!r}; {did_you_mean(split, self._splits)}")
        return self._splits[split]

    def __repr__(self) -> str:
        shape = "x".join(map(str, self.input_shape))
        return (
            f"FederatedData({self.name}: {len(self.labels)} samples of {shape}, {self.num_classes} {self.kind}, "
            f"{self.num_clients} clients)"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self._origin, self.fingerprint)


class _Origin(NamedTuple):
    """The files that federated data are views of.

    Attributes
    ----------
    data : the description of the data set.
    files : the samples' file and the holdings' file, by their names in a cache.
    cache : the cache that they were prepared in.
    by_group : whether the partition divides samples by groups.
    """

    data: DataConfig
    files: tuple[str, str]
    cache: Path
    by_group: bool


class PreparedDataMissing(DataError):
    """Error for federated data unpickled on a machine that does not have their files.

    Attributes
    ----------
    files : for each file, its path on the machine that prepared it, and the path that it belongs at on this one.
    """

    def __init__(self, files: Sequence[tuple[Path, Path]]):
        super().__init__(f"This machine does not have the prepared data {files[0][0].parent}.", tuple(files))
        self.files = files


ClientData = FederatedData | DescribedData
"""The clients' data, stored or described."""


def load_federated(data: DataConfig, partition: Partition, *, seed: int, cache: str | Path | None = None) -> ClientData:
    """Open a data set, divided over clients by the partition; both are prepared once and kept in the cache.

    A :class:`raypfl.data.datasets.Population` is neither divided nor kept in the cache.

    Samples are prepared again when a file of the data set, an option of its reader or the reader's code changes. The
    partition is prepared again when its code, its options, those of the splits, or `seed` changes. If several processes
    find nothing prepared, one prepares it and the others wait.

    Parameters
    ----------
    cache : folder of the prepared data; None: ``data.cache``.

    Raises
    ------
    ConfigError : if the data set does not exist or the partition does not fit it.
    DataError : if the data set's files are missing, damaged or not as expected.
    """
    if is_described(data):
        return DescribedData(data)

    folder = cache_folder(data, cache)
    data = copy_to_this_machine(data, folder)

    name = f"{re.sub('[^A-Za-z0-9_-]', '-', data.name)}-{samples_key(data, folder)}"
    samples_file = f"{name}/samples.arrow"
    samples = open_or_build(folder / samples_file, lambda: prepare_samples(data, folder / name))

    # The digest of the samples is part of the key, so that holdings never refer to other samples.
    holdings_file = f"{name}/partitions/{holdings_key(samples.digest, data, partition, seed)}.arrow"
    holdings = open_or_build(folder / holdings_file, lambda: prepare_holdings(samples, data, partition, seed))

    origin = _Origin(data, (samples_file, holdings_file), folder, partition.by_group)
    federated_data = _join(samples, holdings, origin)
    for sentence in _warnings(data, federated_data, bool(samples.columns["published_test"].any())):
        warnings.warn(sentence, stacklevel=2)
    return federated_data


def _warnings(data: DataConfig, federated_data: FederatedData, has_published_test: bool) -> Iterator[str]:
    """Yield a sentence for everything in these samples, and in what divided them, that may not be meant."""
    if data.test_fraction and not federated_data.sizes("test").any():
        yield (
            f"No client of {data.name!r} has a test sample: a client needs two samples for one. Evaluation on the "
            f"clients' own samples will be empty; set partition.clients below {federated_data.num_clients}."
        )
    labels = federated_data.labels
    if federated_data.kind == "classes" and labels.min() == labels.max():
        class_name = federated_data.class_names[int(labels[0])]
        yield f"All samples of {data.name!r} have the class {class_name!r}: there is nothing to learn."
    if has_published_test and data.split == "auto" and data.test_fraction != DataConfig.test_fraction:
        yield (
            f"data.test_fraction is {data.test_fraction}, but has no effect, since {data.name!r} has a published test "
            "split. data.split=merged divides all samples anew."
        )
    if data.rare != DataConfig.rare and federated_data.kind != "labels":
        yield f"data.rare is {data.rare}, but has no effect, since samples of {data.name!r} have one label each."


def _reopen(origin: _Origin, fingerprint: str) -> FederatedData:
    """Open what another process prepared and checked: in its cache, which may be shared, or in this machine's."""
    local_cache = cache_folder(origin.data)
    for cache in dict.fromkeys((origin.cache, local_cache)):
        with suppress(Unreadable):
            samples, holdings = (open_arrays(cache / file, check=False) for file in origin.files)
            data = _join(samples, holdings, origin)
            if data.fingerprint == fingerprint:
                return data
    raise PreparedDataMissing([(origin.cache / file, local_cache / file) for file in origin.files])


def _join(samples: Arrays, holdings: Arrays, origin: _Origin) -> FederatedData:
    """Join the samples and their holdings, whose rows are sorted by split, then by client."""
    split = holdings.columns["split"]
    client = holdings.columns["client"]
    sample = holdings.columns["sample"]

    split_names = holdings.about["splits"]
    bounds = np.searchsorted(split, np.arange(len(split_names) + 1))
    rows = {name: slice(bounds[code], bounds[code + 1]) for code, name in enumerate(split_names)}

    num_clients = holdings.about["clients"]
    clients = np.arange(num_clients + 1)
    splits = {name: (np.searchsorted(client[rows[name]], clients), sample[rows[name]]) for name in SPLITS}
    pool_names = tuple(split_names[len(SPLITS) :])
    pools = {name: sample[rows[name]] for name in pool_names}

    pool_moments = {}
    for name, (mean, std) in holdings.about.get("pool_moments", {}).items():
        pool_moments[name] = (np.array(mean, dtype=np.float32), np.array(std, dtype=np.float32))

    return FederatedData(
        name=origin.data.name,
        inputs=samples.columns["input"],
        labels=samples.columns["label"],
        class_names=samples.about["class_names"],
        scale=samples.about["scale"],
        mean=np.array(holdings.about["mean"], dtype=np.float32),
        std=np.array(holdings.about["std"], dtype=np.float32),
        num_clients=num_clients,
        unseen=np.array(holdings.about["unseen"], dtype=np.int64),
        pools=pool_names,
        pool_moments=pool_moments,
        feature_names=samples.about.get("feature_names"),
        indicators=samples.about.get("indicators"),
        vocabulary=samples.about.get("vocabulary"),
        fingerprint=hashlib.sha256((samples.digest + holdings.digest).encode()).hexdigest(),
        _splits=splits,
        _pools=pools,
        _samples=samples,
        _origin=origin,
    )


def cache_folder(data: DataConfig, cache: str | Path | None = None) -> Path:
    """Return the folder of prepared data, and of other results that a machine needs to compute only once."""
    folder = cache or data.cache or os.environ.get("RAYPFL_CACHE") or "~/.cache/raypfl"
    return Path(folder).expanduser().absolute()
