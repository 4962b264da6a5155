"""The jobs' samples: noise, prepared by raypfl and then written down for the others exactly as it was dealt out."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from raypfl.data import FederatedData, Partition, Traits, load_federated
from raypfl.data.partitions import PARTITIONS
from raypfl.datasets import DataConfig, RawData

HERE = "benchmarks.peers.data"
CLASSES = 10


@dataclass(frozen=True)
class Noise:
    """A data set of noise.

    Attributes
    ----------
    reader : the function of this module under which raypfl knows it.
    clients, shape : how many, and ``(C, H, W)`` of their samples.
    smallest, largest : training samples of a client; between them a log-normal draw, if they differ.
    tests : test samples a client, on average.
    """

    reader: str
    clients: int
    shape: tuple[int, int, int]
    smallest: int
    largest: int
    tests: int

    @property
    def source(self) -> dict[str, Any]:
        """``data`` and ``partition`` of a raypfl experiment."""
        options = {"clients": self.clients, "smallest": self.smallest, "largest": self.largest}
        return {"data": {"name": f"{HERE}:{self.reader}"}, "partition": {"name": f"{HERE}:InTurn", **options}}

    @property
    def bytes(self) -> int:
        """Of all samples, a byte a pixel."""
        train = int(sizes(self.clients, self.smallest, self.largest).sum())
        return (train + self.clients * self.tests) * int(np.prod(self.shape))

    def raw(self) -> RawData:
        """The samples, and which of them are for testing."""
        draws = np.random.default_rng(0)
        train = int(sizes(self.clients, self.smallest, self.largest).sum())
        count = train + self.clients * self.tests
        return RawData(
            inputs=draws.integers(0, 256, (count, *self.shape), dtype=np.uint8),
            labels=draws.integers(0, CLASSES, count),
            class_names=[str(c) for c in range(CLASSES)],
            test_mask=np.arange(count) >= train,
        )


def sizes(clients: int, smallest: int, largest: int) -> np.ndarray:
    """Training samples of each client, ``int64[clients]``: log-normal about the geometric middle, cut at the ends."""
    middle, spread = np.log(smallest * largest) / 2, np.log(largest / smallest) / 4
    draws = np.random.default_rng(1).lognormal(middle, spread, clients)
    return np.clip(np.rint(draws), smallest, largest).astype(np.int64)


@dataclass(frozen=True, kw_only=True)
class InTurn(Partition):
    """Client after client takes its share of the samples in their order; they are noise. See `sizes`."""

    smallest: int = 50
    largest: int = 50

    def owners(self, samples: Traits, seed: int) -> np.ndarray:
        return np.repeat(np.arange(self.clients), sizes(self.clients, self.smallest, self.largest))


IMAGES = Noise("images", 1000, (3, 32, 32), 50, 50, tests=10)
PIXELS = Noise("pixels", 1000, (1, 8, 8), 50, 50, tests=1)
PICTURES = Noise("pictures", 100, (3, 32, 32), 320, 320, tests=1)
VILLAGE = Noise("village", 1000, (1, 8, 8), 10, 100, tests=1)
COUNTRY = Noise("country", 100_000, (1, 8, 8), 10, 100, tests=1)


def images(config: DataConfig) -> RawData:
    return IMAGES.raw()


def pixels(config: DataConfig) -> RawData:
    return PIXELS.raw()


def pictures(config: DataConfig) -> RawData:
    return PICTURES.raw()


def village(config: DataConfig) -> RawData:
    return VILLAGE.raw()


def country(config: DataConfig) -> RawData:
    return COUNTRY.raw()


def store(folder: Path) -> Path:
    """raypfl's cache in the folder of the samples."""
    return folder / "store"


def prepare(noise: Noise, folder: Path) -> tuple[dict[str, Any], Path]:
    """Put a data set into raypfl's store and beside it, in `folder`, the files that `order.Shards` reads.

    Returns
    -------
    ``data`` and ``partition`` of a raypfl experiment, and the folder of the files.
    """
    source = noise.source
    source["data"]["cache"] = str(store(folder))
    options = dict(source["partition"])
    partition = PARTITIONS.get(options.pop("name"))(**options)
    files = folder / noise.reader
    if not (files / "about.json").exists():
        write(load_federated(DataConfig(**source["data"]), partition, seed=0), files)
    return source, files


def write(data: FederatedData, folder: Path) -> None:
    """Write down who holds what, client after client, ``about.json`` last."""
    folder.mkdir(parents=True, exist_ok=True)
    for split in ("train", "test"):
        order = np.concatenate([data.indices(client, split) for client in range(data.num_clients)])
        np.save(folder / f"{split}_inputs.npy", data.inputs[order])
        np.save(folder / f"{split}_labels.npy", np.asarray(data.labels)[order])
        np.save(folder / f"{split}_offsets.npy", np.concatenate([[0], np.cumsum(data.sizes(split))]))
    about = {
        "input_shape": data.input_shape,
        "num_classes": data.num_classes,
        "scale": data.scale,
        "mean": data.mean.tolist(),
        "std": data.std.tolist(),
    }
    (folder / "about.json").write_text(json.dumps(about))
