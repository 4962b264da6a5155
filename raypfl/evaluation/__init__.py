"""Evaluation of models, and selection of the best round."""

from raypfl.evaluation.protocols import PROTOCOLS, refuse_untestable
from raypfl.evaluation.run_metrics import Measures
from raypfl.evaluation.selection import BestRound, select, validation_aggregates
from raypfl.evaluation.tables import summarise, tabulate

__all__ = [
    "PROTOCOLS",
    "BestRound",
    "Measures",
    "refuse_untestable",
    "select",
    "summarise",
    "tabulate",
    "validation_aggregates",
]
