"""A bare PyTorch loop in one process: what one writes for a single script, and nothing that one would leave out."""

from __future__ import annotations

import time

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.peers.local import fit
from benchmarks.peers.order import Order, Shards, Stamps, network


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
    """Every client's own model on its own tests: the forward passes alone, with no weight copied anywhere."""
    from torch.func import functional_call  # here, since it brings torch's compiler with it, which takes seconds

    shards, stamps = Shards(order.files, "test"), Stamps(order.report)
    net = network(order, shards)
    first = {name: tensor.detach() for name, tensor in net.named_parameters()}
    models = [{name: tensor + 1e-6 * client for name, tensor in first.items()} for client in range(order.clients)]
    with torch.inference_mode():
        while True:
            begin = time.monotonic()
            for client, weights in enumerate(models):
                x, y = shards.client(client)
                logits = functional_call(net, weights, (x,))
                (logits.argmax(1) == y).sum().item(), F.cross_entropy(logits, y, reduction="sum").item()
            stamps.add(begin)
