"""Runs as one HTML page that needs no other file: to be shown, printed, sent and kept."""

from raypfl.results.report.page import write
from raypfl.results.report.runs import find_runs

__all__ = ["find_runs", "write"]
