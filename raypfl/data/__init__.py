"""A federated data set: which client holds which samples, and the store that every process maps into memory."""

from raypfl.data.label_skew import ClassesPerClient, Dirichlet, DirichletMix, LabelSorted
from raypfl.data.natural import ByColumn, FromFile
from raypfl.data.partitions import IID, PARTITIONS, Partition, Traits
from raypfl.data.quantity_skew import LogNormal, PowerLaw
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
