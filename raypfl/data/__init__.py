"""Data sets, partitions of them over clients, and the memory-mapped store that clients read."""

from __future__ import annotations

import raypfl.data.cifar
import raypfl.data.csv_images
import raypfl.data.diabetes
import raypfl.data.digits
import raypfl.data.folders
import raypfl.data.idx
import raypfl.data.npy
import raypfl.data.parquet
import raypfl.data.spiral
import raypfl.data.text  # noqa: F401 - readers register themselves
from raypfl.data.datasets import DATASETS, DataConfig, RawData, reads
from raypfl.data.label_skew import ClassesPerClient, Dirichlet, DirichletMix
from raypfl.data.natural import ByColumn, FromFile
from raypfl.data.partitions import IID, PARTITIONS, Partition, Traits
from raypfl.data.population import DescribedData, Population
from raypfl.data.quantity_skew import LogNormal, PowerLaw
from raypfl.data.store import ClientData, FederatedData, load_federated
from raypfl.data.summary import Summary, summarised

__all__ = [
    "DATASETS",
    "IID",
    "PARTITIONS",
    "ByColumn",
    "ClassesPerClient",
    "ClientData",
    "DataConfig",
    "DescribedData",
    "Dirichlet",
    "DirichletMix",
    "FederatedData",
    "FromFile",
    "LogNormal",
    "Partition",
    "Population",
    "PowerLaw",
    "RawData",
    "Summary",
    "Traits",
    "load_federated",
    "reads",
    "summarised",
]
