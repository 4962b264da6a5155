"""Runs that differ in their seeds or numbers and advance together: which do, and how they are carried out."""

from raypfl.runs.together.parts import Expectation, expected, parts, paying_parts
from raypfl.runs.together.places import MOST_RUNS, Place, run_similar, run_together

__all__ = ["MOST_RUNS", "Expectation", "Place", "expected", "parts", "paying_parts", "run_similar", "run_together"]
