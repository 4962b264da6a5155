"""Data sets of noise, for measurements of time and memory, where the values of samples do not matter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from raypfl.data import Partition, Traits
from raypfl.data.datasets import DataConfig, Population, RawData

HERE = "benchmarks.noise"
CLASSES = 10
ONLY_ROUNDS: dict[str, Any] = {
    "evaluation": {"every": 0, "protocols": ["local"]},
    "checkpoint": {"every": 0},
    "tracking": {"mlflow": False},
}
"""Settings of a raypfl experiment that does nothing but rounds, and one evaluation at its end."""


@dataclass(frozen=True)
class Noise:
    """A data set of noise.

    Attributes
    ----------
    name : raypfl reads it as the data set ``benchmarks.noise:NAME``, see `SETS`.
    clients, shape : the number of clients, and ``(C, H, W)`` of a sample.
    smallest, largest : training samples of a client. If they differ, sizes are log-normal between them.
    tests : test samples of a client, on average.
    """

    name: str
    clients: int
    shape: tuple[int, int, int]
    smallest: int = 50
    largest: int = 50
    tests: int = 1

    def source(self, cache: str | Path) -> dict[str, Any]:
        """``data`` and ``partition`` of a raypfl experiment that keeps the prepared samples in a folder."""
        data = {"name": f"{HERE}:{self.name}", "cache": str(cache)}
        if self.name in globals():  # a population, which decides itself who holds what
            return {"data": data}
        options = {"clients": self.clients, "smallest": self.smallest, "largest": self.largest}
        return {"data": data, "partition": {"name": f"{HERE}:InTurn", **options}}

    @property
    def sizes(self) -> np.ndarray:
        """Training samples of each client: ``int64[clients]``, the same in every process."""
        # The middle of both bounds on a logarithmic scale; the bounds are two standard deviations away.
        middle = np.log(self.smallest * self.largest) / 2
        spread = np.log(self.largest / self.smallest) / 4
        sizes = np.random.default_rng(1).lognormal(middle, spread, self.clients)
        return np.clip(np.rint(sizes), self.smallest, self.largest).astype(np.int64)

    @property
    def bytes(self) -> int:
        """The size of all samples, one byte a pixel."""
        return (int(self.sizes.sum()) + self.clients * self.tests) * int(np.prod(self.shape))

    def read(self, config: DataConfig) -> RawData:
        """The samples; the last ones are the test split."""
        draws = np.random.default_rng(0)
        train = int(self.sizes.sum())
        count = train + self.clients * self.tests
        return RawData(
            inputs=draws.integers(0, 256, (count, *self.shape), dtype=np.uint8),
            labels=draws.integers(0, CLASSES, count),
            class_names=[str(c) for c in range(CLASSES)],
            test_mask=np.arange(count) >= train,
        )


class InTurn(Partition):
    """Assigns the samples in their order, client by client. See `Noise` for the options."""

    smallest: int = 50
    largest: int = 50

    def owners(self, samples: Traits, seed: int) -> np.ndarray:
        sizes = Noise("", self.clients, (1, 1, 1), self.smallest, self.largest).sizes
        return np.repeat(np.arange(self.clients), sizes)


SETS = {
    noise.name: noise
    for noise in (
        Noise("images", 1000, (3, 32, 32), tests=10),
        Noise("images_50", 1000, (3, 32, 32), tests=50),
        Noise("pixels", 1000, (1, 8, 8)),
        Noise("pixels_10", 1000, (1, 8, 8), tests=10),
        Noise("pixels_50", 1000, (1, 8, 8), tests=50),
        Noise("pictures", 100, (3, 32, 32), 320, 320),
        Noise("described", 200, (3, 32, 32)),
        Noise("frozen", 64, (3, 32, 32), 8, 8),
        Noise("head", 40, (1, 8, 8)),
        Noise("states", 20, (1, 8, 8)),
        Noise("village", 1000, (1, 8, 8), 10, 100),
        Noise("country", 100_000, (1, 8, 8), 10, 100),
    )
}


def __getattr__(name: str) -> Callable[[DataConfig], RawData]:
    """The reader of a data set in `SETS`, where raypfl looks for it."""
    try:
        return SETS[name].read
    except KeyError:
        raise AttributeError(name) from None


class described(Population):
    """The clients of `SETS` with this name, with samples in floating point, as users describe clients of their own."""

    def __init__(self, config: DataConfig):
        super().__init__(config)
        self.noise = SETS["described"]
        self.num_classes = CLASSES
        self.num_clients = self.noise.clients
        self.input_shape = self.noise.shape

        raw = self.noise.read(config)
        self.inputs = np.float32(raw.inputs) / 128 - 1
        self.labels = raw.labels

    def sizes(self, split: str) -> np.ndarray:
        return {"train": self.noise.sizes, "val": 0 * self.noise.sizes, "test": 0 * self.noise.sizes + 1}[split]

    def samples(self, client: int, split: str) -> tuple[np.ndarray, np.ndarray]:
        first = client * self.noise.largest
        rows = slice(first, first + int(self.sizes(split)[client]))
        return self.inputs[rows], self.labels[rows]
