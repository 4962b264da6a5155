"""Federated data: samples in a memory-mapped Arrow file, and a second one that says who holds which."""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from raypfl.data.arrays import Arrays, Unreadable, cached, opened, writing
from raypfl.data.datasets import DATASETS, DataConfig, RawData
from raypfl.data.partitions import PARTITIONS, Partition
from raypfl.data.population import DescribedData, is_described
from raypfl.data.splits import NOBODY, POOLS, SPLITS, hold
from raypfl.errors import ConfigError, DataError, did_you_mean

# To be raised when what is written changes in a way that the code of readers and partitions does not show.
_FORMAT = 1
# Samples read at a time where all are passed over.
_BLOCK = 4096


@dataclass(frozen=True, eq=False, repr=False)
class FederatedData:
    """Samples, and the clients that hold them: a read-only view of memory-mapped files.

    Pickled, it is a few hundred bytes, and unpickling opens the same files, which reads no sample; on a machine that
    does not have them it prepares them there.

    Attributes
    ----------
    name : of the data set.
    inputs : ``uint8[N, C, H, W]``; a network sees ``(inputs / scale - mean[c]) / std[c]``.
    labels : ``int64[N]``
    class_names : one a class.
    scale : the value of a full pixel.
    mean, std : ``float32[C]``, of ``inputs / scale`` over all clients' training samples.
    num_clients : clients are numbered from 0.
    pools : name -> ``int64[M]``, samples that belong to no client, e.g. ``auxiliary``.
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
    pools: dict[str, np.ndarray]
    fingerprint: str
    _splits: dict[str, _Rows]
    _origin: _Origin

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """(channels, height, width) of a sample."""
        _, channels, height, width = self.inputs.shape
        return channels, height, width

    def indices(self, client: int, split: str = "train") -> np.ndarray:
        """The samples of a client's split: ascending indices ``int64[n]`` into `inputs` and `labels`; empty if none.

        Raises
        ------
        ConfigError : if there is no such client or split.
        """
        if not 0 <= client < self.num_clients:
            raise ConfigError(f"There is no client {client}; clients are numbered from 0 to {self.num_clients - 1}.")
        rows = self._rows(split)
        return rows.samples[rows.offsets[client] : rows.offsets[client + 1]]

    def sizes(self, split: str = "train") -> np.ndarray:
        """The number of samples in each client's split: ``int64[num_clients]``."""
        return np.diff(self._rows(split).offsets)

    def label_counts(self, split: str = "train") -> np.ndarray:
        """The number of samples of each class in each client's split: ``int64[num_clients, num_classes]``."""
        client = np.repeat(np.arange(self.num_clients), self.sizes(split))
        cell = client * self.num_classes + self.labels[self._rows(split).samples]
        counts = np.bincount(cell, minlength=self.num_clients * self.num_classes)
        return counts.reshape(self.num_clients, self.num_classes)

    def _rows(self, split: str) -> _Rows:
        if split not in self._splits:
            raise ConfigError(f"There is no split called {split!r}; {did_you_mean(split, self._splits)}")
        return self._splits[split]

    def __repr__(self) -> str:
        shape = "x".join(map(str, self.input_shape))
        return (
            f"FederatedData({self.name}: {len(self.labels)} samples of {shape}, {self.num_classes} classes, "
            f"{self.num_clients} clients)"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopened, (self._origin, self.fingerprint)


class _Rows(NamedTuple):
    """One split of all clients, in compressed sparse rows: client k's samples are ``offsets[k]:offsets[k + 1]``."""

    offsets: np.ndarray
    samples: np.ndarray


class _Origin(NamedTuple):
    """Where federated data lies, and how it is made if it does not."""

    samples: Path
    holdings: Path
    data: DataConfig
    partition: Partition
    seed: int
    cache: str | Path | None


ClientData = FederatedData | DescribedData
"""What each client holds, stored or described; the engine asks for it by client and split."""


def load_federated(data: DataConfig, partition: Partition, *, seed: int, cache: str | Path | None = None) -> ClientData:
    """Open a data set and deal it out to clients; both are prepared once and kept in the cache.

    A population, whose clients are described, is neither dealt out nor kept; see :class:`raypfl.data.Population`.

    The samples are prepared again when a file of the data set (its size or time of change) or its reader changes, the
    partition when an option of it or of the splits, `seed`, or its code does. Several processes may do so at once.

    Parameters
    ----------
    cache : folder of the prepared data; None: as `data` says.

    Raises
    ------
    ConfigError : if the data set does not exist or the partition asks what it cannot give.
    DataError : if the data set's files are missing, damaged or odd.
    """
    if is_described(data):
        return DescribedData(data)
    folder = cache_folder(data, cache) / f"{re.sub('[^A-Za-z0-9_-]', '-', data.name)}-{_samples_key(data)}"
    samples = cached(folder / "samples.arrow", lambda: _prepared_samples(data, folder))
    path = folder / "partitions" / f"{_holdings_key(samples.digest, data, partition, seed)}.arrow"
    holdings = cached(path, lambda: _prepared_holdings(samples, data, partition, seed))
    return _joined(samples, holdings, _Origin(folder / "samples.arrow", path, data, partition, seed, cache))


def _reopened(origin: _Origin, fingerprint: str) -> ClientData:
    """Open what another process has prepared and checked, or prepare it here."""
    opened_again: ClientData
    try:
        opened_again = _joined(opened(origin.samples, check=False), opened(origin.holdings, check=False), origin)
    except Unreadable:
        opened_again = load_federated(origin.data, origin.partition, seed=origin.seed, cache=origin.cache)
    if opened_again.fingerprint != fingerprint:
        raise DataError(
            f"The data set {origin.data.name!r} on this machine is not the one that the run was started with; "
            f"give all machines the same files in data.root."
        )
    return opened_again


def _joined(samples: Arrays, holdings: Arrays, origin: _Origin) -> FederatedData:
    split, client, sample = (holdings.columns[name] for name in ("split", "client", "sample"))
    num_clients = holdings.about["clients"]
    ends = np.searchsorted(split, np.arange(len(SPLITS + POOLS) + 1))
    spans = {name: slice(ends[code], ends[code + 1]) for code, name in enumerate(SPLITS + POOLS)}
    steps = np.arange(num_clients + 1)
    return FederatedData(
        name=origin.data.name,
        inputs=samples.columns["input"],
        labels=samples.columns["label"],
        class_names=samples.about["class_names"],
        scale=samples.about["scale"],
        mean=np.array(holdings.about["mean"], dtype=np.float32),
        std=np.array(holdings.about["std"], dtype=np.float32),
        num_clients=num_clients,
        pools={name: sample[spans[name]] for name in POOLS},
        fingerprint=hashlib.sha256((samples.digest + holdings.digest).encode()).hexdigest(),
        _splits={name: _Rows(np.searchsorted(client[spans[name]], steps), sample[spans[name]]) for name in SPLITS},
        _origin=origin,
    )


def _prepared_samples(data: DataConfig, folder: Path) -> tuple[Mapping[str, Any], dict[str, Any]]:
    raw: RawData = DATASETS.get(data.name)(data)
    test = np.zeros(len(raw.labels), np.int8) if raw.test_mask is None else raw.test_mask.astype(np.int8)
    columns = {"input": _spooled(raw, folder), "label": raw.labels.astype(np.int64), "published_test": test}
    return columns, {"class_names": raw.class_names, "scale": raw.scale}


def _spooled(raw: RawData, folder: Path) -> np.ndarray:
    """All inputs in one piece, in a memory-mapped file without a name, so that memory holds one block at a time.

    Images that are grey throughout come out with one channel, whatever they were encoded as: WebP knows no grey.
    """
    shape: tuple[int, ...] = ()
    count, grey = 0, True
    with writing(folder):
        spool = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - closed below
    with spool:
        for block in raw.blocks():
            if block.dtype != np.uint8 or block.ndim != 4:
                found = f"{block.dtype}{list(block.shape)}"
                raise DataError(f"The data set's reader gives inputs as {found}, not as uint8[n, C, H, W].")
            shape, count = block.shape[1:], count + len(block)
            grey = grey and bool((block == block[:, :1]).all())
            with writing(folder):
                np.ascontiguousarray(block).tofile(spool)
        if count != len(raw.labels):
            raise DataError(f"There are {count} images, but {len(raw.labels)} labels.")
        inputs = np.memmap(spool, np.uint8, mode="r", shape=(count, *shape))
    return np.ascontiguousarray(inputs[:, :1] if grey else inputs)


def _prepared_holdings(
    samples: Arrays, data: DataConfig, partition: Partition, seed: int
) -> tuple[Mapping[str, Any], dict[str, Any]]:
    published_test = samples.columns["published_test"].astype(bool)
    num_classes = len(samples.about["class_names"])
    try:
        held = hold(samples.columns["label"], num_classes, published_test, data, partition, seed)
    except ConfigError as error:
        raise ConfigError(f"The data set {data.name!r} cannot be dealt out: {error}") from error
    order = np.lexsort((held.client, held.split))
    trained_on = np.flatnonzero(held.split == SPLITS.index("train"))
    mean, std = _moments(samples.columns["input"], trained_on, samples.about["scale"])
    split = pa.DictionaryArray.from_arrays(held.split[order], pa.array(SPLITS + POOLS))
    columns = {"client": held.client[order], "split": split, "sample": order.astype(np.int64)}
    return columns, {"clients": partition.clients, "nobody": NOBODY, "mean": mean.tolist(), "std": std.tolist()}


def _moments(inputs: np.ndarray, chosen: np.ndarray, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of ``inputs / scale`` by channel, ``float64[C]`` each; the latter 1 if it would be 0.

    Sums are of integers, hence exact, whatever the size of the blocks.
    """
    total, squares = np.zeros((2, inputs.shape[1]), dtype=np.int64)
    for start in range(0, len(chosen), _BLOCK):
        block = inputs[chosen[start : start + _BLOCK]]
        total += block.sum(axis=(0, 2, 3), dtype=np.int64)
        squares += np.einsum("nchw,nchw->c", block, block, dtype=np.int64)
    count = len(chosen) * inputs[0, 0].size
    # count² variance, in Python's integers, which neither round nor overflow
    spread = [count * int(q) - int(t) ** 2 for q, t in zip(squares, total, strict=True)]
    std = np.array([math.sqrt(s) / count / scale if s else 1.0 for s in spread])
    return total / count / scale, std


def cache_folder(data: DataConfig, cache: str | Path | None = None) -> Path:
    """Where prepared data, and what else a machine need find out but once, is kept."""
    return Path(cache or data.cache or os.environ.get("RAYPFL_CACHE") or "~/.cache/raypfl").expanduser().absolute()


def _samples_key(data: DataConfig) -> str:
    """What the prepared samples depend on: the reader, its options, and the state of the files under data.root."""
    root = Path(data.root).expanduser() if data.root else None
    files = sorted(path for path in root.rglob("*") if path.is_file()) if root else []
    states = [(str(path.relative_to(root)), *_size_and_time(path)) for path in files]  # type: ignore[arg-type]
    return _key(_FORMAT, data.image, data.label, _code(DATASETS.get(data.name)), states)


def _holdings_key(samples: str, data: DataConfig, partition: Partition, seed: int) -> str:
    held_out = (data.test_fraction, data.val_fraction, data.auxiliary_fraction, data.split)
    name = PARTITIONS.name_of(type(partition))
    return _key(_FORMAT, samples, seed, held_out, name, asdict(partition), _code(type(partition)))


def _size_and_time(path: Path) -> tuple[int, int]:
    state = path.stat()
    return state.st_size, state.st_mtime_ns


def _code(component: Any) -> str:
    """The file that a reader or partition is written in, so that a change of it is not answered from the cache."""
    try:
        return hashlib.sha256(Path(inspect.getfile(component)).read_bytes()).hexdigest()
    except (TypeError, OSError):
        return os.urandom(16).hex()  # typed into a console: no telling whether it has changed


def _key(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]
