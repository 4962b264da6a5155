"""A bare PyTorch loop in one process: what one writes for a single script, and nothing that one would leave out."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.peers.local import fit
from benchmarks.peers.order import Order, Shards, Stamps, network

LAYOUTS = (torch.contiguous_format, torch.channels_last)
SAMPLED = 20
"""Clients whose forward passes decide between the layouts."""


def run(order: Order) -> None:
    if order.method == "evaluation":
        evaluate(order)
    else:
        train(order)


def train(order: Order) -> None:
    """Federated averaging; for Ditto, every client's own model is kept as a state dict."""
    shards, stamps = Shards(order.files), Stamps(order.report)
    net = network(order, shards)
    weights = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    initial, personal = weights, dict[int, dict[str, Tensor]]()
    draws = np.random.default_rng(0)
    while True:
        sums = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
        total = 0
        anchor = [weights[name] for name, _ in net.named_parameters()]
        for client in draws.choice(order.clients, order.cohort, replace=False):
            x, y = shards.client(client)
            if order.method == "ditto":
                net.load_state_dict(personal.get(client, initial))
                fit(net, x, y, order, anchor)
                personal[client] = {name: tensor.clone() for name, tensor in net.state_dict().items()}
            net.load_state_dict(weights)
            fit(net, x, y, order)
            for name, tensor in net.state_dict().items():
                sums[name].add_(tensor, alpha=len(y))
            total += len(y)
        weights = {name: tensor / total for name, tensor in sums.items()}
        stamps.add()


def evaluate(order: Order) -> None:
    """Every client's own model on its own tests: the forward passes alone, which is what any evaluation has to do.

    Nothing else is left in the loop: modules have their weights in place, batches are normalised, both are in the
    faster layout, and memory is kept as raypfl keeps it.
    """
    from raypfl.backends.allocator import keep_freed_memory  # here: start-up of other jobs is a bare loop's

    keep_freed_memory()
    stamps = Stamps(order.report)
    pairs = prepared(order)
    with torch.inference_mode():
        while True:
            begin = time.monotonic()
            for model, batch in pairs:
                model(batch)
            stamps.add(begin)


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

    @torch.inference_mode()
    def seconds(layout: torch.memory_format) -> float:
        tried = copy.deepcopy(net).to(memory_format=layout)
        inputs = [batch.contiguous(memory_format=layout) for batch in batches]
        tried(inputs[0])
        begin = time.perf_counter()
        for x in inputs:
            tried(x)
        return time.perf_counter() - begin

    return min(LAYOUTS, key=lambda layout: min(seconds(layout) for _ in range(3)))
