"""raypfl: personalized federated learning, simulated on Ray."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from raypfl.errors import RaypflError

if TYPE_CHECKING:
    from raypfl import augmentation as augmentation
    from raypfl import methods as methods
    from raypfl import objectives as objectives
    from raypfl import optimizers as optimizers
    from raypfl import report as report
    from raypfl.config import Experiment as Experiment
    from raypfl.federation import Result as Result
    from raypfl.federation import resume as resume
    from raypfl.federation import run as run
    from raypfl.federation import session as session
    from raypfl.federation.batches import Batch as Batch
    from raypfl.messages import Broadcast as Broadcast
    from raypfl.messages import Each as Each
    from raypfl.messages import Mean as Mean
    from raypfl.messages import Scatter as Scatter
    from raypfl.messages import Sum as Sum
    from raypfl.messages import per_client as per_client
    from raypfl.methods import METHODS as METHODS
    from raypfl.methods import Method as Method
    from raypfl.methods import Task as Task
    from raypfl.models import MODELS as MODELS
    from raypfl.models import FlatModel as FlatModel
    from raypfl.models import Predictor as Predictor
    from raypfl.tracking.mlflow import MLflowListener as MLflowListener
    from raypfl.tracking.mlflow_models import trained_models as trained_models

__version__ = "0.1.0"

_HOMES = {
    "Batch": "raypfl.federation.batches",
    "Broadcast": "raypfl.messages",
    "Each": "raypfl.messages",
    "Experiment": "raypfl.config",
    "FlatModel": "raypfl.models",
    "METHODS": "raypfl.methods",
    "MLflowListener": "raypfl.tracking.mlflow",
    "MODELS": "raypfl.models",
    "Mean": "raypfl.messages",
    "Method": "raypfl.methods",
    "Predictor": "raypfl.models",
    "Result": "raypfl.federation",
    "Scatter": "raypfl.messages",
    "Sum": "raypfl.messages",
    "Task": "raypfl.methods",
    "per_client": "raypfl.messages",
    "resume": "raypfl.federation",
    "run": "raypfl.federation",
    "session": "raypfl.federation",
    "trained_models": "raypfl.tracking.mlflow_models",
}

_MODULES = ("augmentation", "methods", "objectives", "optimizers", "report")

__all__ = ["RaypflError", "__version__", *_HOMES, *_MODULES]


def __getattr__(name: str) -> Any:
    # Imported on first use: the core runs with torch and NumPy alone, and `raypfl --help` needs neither.
    import importlib

    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name in _MODULES:
        return importlib.import_module(f"raypfl.{name}")
    raise AttributeError(f"module 'raypfl' has no attribute {name!r}")
