"""The sections of an experiment: the dataclasses of their settings, and the registries of their components."""

from __future__ import annotations

from raypfl.clients.compression import COMPRESSORS
from raypfl.common.registry import Registry
from raypfl.data import PARTITIONS
from raypfl.data.datasets import DATASETS, DataConfig
from raypfl.devices import AVAILABILITY_MODELS, HARDWARE
from raypfl.devices.settings import DeviceSettings
from raypfl.evaluation.settings import EvaluationSettings
from raypfl.experiment.settings import CheckpointSettings, ModelSettings, RaySettings, TrackingSettings
from raypfl.federation.asynchronous.settings import AsynchronousSettings
from raypfl.federation.robustness import AGGREGATIONS, ATTACKS
from raypfl.federation.selection import SELECTIONS
from raypfl.federation.settings import CohortSettings, EngineSettings, FailureSettings
from raypfl.learning.optimizers import OPTIMIZERS
from raypfl.learning.privacy import PrivacySettings
from raypfl.learning.settings import TrainingSettings
from raypfl.methods import METHODS
from raypfl.models import MODELS

SECTIONS: dict[str, type] = {
    "data": DataConfig,
    "model": ModelSettings,
    "cohort": CohortSettings,
    "devices": DeviceSettings,
    "asynchronous": AsynchronousSettings,
    "training": TrainingSettings,
    "evaluation": EvaluationSettings,
    "engine": EngineSettings,
    "ray": RaySettings,
    "checkpoint": CheckpointSettings,
    "tracking": TrackingSettings,
    "failures": FailureSettings,
    "privacy": PrivacySettings,
}
"""Section -> dataclass of its settings."""

COMPONENTS: dict[tuple[str, ...], tuple[Registry, str]] = {
    ("data",): (DATASETS, DataConfig.name),
    ("partition",): (PARTITIONS, "dirichlet"),
    ("method",): (METHODS, "fedavg"),
    ("model",): (MODELS, ModelSettings.name),
    ("training", "optimizer"): (OPTIMIZERS, "sgd"),
    ("attack",): (ATTACKS, "sign_flip"),
    ("aggregation",): (AGGREGATIONS, "median"),
    ("compression",): (COMPRESSORS, "top_k"),
    ("cohort", "selection"): (SELECTIONS, "oort"),
    ("devices", "hardware"): (HARDWARE, "lognormal"),
    ("devices", "availability"): (AVAILABILITY_MODELS, "idl"),
}
"""Section that names a component -> its registry and default."""
