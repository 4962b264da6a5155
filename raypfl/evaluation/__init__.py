"""Protocols by which models are judged."""

from raypfl.evaluation.protocols import PROTOCOLS, score, summarise, tabulate

__all__ = ["PROTOCOLS", "score", "summarise", "tabulate"]
