"""Data sets: what they are, and how their files are read."""

from raypfl.data.datasets.population import DescribedData, Population
from raypfl.data.datasets.raw_data import RawData
from raypfl.data.datasets.readers import (  # noqa: F401 - readers register themselves
    arrays,
    cifar,
    csv_images,
    folders,
    hugging_face,
    idx,
    leaf,
    npy,
    parquet,
    scikit,
    spiral,
    text,
)
from raypfl.data.datasets.readers.tabular import feature_table, text_table  # noqa: F401
from raypfl.data.datasets.settings import DataConfig
from raypfl.data.datasets.source import DATASETS, DataSource, Reader

__all__ = ["DATASETS", "DataConfig", "DataSource", "DescribedData", "Population", "RawData", "Reader"]
