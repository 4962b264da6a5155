"""Local optimizers: how a step moves flat vectors, one rule a file."""

from raypfl.optimizers.adam import Adam, AdamW
from raypfl.optimizers.base import OPTIMIZERS, LocalOptimizer, Memory
from raypfl.optimizers.draws import Draws
from raypfl.optimizers.sgd import SGD
from raypfl.optimizers.update import Update

__all__ = ["OPTIMIZERS", "SGD", "Adam", "AdamW", "Draws", "LocalOptimizer", "Memory", "Update"]
