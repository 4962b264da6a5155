"""Runs as one HTML page that needs no other file: to be shown, printed, sent and kept."""

from raypfl.report.page import write
from raypfl.report.runs import found

__all__ = ["found", "write"]
