"""Federated methods, one a file."""

from raypfl.federation.method import METHODS, Method, ServerState
from raypfl.federation.task import Task
from raypfl.methods.clustered_models.cfl import CFL
from raypfl.methods.clustered_models.fedem import FedEM
from raypfl.methods.clustered_models.ifca import IFCA
from raypfl.methods.fair.afl import AFL
from raypfl.methods.fair.qffl import QFFL
from raypfl.methods.fair.term import TERM
from raypfl.methods.global_model.creff import CReFF
from raypfl.methods.global_model.extra_images import ExtraImages
from raypfl.methods.global_model.fedacg import FedACG
from raypfl.methods.global_model.fedavg import FedAvg
from raypfl.methods.global_model.feddc import FedDC
from raypfl.methods.global_model.feddf import FedDF
from raypfl.methods.global_model.feddyn import FedDyn
from raypfl.methods.global_model.fedexp import FedExP
from raypfl.methods.global_model.fednh import FedNH
from raypfl.methods.global_model.fednova import FedNova
from raypfl.methods.global_model.fedprox import FedProx
from raypfl.methods.global_model.fedptr import FedPTR, FedPTRServer
from raypfl.methods.global_model.fedsam import FedASAM, FedSAM
from raypfl.methods.global_model.fedspeed import FedSpeed
from raypfl.methods.global_model.mime import Mime, MimeLite
from raypfl.methods.global_model.moon import Moon
from raypfl.methods.global_model.scaffold import Scaffold
from raypfl.methods.lora.fedsa_lora import FedSALoRA
from raypfl.methods.lora.ffa_lora import FFALoRA
from raypfl.methods.lora.flexlora import FlexLoRA
from raypfl.methods.mixed_models.apple import APPLE
from raypfl.methods.mixed_models.fedamp import FedAMP, HeurFedAMP
from raypfl.methods.mixed_models.fedfomo import FedFomo
from raypfl.methods.mixed_models.fedpac import FedPAC
from raypfl.methods.mixed_models.pfedgraph import PFedGraph
from raypfl.methods.mixed_models.pfedsim import PFedSim
from raypfl.methods.partial_models.fedas import FedAS
from raypfl.methods.partial_models.fedcp import FedCP
from raypfl.methods.partial_models.feddbe import FedDBE
from raypfl.methods.partial_models.fedgh import FedGH
from raypfl.methods.partial_models.fedrod import FedROD
from raypfl.methods.partial_models.floco import Floco, FlocoPlus
from raypfl.methods.partial_models.gpfl import GPFL
from raypfl.methods.partial_models.partial import PartialPersonalization
from raypfl.methods.partial_models.partial_presets import (
    FedAlt,
    FedBABU,
    FedBN,
    FedPer,
    FedRep,
    FedSim,
    LGFedAvg,
)
from raypfl.methods.partial_models.pfedfda import PFedFDA
from raypfl.methods.personal_models.apfl import APFL
from raypfl.methods.personal_models.ditto import Ditto
from raypfl.methods.personal_models.fedala import FedALA
from raypfl.methods.personal_models.fedavg_ft import FedAvgFT
from raypfl.methods.personal_models.feddistill import FedDistill
from raypfl.methods.personal_models.fedkd import FedKD
from raypfl.methods.personal_models.fedphp import FedPHP
from raypfl.methods.personal_models.fedproto import FedProto
from raypfl.methods.personal_models.knn_per import KNNPer
from raypfl.methods.personal_models.local import Local
from raypfl.methods.personal_models.mtl import MTL
from raypfl.methods.personal_models.pefll import PeFLL
from raypfl.methods.personal_models.perada import PerAda
from raypfl.methods.personal_models.perfedavg import PerFedAvg
from raypfl.methods.personal_models.pfedhn import PFedHN
from raypfl.methods.personal_models.pfedme import PFedMe
from raypfl.methods.sub_networks.fedrolex import FedRolex
from raypfl.methods.sub_networks.fjord import FjORD
from raypfl.methods.sub_networks.heterofl import HeteroFL

__all__ = [
    "AFL",
    "APFL",
    "APPLE",
    "CFL",
    "GPFL",
    "IFCA",
    "METHODS",
    "MTL",
    "QFFL",
    "TERM",
    "CReFF",
    "Ditto",
    "ExtraImages",
    "FFALoRA",
    "FedACG",
    "FedALA",
    "FedAMP",
    "FedAS",
    "FedASAM",
    "FedAlt",
    "FedAvg",
    "FedAvgFT",
    "FedBABU",
    "FedBN",
    "FedCP",
    "FedDBE",
    "FedDC",
    "FedDF",
    "FedDistill",
    "FedDyn",
    "FedEM",
    "FedExP",
    "FedFomo",
    "FedGH",
    "FedKD",
    "FedNH",
    "FedNova",
    "FedPAC",
    "FedPHP",
    "FedPTR",
    "FedPTRServer",
    "FedPer",
    "FedProto",
    "FedProx",
    "FedROD",
    "FedRep",
    "FedRolex",
    "FedSALoRA",
    "FedSAM",
    "FedSim",
    "FedSpeed",
    "FjORD",
    "FlexLoRA",
    "Floco",
    "FlocoPlus",
    "HeteroFL",
    "HeurFedAMP",
    "KNNPer",
    "LGFedAvg",
    "Local",
    "Method",
    "Mime",
    "MimeLite",
    "Moon",
    "PFedFDA",
    "PFedGraph",
    "PFedHN",
    "PFedMe",
    "PFedSim",
    "PartialPersonalization",
    "PeFLL",
    "PerAda",
    "PerFedAvg",
    "Scaffold",
    "ServerState",
    "Task",
]
