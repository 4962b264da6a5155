"""What a forward pass of a network costs: multiplications and memory, counted layer by layer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

_PRODUCTS = (nn.Linear, _ConvNd)
"""Layers that multiply with a weight."""

VECTORS = 6
"""Model vectors of a client in training: what it receives and trains, gradients, the optimizer's memory, its state."""

ACTIVATIONS = 2
"""Numbers for each output of a layer: the output, which the backward pass needs, and its gradient."""


@dataclass
class Cost:
    """The cost of a sample's forward pass.

    Attributes
    ----------
    multiplications : in linear and convolution layers.
    outputs : the numbers that all layers return.
    """

    multiplications: int = 0
    outputs: int = 0

    def client_bytes(self, parameters: int, batch: int) -> int:
        """Return roughly the bytes that a client needs for a training step in fp32 on `batch` samples."""
        return 4 * (VECTORS * parameters + ACTIVATIONS * self.outputs * batch)


@contextlib.contextmanager
def measured_cost(network: nn.Module, samples: int) -> Iterator[Cost]:
    """While active, count what a network does; in this time it must be called on `samples` samples in all."""
    cost = Cost()

    def count(layer: nn.Module, inputs: Any, output: Any) -> None:
        if not isinstance(output, torch.Tensor):
            return
        cost.outputs += output.numel()
        if isinstance(layer, _PRODUCTS):
            # The weight's first axis is that of the outputs, or of the inputs of a transposed convolution. Each number
            # on that side takes part in as many products as a row of the weight has entries.
            side = inputs[0] if isinstance(layer, _ConvTransposeNd) else output
            cost.multiplications += layer.weight.numel() * (side.numel() // len(layer.weight))

    # A layer with an adapter has children, and multiplies by itself, too.
    layers = [module for module in network.modules() if isinstance(module, _PRODUCTS) or not list(module.children())]
    hooks = [layer.register_forward_hook(count) for layer in layers]
    try:
        yield cost
    finally:
        for hook in hooks:
            hook.remove()
        cost.outputs //= samples
        cost.multiplications //= samples
