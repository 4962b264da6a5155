"""A bare PyTorch loop in one process, as one writes it for a single script."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.peers.order import Order, Shards, Stamps, fit, network

LAYOUTS = (torch.contiguous_format, torch.channels_last)
SAMPLED = 20
"""Clients whose forward passes decide between the layouts."""


def run(order: Order) -> None:
    if order.method == "evaluation":
        evaluate(order)
        return
    stamps, loop = Stamps(order.report), Loop(order)
    while True:
        loop.round()
        stamps.add()


class Loop:
    """Federated averaging; for Ditto, every client's own model is kept as a state dict."""

    def __init__(self, order: Order):
        self.order = order
        self.shards = Shards(order.files)
        self.net = network(order, self.shards)
        self.initial = self.weights = {name: tensor.clone() for name, tensor in self.net.state_dict().items()}
        self.personal = dict[int, dict[str, Tensor]]()
        self.draws = np.random.default_rng(0)

    def round(self) -> None:
        """One round of training."""
        order, net = self.order, self.net
        sums = {name: torch.zeros_like(tensor) for name, tensor in self.weights.items()}
        total = 0
        anchor = [self.weights[name] for name, _ in net.named_parameters()]
        for client in self.draws.choice(order.clients, order.cohort, replace=False):
            x, y = self.shards.client(client)
            if order.method == "ditto":
                net.load_state_dict(self.personal.get(client, self.initial))
                fit(net, x, y, order, anchor)
                self.personal[client] = {name: tensor.clone() for name, tensor in net.state_dict().items()}
            net.load_state_dict(self.weights)
            fit(net, x, y, order)
            for name, tensor in net.state_dict().items():
                sums[name].add_(tensor, alpha=len(y))
            total += len(y)
        self.weights = {name: tensor / total for name, tensor in sums.items()}


def evaluate(order: Order) -> None:
    """Every client's own model on its own test samples.

    The loop has the forward passes alone, which any evaluation must do: weights are in place, batches normalised, both
    in the faster layout, and freed memory is kept as raypfl keeps it.
    """
    from raypfl.engine.backends.processes import keep_freed_memory  # here: the other jobs start without raypfl

    keep_freed_memory()
    stamps = Stamps(order.report)
    pairs = prepared(order)
    while True:
        begin = time.monotonic()
        forward(pairs)
        stamps.add(begin)


@torch.inference_mode()
def forward(pairs: Sequence[tuple[nn.Module, Tensor]]) -> None:
    """The forward passes of all clients."""
    for model, batch in pairs:
        model(batch)


def prepared(order: Order) -> list[tuple[nn.Module, Tensor]]:
    """Each client's own network, in evaluation mode, and its normalised test samples ``[n, C, H, W]``."""
    shards = Shards(order.files, "test")
    net = network(order, shards).eval()
    batches = [shards.client(client)[0] for client in range(order.clients)]
    layout = faster_layout(net, batches[:SAMPLED])
    net.to(memory_format=layout)
    models = [copy.deepcopy(net) for _ in batches]
    with torch.no_grad():
        for client, model in enumerate(models):
            for parameter in model.parameters():
                parameter.add_(1e-6 * client)
    return [(m, batch.contiguous(memory_format=layout)) for m, batch in zip(models, batches, strict=True)]


def faster_layout(net: nn.Module, batches: Sequence[Tensor]) -> torch.memory_format:
    """The layout of images in which a network's forward passes take less time."""

    def seconds(layout: torch.memory_format) -> float:
        tried = copy.deepcopy(net).to(memory_format=layout)
        inputs = [batch.contiguous(memory_format=layout) for batch in batches]
        tried(inputs[0])
        begin = time.perf_counter()
        for x in inputs:
            tried(x)
        return time.perf_counter() - begin

    with torch.inference_mode():
        return min(LAYOUTS, key=lambda layout: min(seconds(layout) for _ in range(3)))
