"""Descriptions of experiments and comparisons: read from YAML or Python, and checked before anything runs."""

from raypfl.config.comparison import experiments
from raypfl.config.experiment import Experiment

__all__ = ["Experiment", "experiments"]
