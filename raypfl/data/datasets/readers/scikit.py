"""Data sets that scikit-learn contains, so that they need no files: handwritten digits and diabetes patients."""

from __future__ import annotations

import gzip
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from raypfl.common.errors import DataError
from raypfl.data.datasets.raw_data import RawData
from raypfl.data.datasets.source import DATASETS, DataSource


@DATASETS.register("digits")
def digits(config: DataSource, signs: bool = False) -> RawData:
    """1,797 handwritten digits, 8x8 grey levels from 0 to 16 (Alpaydin and Kaynak 1998); nothing to download.

    Parameters
    ----------
    signs : make targets numbers for regression: 1 for digits from 5 to 9, else -1.
    """
    rows = _read("digits.csv.gz", delimiter=",")
    labels = rows[:, -1].astype(np.int64)
    return RawData(
        inputs=rows[:, :-1].reshape(-1, 1, 8, 8).astype(np.uint8),
        labels=np.where(labels < 5, -1.0, 1.0) if signs else labels,
        class_names=["sign"] if signs else [str(digit) for digit in range(10)],
        scale=16.0,
    )


@DATASETS.register("diabetes")
def diabetes(config: DataSource) -> RawData:
    """442 diabetes patients: ten measurements, and the disease's progression after a year (Efron et al. 2004).

    Progression is a number from 25 to 346. There are six groups by sex and age, for ``partition: by_column``. Nothing
    to download.
    """
    rows = _read("diabetes_data_raw.csv.gz")
    age = rows[:, 0]
    sex = rows[:, 1].astype(int)
    age_third = np.searchsorted(np.quantile(age, [1 / 3, 2 / 3]), age)
    return RawData(
        inputs=rows,
        labels=_read("diabetes_target.csv.gz"),
        class_names=["progression"],
        groups=3 * (sex - sex.min()) + age_third,
    )


def _read(name: str, delimiter: str | None = None) -> np.ndarray:
    """Read a table of numbers, ``float64[rows, columns]``, that scikit-learn brings along.

    Importing scikit-learn for it would take two seconds, most of them in SciPy and pandas.
    """
    package = find_spec("sklearn")
    file = Path(package.origin).parent / "datasets/data" / name if package and package.origin else None
    if file is None or not file.exists():
        raise DataError(f"The installed scikit-learn has no {name}; reinstall it with `pip install scikit-learn`.")
    with gzip.open(file, "rt") as text:
        return np.loadtxt(text, delimiter=delimiter)
