"""scikit-learn's diabetes data, for regression, which need no files."""

from __future__ import annotations

import numpy as np

from raypfl.datasets.base import DATASETS, DataSource, RawData


@DATASETS.register("diabetes")
def diabetes(config: DataSource) -> RawData:
    """442 patients with ten measurements each, and how far their diabetes had progressed a year later, from 25 to 346
    (Efron et al. 2004); in six groups by sex and age, for ``partition: by_column``. Nothing to download."""
    from sklearn.datasets import load_diabetes  # slow to import, and needed once, to build the cache

    bunch = load_diabetes(scaled=False)
    age, sex = bunch.data[:, 0], bunch.data[:, 1].astype(int)
    thirds = np.searchsorted(np.quantile(age, [1 / 3, 2 / 3]), age)
    return RawData(
        inputs=bunch.data.astype(np.float64),
        labels=bunch.target.astype(np.float64),
        class_names=["progression"],
        groups=3 * (sex - sex.min()) + thirds,
    )
