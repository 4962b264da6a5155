"""A federated data set: which client holds which samples, and the store that every process maps into memory."""

from raypfl.data.partitions import (
    IID,
    PARTITIONS,
    ByColumn,
    ClassesPerClient,
    Dirichlet,
    DirichletMix,
    FromFile,
    LabelSorted,
    LogNormal,
    Partition,
    PowerLaw,
    Traits,
)
from raypfl.data.store import ClientData, FederatedData, load_federated
from raypfl.data.summary import Summary, summarised

__all__ = [
    "IID",
    "PARTITIONS",
    "ByColumn",
    "ClassesPerClient",
    "ClientData",
    "Dirichlet",
    "DirichletMix",
    "FederatedData",
    "FromFile",
    "LabelSorted",
    "LogNormal",
    "Partition",
    "PowerLaw",
    "Summary",
    "Traits",
    "load_federated",
    "summarised",
]
