"""raypfl: personalized federated learning, simulated on Ray."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from raypfl.common.errors import Diverged, RaypflError
from raypfl.common.version import __version__

if TYPE_CHECKING:
    from raypfl import methods as methods
    from raypfl.api import Result as Result
    from raypfl.api import resume as resume
    from raypfl.api import run as run
    from raypfl.api import trained_models as trained_models
    from raypfl.clients.clients import Clients as Clients
    from raypfl.common.messages import Broadcast as Broadcast
    from raypfl.common.messages import Each as Each
    from raypfl.common.messages import Mean as Mean
    from raypfl.common.messages import Scatter as Scatter
    from raypfl.common.messages import Sum as Sum
    from raypfl.common.messages import per_client as per_client
    from raypfl.experiment import Experiment as Experiment
    from raypfl.federation.cohort import Cohort as Cohort
    from raypfl.federation.method import ServerState as ServerState
    from raypfl.federation.method import ServerView as ServerView
    from raypfl.integrations.tracking.listener import MLflowListener as MLflowListener
    from raypfl.integrations.tuning.result import tune as tune
    from raypfl.learning import augmentation as augmentation
    from raypfl.learning import objectives as objectives
    from raypfl.learning import optimizers as optimizers
    from raypfl.learning.objectives.batch import Batch as Batch
    from raypfl.methods import METHODS as METHODS
    from raypfl.methods import Method as Method
    from raypfl.methods import Task as Task
    from raypfl.models import MODELS as MODELS
    from raypfl.models import FlatModel as FlatModel
    from raypfl.models import Predictor as Predictor
    from raypfl.results import report as report
    from raypfl.results.display.compare import compare as compare
    from raypfl.runs.driver import session as session
    from raypfl.trained.predictions import predict as predict
    from raypfl.trained.saved_model import load_model as load_model
    from raypfl.trained.serving.remote import RemoteRun as RemoteRun

_MODULE_OF_NAME = {
    "Batch": "raypfl.learning.objectives.batch",
    "Broadcast": "raypfl.common.messages",
    "Clients": "raypfl.clients.clients",
    "Cohort": "raypfl.federation.cohort",
    "Each": "raypfl.common.messages",
    "Experiment": "raypfl.experiment",
    "FlatModel": "raypfl.models",
    "METHODS": "raypfl.methods",
    "MLflowListener": "raypfl.integrations.tracking.listener",
    "MODELS": "raypfl.models",
    "Mean": "raypfl.common.messages",
    "Method": "raypfl.methods",
    "Predictor": "raypfl.models",
    "RemoteRun": "raypfl.trained.serving.remote",
    "Result": "raypfl.api",
    "Scatter": "raypfl.common.messages",
    "ServerState": "raypfl.federation.method",
    "ServerView": "raypfl.federation.method",
    "Sum": "raypfl.common.messages",
    "Task": "raypfl.methods",
    "compare": "raypfl.results.display.compare",
    "load_model": "raypfl.trained.saved_model",
    "per_client": "raypfl.common.messages",
    "predict": "raypfl.trained.predictions",
    "resume": "raypfl.api",
    "run": "raypfl.api",
    "session": "raypfl.runs.driver",
    "trained_models": "raypfl.api",
    "tune": "raypfl.integrations.tuning.result",
}

_MODULE_ALIASES = {
    "augmentation": "raypfl.learning.augmentation",
    "methods": "raypfl.methods",
    "objectives": "raypfl.learning.objectives",
    "optimizers": "raypfl.learning.optimizers",
    "report": "raypfl.results.report",
}

__all__ = ["Diverged", "RaypflError", "__version__", *_MODULE_OF_NAME, *_MODULE_ALIASES]


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    # Imported on first use: the core runs with torch and NumPy alone, and `raypfl --help` needs neither.
    import importlib

    if name in _MODULE_OF_NAME:
        return getattr(importlib.import_module(_MODULE_OF_NAME[name]), name)
    if name in _MODULE_ALIASES:
        return importlib.import_module(_MODULE_ALIASES[name])
    raise AttributeError(f"module 'raypfl' has no attribute {name!r}")
