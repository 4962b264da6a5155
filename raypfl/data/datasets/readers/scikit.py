"""Data sets that scikit-learn contains, so that they need no files: handwritten digits and diabetes patients."""

from __future__ import annotations

import numpy as np

from raypfl.data.datasets.raw_data import RawData
from raypfl.data.datasets.source import DATASETS, DataSource

# scikit-learn is slow to import, and needed once, to build the cache: hence the imports in functions.


@DATASETS.register("digits")
def digits(config: DataSource, signs: bool = False) -> RawData:
    """1,797 handwritten digits, 8x8 grey levels from 0 to 16 (Alpaydin and Kaynak 1998); nothing to download.

    With `signs`, targets are numbers for regression: 1 for digits from 5 to 9, else -1."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    return RawData(
        inputs=bunch.images[:, None].astype(np.uint8),
        labels=np.where(bunch.target < 5, -1.0, 1.0) if signs else bunch.target.astype(np.int64),
        class_names=["sign"] if signs else [str(name) for name in bunch.target_names],
        scale=16.0,
    )


@DATASETS.register("diabetes")
def diabetes(config: DataSource) -> RawData:
    """442 patients with ten measurements each, and how far their diabetes had progressed a year later, from 25 to 346
    (Efron et al. 2004); in six groups by sex and age, for ``partition: by_column``. Nothing to download."""
    from sklearn.datasets import load_diabetes

    bunch = load_diabetes(scaled=False)
    age = bunch.data[:, 0]
    sex = bunch.data[:, 1].astype(int)
    age_third = np.searchsorted(np.quantile(age, [1 / 3, 2 / 3]), age)
    return RawData(
        inputs=bunch.data.astype(np.float64),
        labels=bunch.target.astype(np.float64),
        class_names=["progression"],
        groups=3 * (sex - sex.min()) + age_third,
    )
