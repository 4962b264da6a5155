"""Six arms of a spiral in the plane: a toy on which one sees what a method does to the latent space."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from raypfl.common.errors import ConfigError
from raypfl.datasets.base import DATASETS, DataConfig, RawData

ARMS = 6
NOISE = 0.15
EXTENT = 10.2
"""Points lie within this distance of the origin, on a grid of 256 x 256 places, since samples are kept as bytes."""

TRAIN = {
    "balanced": (3000,) * ARMS,
    "imbalanced": tuple(3000 // 2**k for k in range(ARMS)),
    "printed": (3000,) * ARMS,
}
TEST = (500,) * ARMS


@DATASETS.register("spiral")
def spiral(config: DataConfig) -> RawData:
    """Six arms of a spiral in the plane (Dai et al. 2023): 3,000 points a class, or fewer and fewer; made, not read.

    A sample is an image of two channels and one pixel. ``variant`` is ``balanced``; ``imbalanced``, where each class
    has half as many training points as the one before, from 3000 to 93; or ``printed``, the formula as the paper has
    it. The published test split has 500 points of each class.
    """
    variant = config.variant or "balanced"
    if variant not in TRAIN:
        raise ConfigError(f"data.variant is {variant!r}; of spiral there are {', '.join(TRAIN)}.")
    printed = variant == "printed"
    noise = 1.0 if printed else NOISE
    parts = [spirals(counts, noise, printed, seed) for seed, counts in enumerate((TRAIN[variant], TEST))]
    points, labels = (np.concatenate(column) for column in zip(*parts, strict=True))
    return RawData(
        inputs=as_bytes(points)[:, :, None, None],
        labels=labels,
        class_names=[f"arm {k}" for k in range(ARMS)],
        test_mask=np.arange(len(labels)) >= sum(TRAIN[variant]),
    )


def spirals(counts: Sequence[int], noise: float, printed: bool, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Points ``float64[N, 2]`` of arms of which each turns by 60 degrees, and their labels ``int64[N]``.

    Parameters
    ----------
    counts : points of each arm.
    noise : standard deviation of their angles, in radians.
    printed : the angle through which arm k sweeps is k times as large, so that arms meet, as in the paper's formula.
    """
    draws = np.random.default_rng(seed)
    points = []
    for k, count in enumerate(counts):
        along = np.linspace(0, 1, count)
        sweep = np.pi / 3 * (k if printed else 1)
        angle = k * np.pi / 3 + along * sweep + noise * draws.standard_normal(count)
        points.append((1 + 9 * along)[:, None] * np.stack([np.sin(angle), np.cos(angle)], axis=1))
    return np.concatenate(points), np.repeat(np.arange(len(counts)), counts)


def as_bytes(points: np.ndarray) -> np.ndarray:
    """The nearest places of the grid, ``uint8[N, 2]``."""
    return np.rint((points / EXTENT + 1) / 2 * 255).clip(0, 255).astype(np.uint8)
