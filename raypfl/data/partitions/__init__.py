"""Partitions: which client holds which samples, as a function of their labels and a seed."""

from raypfl.data.partitions.label_skew import ClassesPerClient, Dirichlet, DirichletMix, LabelSorted
from raypfl.data.partitions.natural import ByColumn, FromFile
from raypfl.data.partitions.partition import IID, PARTITIONS, Partition, Traits
from raypfl.data.partitions.quantity_skew import LogNormal, PowerLaw

__all__ = [
    "IID",
    "PARTITIONS",
    "ByColumn",
    "ClassesPerClient",
    "Dirichlet",
    "DirichletMix",
    "FromFile",
    "LabelSorted",
    "LogNormal",
    "Partition",
    "PowerLaw",
    "Traits",
]
