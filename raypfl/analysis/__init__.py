"""Analyses: studies of training that do not change it."""

from raypfl.analysis import distillation, flntk, ntk  # noqa: F401 - they register themselves
from raypfl.analysis.base import ANALYSES, AnalysedRound, Analysis
from raypfl.clients.observation import LocalStep, Observation

__all__ = ["ANALYSES", "AnalysedRound", "Analysis", "LocalStep", "Observation"]
