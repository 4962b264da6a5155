"""Evaluation of models, and selection of the best round."""

from raypfl.evaluation.measures import Measures
from raypfl.evaluation.protocols import PROTOCOLS, refuse_untestable
from raypfl.evaluation.selection import Selection, deciding, select
from raypfl.evaluation.tables import summarise, tabulate

__all__ = [
    "PROTOCOLS",
    "Measures",
    "Selection",
    "deciding",
    "refuse_untestable",
    "select",
    "summarise",
    "tabulate",
]
