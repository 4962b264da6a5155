"""Partitions given with the data: by domain or writer, or by a file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from raypfl.common import rng
from raypfl.common.errors import ConfigError, DataError
from raypfl.data.allocation import apportion, rank_within
from raypfl.data.partitions import PARTITIONS, Partition, Traits, require


@PARTITIONS.register("by_column")
@dataclass(frozen=True, kw_only=True)
class ByColumn(Partition):
    """By the groups of the data set: one client for each domain, writer or hospital.

    Clients are numbered in the order of the groups' names. A published test split is divided within each group.

    Attributes
    ----------
    clients : 0: one for each group. More: samples of a group are divided at random over several clients, in equal
        numbers. Fewer: groups are merged at random.
    """

    least: ClassVar = {"clients": 0}

    clients: int = 0

    def count(self, samples: Traits) -> int:
        return self.clients or len(np.unique(self._groups(samples)))

    def alike(self, samples: Traits) -> tuple[np.ndarray, int]:
        return self._groups(samples), len(samples.group_names)

    def owners(self, samples: Traits, seed: int) -> np.ndarray:
        present, value = np.unique(self._groups(samples), return_inverse=True)
        draws = rng.generator(seed, "partition")
        if self.count(samples) <= len(present):
            client_of = np.arange(len(present))
            if self.count(samples) < len(present):
                client_of = draws.permutation(len(present)) % self.clients
            return client_of[value]
        several = 1 + apportion(self.clients - len(present), np.bincount(value))
        first = np.cumsum(several) - several
        return first[value] + rank_within(value, draws) % several[value]

    @staticmethod
    def _groups(samples: Traits) -> np.ndarray:
        if samples.groups is None:
            raise ConfigError(
                "partition is 'by_column', but the data set has no groups; name a column in data.group or, for folders "
                "of images, a level in data.layout, as in 'group/class'."
            )
        return samples.groups


@PARTITIONS.register("from_file")
@dataclass(frozen=True, kw_only=True)
class FromFile(Partition):
    """From a file that names, for each sample of the data set, counted from 0, the client that holds it.

    Parquet: columns ``sample`` and ``client``, of integers. JSON: a list, with a client for each sample; or an object,
    with a list of samples for each client. Its entries for published test samples are ignored: these are divided as
    for any partition.

    Attributes
    ----------
    file : the file's path.
    clients : 0: as many as the file names.
    """

    least: ClassVar = {"clients": 0}

    clients: int = 0
    file: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        require("file", repr(self.file), bool(self.file), "the path of a Parquet or JSON file")

    def files(self) -> tuple[Path, ...]:
        return (Path(self.file).expanduser(),)

    def count(self, samples: Traits) -> int:
        return self.clients or int(self._client_of(samples).max()) + 1

    def owners(self, samples: Traits, seed: int) -> np.ndarray:
        return self._client_of(samples)

    def _client_of(self, samples: Traits) -> np.ndarray:
        (path,) = self.files()
        if not path.is_file():
            raise ConfigError(f"partition.file is {self.file!r}, but there is no such file.")
        sample, client = _parquet(path) if path.suffix == ".parquet" else _json(path)
        rows = np.arange(len(samples)) if samples.rows is None else samples.rows
        named, first, counts = np.unique(sample, return_index=True, return_counts=True)
        if named.size and named[0] < 0:
            raise DataError(f"{path} names sample {named[0]}, but samples are counted from 0.")
        if (counts > 1).any():
            raise DataError(f"{path} names sample {named[counts > 1][0]} more than once; it belongs to one client.")
        missing = rows[~np.isin(rows, named)]
        if missing.size:
            raise DataError(
                f"{path} names no client for sample {missing[0]} and {missing.size - 1} more; every training sample "
                f"needs one, counted from 0."
            )
        return client[first[np.searchsorted(named, rows)]]


def _parquet(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Samples and their clients, ``int64[n]`` each."""
    try:
        table = pq.read_table(path, columns=["sample", "client"])
        sample, client = (table[name].cast(pa.int64()).to_numpy().astype(np.int64) for name in ("sample", "client"))
        return sample, client
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:
        raise DataError(f"{path} does not have columns 'sample' and 'client' of integers: {error}") from error


def _json(path: Path) -> tuple[np.ndarray, np.ndarray]:
    try:
        written: Any = json.loads(path.read_text())
        if isinstance(written, list):
            return np.arange(len(written)), _integers(written)
        samples = [_integers(held) for held in written.values()]
        clients = _integers([int(name) for name in written])
        return np.concatenate(samples), np.repeat(clients, [len(held) for held in samples])
    except (ValueError, TypeError, AttributeError, OSError) as error:
        raise DataError(
            f"{path} is neither a JSON list of client numbers nor an object from client numbers to lists of samples: "
            f"{error}"
        ) from error


def _integers(values: list[Any]) -> np.ndarray:
    numbers = np.asarray(values)
    if numbers.size and numbers.dtype.kind != "i":
        raise ValueError(f"not all of {str(values[:5])[:60]}... are integers")
    return numbers.astype(np.int64)
