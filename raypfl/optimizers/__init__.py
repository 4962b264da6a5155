"""Local optimizers: update rules on flat vectors, one in each file."""

from raypfl.optimizers.adam import Adam, AdamW
from raypfl.optimizers.base import OPTIMIZERS, LocalOptimizer, Memory
from raypfl.optimizers.draws import Draws
from raypfl.optimizers.sgd import SGD
from raypfl.optimizers.update import Update

__all__ = ["OPTIMIZERS", "SGD", "Adam", "AdamW", "Draws", "LocalOptimizer", "Memory", "Update"]
