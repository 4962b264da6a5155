"""Federated methods, one a file."""

from raypfl.methods.base import METHODS, Method, Server, Task
from raypfl.methods.ditto import Ditto
from raypfl.methods.fedavg import FedAvg
from raypfl.methods.fedprox import FedProx
from raypfl.methods.local import Local
from raypfl.methods.partial import PartialPersonalization
from raypfl.methods.partial_presets import FedAlt, FedBABU, FedBN, FedPer, FedRep, FedSim, LGFedAvg

__all__ = [
    "METHODS",
    "Ditto",
    "FedAlt",
    "FedAvg",
    "FedBABU",
    "FedBN",
    "FedPer",
    "FedProx",
    "FedRep",
    "FedSim",
    "LGFedAvg",
    "Local",
    "Method",
    "PartialPersonalization",
    "Server",
    "Task",
]
