"""Generated data sets of any size, some with a fault on purpose."""

from __future__ import annotations

import os
from pathlib import Path
from typing import ClassVar

import numpy as np

from raypfl.data.datasets import DataConfig, Population, RawData


def noise(config: DataConfig) -> RawData:
    """``$RAYPFL_TEST_SAMPLES`` 8x8 images of noise with a class-dependent mean."""
    rng = np.random.default_rng(0)
    count = int(os.environ["RAYPFL_TEST_SAMPLES"])
    labels = rng.integers(0, 10, count)
    inputs = (rng.integers(0, 100, (count, 1, 8, 8)) + 15 * labels[:, None, None, None]).astype(np.uint8)
    return RawData(inputs=inputs, labels=labels, class_names=[str(c) for c in range(10)])


def floating(config: DataConfig) -> RawData:
    """240 grey images of 8x8 pixels in floating point, of two classes."""
    inputs = np.random.default_rng(0).random((240, 1, 8, 8), dtype=np.float32)
    return RawData(inputs=inputs, labels=np.arange(240) % 2, class_names=["even", "odd"])


class GeneratedClients(Population):
    """Clients with generated samples; the file ``clients`` in `data.root` says how many. Three have test samples.

    `requests` lists the clients and splits whose samples this process has generated.
    """

    num_classes = 10
    input_shape = (1, 8, 8)
    scale = 16.0
    mean = 0.5
    std = 0.3
    requests: ClassVar[list[tuple[int, str]]] = []

    def __init__(self, config: DataConfig):
        super().__init__(config)
        self.num_clients = int(Path(config.root or "", "clients").read_text())
        self.train_sizes = 5 + np.arange(self.num_clients) % 11

    def sizes(self, split: str) -> np.ndarray:
        if split == "train":
            return self.train_sizes
        return 4 * (split == "test") * (np.arange(self.num_clients) < 3)

    def samples(self, client: int, split: str) -> tuple[np.ndarray, np.ndarray]:
        self.requests.append((client, split))
        draws = np.random.default_rng([client, split == "test"])
        count = self.sizes(split)[client]
        return draws.integers(0, 17, (count, 1, 8, 8), dtype=np.uint8), draws.integers(0, 10, count)


class UnequalTests(GeneratedClients):
    """The same clients, but the first three have 4, 8 and 12 test samples, and client 0 has no others."""

    def sizes(self, split: str) -> np.ndarray:
        client = np.arange(self.num_clients)
        if split == "train":
            return np.where(client > 0, super().sizes(split), 0)
        return (1 + client) * super().sizes(split)


class OneSampleShort(GeneratedClients):
    """A faulty population: each client has one sample less than `sizes` says."""

    def samples(self, client: int, split: str) -> tuple[np.ndarray, np.ndarray]:
        inputs, labels = super().samples(client, split)
        return inputs[1:], labels[1:]


class LabelsOutOfRange(GeneratedClients):
    """A faulty population: some labels are no class."""

    def samples(self, client: int, split: str) -> tuple[np.ndarray, np.ndarray]:
        inputs, labels = super().samples(client, split)
        return inputs, labels + 3


class LabelsThatOverflow(GeneratedClients):
    """A faulty population: two labels a sample, one of them 257, which is 1 in eight bits."""

    kind = "labels"
    num_classes = 2

    def samples(self, client: int, split: str) -> tuple[np.ndarray, np.ndarray]:
        inputs, labels = super().samples(client, split)
        return inputs, np.full((len(labels), 2), [0, 257])


class SizesOfOneClient(GeneratedClients):
    """A faulty population: it gives the sizes of one client only."""

    def sizes(self, split: str) -> np.ndarray:
        return super().sizes(split)[:1]


def hierarchy(config: DataConfig, variant: int = 0) -> RawData:
    """Twelve Gaussian classes in four super-classes of three neighbours, in 20 dimensions, stored as bytes; each has
    200 training and 200 test samples. ``variant`` is the seed."""
    draws = np.random.default_rng(variant)
    super_centres = 1.2 * draws.standard_normal((4, 20))
    centres = np.repeat(super_centres, 3, axis=0) + 0.6 * draws.standard_normal((12, 20))

    labels = np.tile(np.repeat(np.arange(12), 200), 2)
    x = centres[labels] + draws.standard_normal((len(labels), 20))
    inputs = np.rint(128 + x * 16).clip(0, 255).astype(np.uint8)[:, None, :, None]

    names = [f"{c // 3}.{c % 3}" for c in range(12)]
    return RawData(inputs=inputs, labels=labels, class_names=names, test_mask=np.arange(len(labels)) >= 2400)
