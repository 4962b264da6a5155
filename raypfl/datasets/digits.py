"""scikit-learn's handwritten digits, which need no files."""

from __future__ import annotations

import numpy as np

from raypfl.datasets.base import DATASETS, DataSource, RawData


@DATASETS.register("digits")
def digits(config: DataSource) -> RawData:
    """1,797 handwritten digits, 8x8 grey levels from 0 to 16 (Alpaydin and Kaynak 1998); nothing to download."""
    from sklearn.datasets import load_digits  # slow to import, and needed once, to build the cache

    bunch = load_digits()
    return RawData(
        inputs=bunch.images[:, None].astype(np.uint8),
        labels=bunch.target.astype(np.int64),
        class_names=[str(name) for name in bunch.target_names],
        scale=16.0,
    )
