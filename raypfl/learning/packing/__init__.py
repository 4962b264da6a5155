"""Runs that advance together in one process: clients of several runs train in the same vectorised steps.

Each run has a server and a thread of its own, and only one of them computes at a time. A run whose clients are to train
waits, until all runs wait: then the trainings that differ in their numbers only are joined, row by row. Every row keeps
the bits that it has alone.
"""

from raypfl.learning.packing.packer import Packed, Packer

__all__ = ["Packed", "Packer"]
