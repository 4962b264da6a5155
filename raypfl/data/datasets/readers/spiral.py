"""Six arms of a spiral in the plane: a toy that shows what a method does to the latent space."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from raypfl.data.datasets.raw_data import RawData
from raypfl.data.datasets.source import DATASETS, Reader

ARMS = 6
NOISE = 0.15
EXTENT = 10.2
"""Points lie within this distance of the origin, on a grid of 256 x 256 places, since samples are kept as bytes."""

TRAIN = {
    "balanced": (3000,) * ARMS,
    "imbalanced": tuple(3000 // 2**arm for arm in range(ARMS)),
    "printed": (3000,) * ARMS,
}
TEST = (500,) * ARMS


@DATASETS.register("spiral")
@dataclass(frozen=True, kw_only=True)
class Spiral(Reader):
    """Six arms of a spiral in the plane (Dai et al. 2023): 3,000 points a class, or fewer and fewer; drawn, not read.

    A sample is an image of two channels and one pixel. The published test split has 500 points of each class.

    Attributes
    ----------
    variant : kind of spiral: ``balanced``; ``imbalanced``, where each class has half as many training points as the one
        before, from 3000 to 93; or ``printed``, the formula as it is printed in the paper.
    """

    from_files = False

    variant: Literal["balanced", "imbalanced", "printed"] = "balanced"

    def read(self) -> RawData:
        printed = self.variant == "printed"
        noise = 1.0 if printed else NOISE
        train_points, train_labels = spirals(TRAIN[self.variant], noise, printed, seed=0)
        test_points, test_labels = spirals(TEST, noise, printed, seed=1)

        points = np.concatenate([train_points, test_points])
        return RawData(
            inputs=as_bytes(points)[:, :, None, None],
            labels=np.concatenate([train_labels, test_labels]),
            class_names=[f"arm {arm}" for arm in range(ARMS)],
            test_mask=np.arange(len(points)) >= len(train_points),
        )


def spirals(counts: Sequence[int], noise: float, printed: bool, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw points of arms that turn by 60 degrees each: ``float64[N, 2]``, and their labels ``int64[N]``.

    Parameters
    ----------
    counts : number of points of each arm.
    noise : standard deviation of their angles, in radians.
    printed : whether arm k sweeps through k times that angle, so that arms meet, as in the paper's printed formula.
    """
    draws = np.random.default_rng(seed)
    points = []
    for arm, count in enumerate(counts):
        along = np.linspace(0, 1, count)
        sweep = np.pi / 3 * (arm if printed else 1)
        angle = arm * np.pi / 3 + along * sweep + noise * draws.standard_normal(count)
        radius = 1 + 9 * along
        points.append(radius[:, None] * np.stack([np.sin(angle), np.cos(angle)], axis=1))
    return np.concatenate(points), np.repeat(np.arange(len(counts)), counts)


def as_bytes(points: np.ndarray) -> np.ndarray:
    """Return the grid place nearest to each point, ``uint8[N, 2]``."""
    return np.rint((points / EXTENT + 1) / 2 * 255).clip(0, 255).astype(np.uint8)
