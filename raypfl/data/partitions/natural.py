"""Partitions given with the data: by domain or writer, or by a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from raypfl.common import rng
from raypfl.common.errors import ConfigError, DataError
from raypfl.data.partitions.allocation import apportion, rank_within
from raypfl.data.partitions.partition import PARTITIONS, Partition, Traits, require


@PARTITIONS.register("by_column")
class ByColumn(Partition):
    """By the groups of the data set: one client for each domain, writer or hospital.

    Clients are numbered in the order of the groups' names, and have these names. A published test split is divided
    within each group.

    Attributes
    ----------
    clients : number of clients; 0: one for each group. If there are more clients than groups, samples of a group are
        divided at random over several clients, in equal numbers; if there are fewer, groups are merged at random.
    """

    by_group: ClassVar = True
    least: ClassVar = {"clients": 0}

    clients: int = 0

    def count(self, samples: Traits) -> int:
        return self.clients or len(np.unique(self._groups(samples)))

    def alike(self, samples: Traits) -> tuple[np.ndarray, int]:
        return self._groups(samples), len(samples.group_names)

    def owners(self, samples: Traits, seed: int) -> np.ndarray:
        groups, group = np.unique(self._groups(samples), return_inverse=True)
        clients = self.clients or len(groups)
        draws = rng.generator(seed, "partition")

        if clients <= len(groups):
            client_of_group = np.arange(len(groups))
            if clients < len(groups):
                client_of_group = draws.permutation(len(groups)) % clients
            return client_of_group[group]

        clients_per_group = 1 + apportion(clients - len(groups), np.bincount(group))
        first_client = np.cumsum(clients_per_group) - clients_per_group
        return first_client[group] + rank_within(group, draws) % clients_per_group[group]

    @staticmethod
    def _groups(samples: Traits) -> np.ndarray:
        if samples.groups is None:
            raise ConfigError(
                "partition is 'by_column', but the data set has no groups; name a column in data.group or, for folders "
                "of images, a level in data.layout, as in 'group/class'."
            )
        return samples.groups


@PARTITIONS.register("from_file")
class FromFile(Partition):
    """From a file that names the client of each sample; samples are counted from 0, in the order of the data set.

    Parquet: columns ``sample`` and ``client``, of integers. JSON: a list, with a client for each sample; or an object,
    with a list of samples for each client. Its entries for published test samples are ignored: these are divided as
    for any partition.

    Attributes
    ----------
    file : path of the file.
    clients : number of clients; 0: as many as the file names.
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
        return self.clients or int(self._read_owners(samples).max()) + 1

    def owners(self, samples: Traits, seed: int) -> np.ndarray:
        return self._read_owners(samples)

    def _read_owners(self, samples: Traits) -> np.ndarray:
        (path,) = self.files()
        if not path.is_file():
            raise ConfigError(f"partition.file is {self.file!r}, but there is no such file.")

        sample, client = _read_parquet(path) if path.suffix == ".parquet" else _read_json(path)
        listed, entry, counts = np.unique(sample, return_index=True, return_counts=True)
        if listed.size and listed[0] < 0:
            raise DataError(f"{path} names sample {listed[0]}, but samples are counted from 0.")
        if (counts > 1).any():
            raise DataError(f"{path} names sample {listed[counts > 1][0]} more than once; it belongs to one client.")

        rows = np.arange(len(samples)) if samples.rows is None else samples.rows
        missing = rows[~np.isin(rows, listed)]
        if missing.size:
            raise DataError(
                f"{path} names no client for sample {missing[0]} and {missing.size - 1} more; every training sample "
                f"needs one, counted from 0."
            )

        owner = client[entry[np.searchsorted(listed, rows)]]
        if owner.min() < 0:
            raise DataError(
                f"{path} gives sample {rows[owner < 0][0]} to client {owner.min()}, but clients are counted from 0."
            )
        absent = np.setdiff1d(np.arange(len(owner)), owner)
        if absent.size and absent[0] < owner.max():
            raise DataError(
                f"{path} gives client {absent[0]} no training sample, but client {owner.max()} has some; number "
                "clients from 0 without gaps."
            )
        return owner


def _read_parquet(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return samples and their clients, ``int64[n]`` each."""
    try:
        table = pq.read_table(path, columns=["sample", "client"])
        if table["sample"].null_count or table["client"].null_count:
            raise ValueError("a value is missing")
        sample = table["sample"].cast(pa.int64()).to_numpy().astype(np.int64)
        client = table["client"].cast(pa.int64()).to_numpy().astype(np.int64)
        return sample, client
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:
        raise DataError(f"{path} does not have columns 'sample' and 'client' of integers: {error}") from error


def _read_json(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return samples and their clients, ``int64[n]`` each."""
    try:
        content: Any = json.loads(path.read_text())
        if isinstance(content, list):
            return np.arange(len(content)), _integers(content)

        samples = [_integers(client_samples) for client_samples in content.values()]
        clients = _integers([int(name) for name in content])
        sizes = [len(client_samples) for client_samples in samples]
        return np.concatenate(samples), np.repeat(clients, sizes)
    except (ValueError, TypeError, AttributeError, OSError) as error:
        raise DataError(
            f"{path} is neither a JSON list of client numbers, one for each sample ([0, 2, ...]), nor an object from "
            f'client numbers to lists of samples ({{"0": [4, 7], "1": [2]}}): {error}'
        ) from error


def _integers(values: list[Any]) -> np.ndarray:
    if any(isinstance(value, list) for value in values):
        raise ValueError(f"{str(values[:5])[:60]}... holds lists, where an integer is needed")
    numbers = np.asarray(values)
    if numbers.size and numbers.dtype.kind != "i":
        raise ValueError(f"not all of {str(values[:5])[:60]}... are integers")
    return numbers.astype(np.int64)
