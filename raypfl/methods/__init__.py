"""Federated methods, one in each file."""

from raypfl.federation.method import METHODS, Method, Server
from raypfl.federation.task import Task
from raypfl.methods.apfl import APFL
from raypfl.methods.creff import CReFF
from raypfl.methods.ditto import Ditto
from raypfl.methods.fedavg import FedAvg
from raypfl.methods.fedavg_ft import FedAvgFT
from raypfl.methods.feddf import FedDF
from raypfl.methods.feddyn import FedDyn
from raypfl.methods.fednh import FedNH
from raypfl.methods.fedproto import FedProto
from raypfl.methods.fedprox import FedProx
from raypfl.methods.fedrod import FedROD
from raypfl.methods.knn_per import KNNPer
from raypfl.methods.local import Local
from raypfl.methods.mtl import MTL
from raypfl.methods.partial import PartialPersonalization
from raypfl.methods.partial_presets import FedAlt, FedBABU, FedBN, FedPer, FedRep, FedSim, LGFedAvg
from raypfl.methods.pefll import PeFLL
from raypfl.methods.perada import PerAda
from raypfl.methods.perfedavg import PerFedAvg
from raypfl.methods.pfedhn import PFedHN
from raypfl.methods.pfedme import PFedMe

__all__ = [
    "APFL",
    "METHODS",
    "MTL",
    "CReFF",
    "Ditto",
    "FedAlt",
    "FedAvg",
    "FedAvgFT",
    "FedBABU",
    "FedBN",
    "FedDF",
    "FedDyn",
    "FedNH",
    "FedPer",
    "FedProto",
    "FedProx",
    "FedROD",
    "FedRep",
    "FedSim",
    "KNNPer",
    "LGFedAvg",
    "Local",
    "Method",
    "PFedHN",
    "PFedMe",
    "PartialPersonalization",
    "PeFLL",
    "PerAda",
    "PerFedAvg",
    "Server",
    "Task",
]
