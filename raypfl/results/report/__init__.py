"""Runs as one HTML page that needs no other file: to be shown, printed, sent and kept."""

from raypfl.results.report.page import write
from raypfl.results.report.runs import found

__all__ = ["found", "write"]
