"""Data sets, partitions of them over clients, and the memory-mapped store that clients read."""

from __future__ import annotations

import raypfl.data.digits
import raypfl.data.parquet  # noqa: F401 - readers register themselves
from raypfl.data.datasets import DATASETS, DataConfig, RawData
from raypfl.data.partitions import IID, PARTITIONS, ClassesPerClient, Dirichlet, LogNormal, Partition
from raypfl.data.population import DescribedData, Population
from raypfl.data.store import ClientData, FederatedData, load_federated

__all__ = [
    "DATASETS",
    "IID",
    "PARTITIONS",
    "ClassesPerClient",
    "ClientData",
    "DataConfig",
    "DescribedData",
    "Dirichlet",
    "FederatedData",
    "LogNormal",
    "Partition",
    "Population",
    "RawData",
    "load_federated",
]
