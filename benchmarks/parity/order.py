"""What fluke is told, and what its models are judged by. Imports torch, NumPy and raypfl's core alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Scores = dict[str, list[float]]
"""``accuracy`` and mean ``loss`` of each client's model on its own test samples, in the order of the clients."""


@dataclass(frozen=True)
class Order:
    """One run.

    Attributes
    ----------
    method, options, network : as raypfl has them.
    seed : of the mini-batches.
    same : whether they are those that raypfl draws from the seed, and all is done in double precision, so that rounding
        hides nothing. Else the system shuffles for itself, in single precision.
    files : the samples, as `benchmarks.peers.order.Shards` reads them.
    weights : file of the network's first weights.
    cohorts : the clients of each round.
    batch, lr, epochs : of local training.
    """

    method: str
    options: dict[str, Any]
    network: str
    seed: int
    same: bool
    files: str
    weights: str
    cohorts: list[list[int]]
    batch: int
    lr: float
    epochs: int


@torch.no_grad()
def judged(models: Sequence[Callable[[Tensor], Tensor]], tests: Sequence[tuple[Tensor, Tensor]]) -> Scores:
    """Each client's model on its own test samples."""
    accuracies, losses = [], []
    for model, (x, y) in zip(models, tests, strict=True):
        logits = model(x)
        accuracies.append((logits.argmax(1) == y).double().mean().item())
        losses.append(F.cross_entropy(logits, y).item())
    return {"accuracy": accuracies, "loss": losses}
