"""A data set made on the spot, as large as a test wants it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import ClassVar

import numpy as np

from raypfl.data.datasets import DataConfig, Population, RawData


def noise(config: DataConfig) -> RawData:
    """``$RAYPFL_TEST_SAMPLES`` 8x8 images of noise with a class-dependent mean."""
    return _noise((1, 8, 8))


def colours(config: DataConfig) -> RawData:
    """The same in 3x32x32."""
    return _noise((3, 32, 32))


def _noise(shape: tuple[int, int, int]) -> RawData:
    rng = np.random.default_rng(0)
    count = int(os.environ["RAYPFL_TEST_SAMPLES"])
    labels = rng.integers(0, 10, count)
    inputs = (rng.integers(0, 100, (count, *shape)) + 15 * labels[:, None, None, None]).astype(np.uint8)
    return RawData(inputs=inputs, labels=labels, class_names=[str(c) for c in range(10)])


class Described(Population):
    """Samples made on the spot, for as many clients as the file ``clients`` in `data.root` says; three are tested.

    `asked` notes what this process was asked for.
    """

    num_classes, input_shape = 10, (1, 8, 8)
    scale, mean, std = 16.0, 0.5, 0.3
    asked: ClassVar[list[tuple[int, str]]] = []

    def __init__(self, config: DataConfig):
        super().__init__(config)
        self.num_clients = int(Path(config.root or "", "clients").read_text())
        self.trained = 5 + np.arange(self.num_clients) % 11

    def sizes(self, split: str) -> np.ndarray:
        return self.trained if split == "train" else 4 * (split == "test") * (np.arange(self.num_clients) < 3)

    def samples(self, client: int, split: str) -> tuple[np.ndarray, np.ndarray]:
        self.asked.append((client, split))
        draws = np.random.default_rng([client, split == "test"])
        count = self.sizes(split)[client]
        return draws.integers(0, 17, (count, 1, 8, 8), dtype=np.uint8), draws.integers(0, 10, count)


class Lying(Described):
    """Gives a sample less than it says."""

    def samples(self, client: int, split: str) -> tuple[np.ndarray, np.ndarray]:
        inputs, labels = super().samples(client, split)
        return inputs[1:], labels[1:]


class Mislabelled(Described):
    """Has classes that there are not."""

    def samples(self, client: int, split: str) -> tuple[np.ndarray, np.ndarray]:
        inputs, labels = super().samples(client, split)
        return inputs, labels + 3


class Overflowing(Described):
    """Has two labels a sample, one of them 257, which is 1 in eight bits."""

    kind, num_classes = "labels", 2

    def samples(self, client: int, split: str) -> tuple[np.ndarray, np.ndarray]:
        inputs, labels = super().samples(client, split)
        return inputs, np.full((len(labels), 2), [0, 257])


class Miscounted(Described):
    """Says how many samples it has of one client only."""

    def sizes(self, split: str) -> np.ndarray:
        return super().sizes(split)[:1]


def hierarchy(config: DataConfig, variant: int = 0) -> RawData:
    """Twelve Gaussian classes in four super-classes of three neighbours, in 20 dimensions, kept as bytes; 200 training
    and 200 test samples of each. ``variant`` is the seed."""
    draws = np.random.default_rng(variant)
    above = 1.2 * draws.standard_normal((4, 20))
    centres = np.repeat(above, 3, axis=0) + 0.6 * draws.standard_normal((12, 20))
    labels = np.tile(np.repeat(np.arange(12), 200), 2)
    x = centres[labels] + draws.standard_normal((len(labels), 20))
    inputs = np.rint(128 + x * 16).clip(0, 255).astype(np.uint8)[:, None, :, None]
    names = [f"{c // 3}.{c % 3}" for c in range(12)]
    return RawData(inputs=inputs, labels=labels, class_names=names, test_mask=np.arange(len(labels)) >= 2400)
