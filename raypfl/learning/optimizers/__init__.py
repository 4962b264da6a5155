"""Local optimizers: update rules on flat vectors, one in each file."""

from raypfl.learning.optimizers.adam import Adam, AdamW
from raypfl.learning.optimizers.base import (
    OPTIMIZERS,
    LocalOptimizer,
    Memory,
    Perturb,
    SampleRule,
    StepDraws,
    Update,
    refuse_unusable_rule,
)
from raypfl.learning.optimizers.sgd import SGD

__all__ = [
    "OPTIMIZERS",
    "SGD",
    "Adam",
    "AdamW",
    "LocalOptimizer",
    "Memory",
    "Perturb",
    "SampleRule",
    "StepDraws",
    "Update",
    "refuse_unusable_rule",
]
