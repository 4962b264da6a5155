"""Runs as one HTML page that needs no other file: to be shown, printed, sent and kept."""

from raypfl.results.report.page import refuse_file, write
from raypfl.results.report.runs import find_runs

__all__ = ["find_runs", "refuse_file", "write"]
