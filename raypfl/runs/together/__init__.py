"""Runs that differ in their seeds and advance together: which do, and how they are carried out."""

from raypfl.runs.together.places import Place, parts, run_together

__all__ = ["Place", "parts", "run_together"]
