"""An experiment's description: typed, checked early, YAML in and out."""

from raypfl.config.comparison import experiments
from raypfl.config.experiment import Experiment

__all__ = ["Experiment", "experiments"]
