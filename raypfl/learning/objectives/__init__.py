"""Objectives: the loss that clients minimise, the metrics of their models, and the kind of targets."""

from __future__ import annotations

import numpy as np

from raypfl.learning.objectives.base import (
    KINDS,
    METRICS,
    OBJECTIVES,
    BinnedSums,
    Loss,
    Metric,
    Objective,
    OverAll,
    SampleMean,
    SampleSums,
    Scores,
)
from raypfl.learning.objectives.classification import Accuracy, CalibrationError, Classification
from raypfl.learning.objectives.multi_label import MultiLabel
from raypfl.learning.objectives.next_token import NextToken
from raypfl.learning.objectives.regression import Regression

__all__ = [
    "KINDS",
    "METRICS",
    "OBJECTIVES",
    "Accuracy",
    "BinnedSums",
    "CalibrationError",
    "Classification",
    "Loss",
    "Metric",
    "MultiLabel",
    "NextToken",
    "Objective",
    "OverAll",
    "Regression",
    "SampleMean",
    "SampleSums",
    "Scores",
    "default_objective",
    "kind_of",
]

_DEFAULTS: dict[str, type[Objective]] = {
    objective.targets: objective for objective in (Classification, MultiLabel, Regression, NextToken)
}


def kind_of(targets: np.ndarray) -> str:
    """Return the kind of a data set's targets, one of `KINDS`, by their dtype and shape."""
    if targets.dtype.kind == "f":
        return "numbers"
    if targets.ndim == 1:
        return "classes"
    return "labels" if targets.dtype == np.int8 else "tokens"


def default_objective(kind: str) -> Objective:
    """Return the default objective for a kind of targets."""
    return _DEFAULTS[kind]()
