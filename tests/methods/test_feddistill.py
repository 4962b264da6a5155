"""Federated distillation equals a loop by hand, and local training in its limiting cases."""

from __future__ import annotations

import numpy as np
import torch
from torch.nn import functional as F

from raypfl.methods import FedDistill, Local
from tests.support.federation import (
    CLASSES,
    FP64,
    ONE_STEP,
    ROUNDS,
    Federation,
    as_module,
    both_executors,
    both_networks,
    client_states,
    run_method,
    small_mlp,
)


@both_executors
@both_networks
def test_without_distance_it_is_training_alone_to_the_bit(factory, executor):
    alone, distilled = (run_method(m, factory=factory, executor=executor) for m in (Local(), FedDistill(gamma=0.0)))
    assert torch.equal(client_states(distilled, "model"), client_states(alone, "personal"))
    assert not distilled.warnings


@both_executors
def test_rounds_of_some_clients_by_hand_leave_each_clients_own_logits_out(executor):
    gamma = 0.7
    fed = Federation(method=FedDistill(gamma=gamma), executor=executor, training=ONE_STEP, group_size=2)
    fed.labels[fed.split[1]] = 0
    fed.labels[fed.split[2]] = np.arange(11) % 2
    fed.run_rounds(*ROUNDS)

    nets = [as_module(small_mlp, fed.model.init(fed.seed)) for _ in range(4)]
    # Of each class, what the clients of the last cohort that had it sent.
    sent: dict[int, dict[int, torch.Tensor]] = {}
    for cohort in ROUNDS:
        replies: dict[int, dict[int, torch.Tensor]] = {}
        for client in cohort:
            x, y = fed.samples(client)
            outputs = nets[client](x)
            distances = torch.zeros(len(y), dtype=torch.float64)
            for i, label in enumerate(y.tolist()):
                others = [logits for owner, logits in sent.get(label, {}).items() if owner != client]
                if others:
                    distances[i] = (outputs[i] - sum(others) / len(others)).square().mean()
            loss = F.cross_entropy(outputs, y) + gamma * distances.mean()
            gradients = torch.autograd.grad(loss, list(nets[client].parameters()))
            with torch.no_grad():
                for p, gradient in zip(nets[client].parameters(), gradients, strict=True):
                    p -= 0.1 * gradient
                for label in y.unique().tolist():
                    replies.setdefault(label, {})[client] = nets[client](x)[y == label].mean(0)
        sent |= replies

    expected = torch.stack([torch.cat([p.detach().reshape(-1) for p in net.parameters()]) for net in nets])
    torch.testing.assert_close(client_states(fed, "model"), expected, rtol=1e-12, atol=1e-12)


def test_the_only_owner_of_a_class_learns_it_alone_and_messages_are_mean_logits():
    fed = Federation(method=FedDistill(gamma=5.0), sizes=(7, 4), training=FP64)
    alone = Federation(method=Local(), sizes=(7, 4), training=FP64)
    for federation in (fed, alone):
        federation.labels[federation.split[0]] = 0
        federation.labels[federation.split[1]] = 1
        federation.run_rounds([0, 1], [0, 1])

    assert torch.equal(client_states(fed, "model"), client_states(alone, "personal"))
    numbers = {(entry.direction, entry.name): entry.numbers for entry in fed.ledger.entries}
    down = {("down", "sums"): CLASSES * CLASSES, ("down", "owners"): CLASSES, ("down", "rounds"): CLASSES}
    assert numbers == down | {("up", "logits"): CLASSES}
