"""Descriptions of experiments and comparisons: read from YAML or Python, and checked before anything runs."""

from raypfl.experiment.comparison import experiments
from raypfl.experiment.experiment import Experiment

__all__ = ["Experiment", "experiments"]
