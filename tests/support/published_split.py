"""Digits with a published test split, whose labels may be replaced by others."""

from __future__ import annotations

import numpy as np
from sklearn.datasets import load_digits

from raypfl.data.datasets import DataConfig, RawData


def digits(config: DataConfig, poisoned: bool = False) -> RawData:
    """Return scikit-learn's digits; the last 500 are the test split, of which `poisoned` changes every label."""
    data = load_digits()
    is_test = np.arange(len(data.target)) >= len(data.target) - 500
    labels = np.where(is_test & poisoned, (data.target + 1) % 10, data.target)
    images = data.images[:, None].astype(np.uint8)
    return RawData(images, labels, [str(digit) for digit in range(10)], scale=16.0, test_mask=is_test)
