"""Data sets: what they are, and how their files are read."""

from raypfl.datasets import cifar, csv_images, folders, idx, npy, parquet, scikit, spiral, text  # noqa: F401 - readers register themselves
from raypfl.datasets.base import DATASETS, DataConfig, DataSource, RawData, Reader
from raypfl.datasets.population import DescribedData, Population

__all__ = ["DATASETS", "DataConfig", "DataSource", "DescribedData", "Population", "RawData", "Reader"]
