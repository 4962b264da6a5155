"""Data sets: what one is, and how the files of those that are published, or one's own, are read."""

from raypfl.datasets import cifar, csv_images, diabetes, digits, folders, idx, npy, parquet, spiral, text  # noqa: F401 - readers register themselves
from raypfl.datasets.base import DATASETS, DataConfig, RawData, reads
from raypfl.datasets.population import DescribedData, Population

__all__ = ["DATASETS", "DataConfig", "DescribedData", "Population", "RawData", "reads"]
