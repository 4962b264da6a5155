"""A data set made on the spot, as large as a test wants it."""

from __future__ import annotations

import os

import numpy as np

from raypfl.data import DataConfig, RawData


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
