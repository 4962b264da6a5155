"""What training asks of a GPU: from step to step nothing crosses over and nothing waits, and rows are aligned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from raypfl.clients.clients import Clients
from raypfl.clients.group import ClientGroup
from raypfl.common.messages import per_client, unmarked
from raypfl.learning.augmentation import Crop, Cutout, Flip
from raypfl.learning.optimizers import SGD, Adam
from raypfl.learning.privacy import PrivacySettings
from raypfl.methods import Ditto
from tests.support.federation import FP32, Federation, NormalisedConv, dropping_mlp
from tests.support.pretend_gpu import pretend_gpu

CASES: dict[str, dict[str, Any]] = {
    "plain": {"training": replace(FP32, momentum=0.0)},
    "batch norm, momentum": {"factory": NormalisedConv},
    "dropout, adam": {"factory": dropping_mlp, "training": replace(FP32, optimizer=Adam(), momentum=0.0)},
    "augmentation": {"augmentation": [Crop(padding=1), Flip(), Cutout(size=2)]},
    "noise": {"privacy": PrivacySettings(noise=0.5, clip=1.0, delta=1e-3)},
}


def by_sgd(fed: Federation, group: ClientGroup | None = None) -> Tensor:
    clients = Clients(group or fed.group())

    def pull(p: Tensor, batch: Any, anchor: Tensor) -> Tensor:
        return (p - anchor).square().sum()

    return clients.sgd(clients.loss, clients.initial, penalty=pull, anchor=fed.model.parameters(clients.initial))


def by_minibatches(fed: Federation) -> Tensor:
    clients = fed.clients()
    theta = clients.initial.repeat(len(clients), 1)
    for batch in clients.minibatches():
        theta = batch.step(clients.loss, theta)
    return theta


def on_the_server(fed: Federation) -> Tensor:
    cohort = fed.cohort()
    clients = fed.clients()
    batches = cohort.pool("auxiliary").batches(3, steps=fed.training.steps, augment=True)
    taught = batches.with_targets(torch.zeros(batches._num_inputs, dtype=torch.int64))
    return cohort.sgd(clients.loss, clients.initial, taught, lr=0.1, optimizer=fed.training.local_optimizer)


WAYS: dict[str, tuple[Callable[[Federation], Tensor], str]] = {
    "sgd, one by one": (by_sgd, "sequential"),
    "sgd, together": (by_sgd, "vectorised"),
    "mini-batches, one by one": (by_minibatches, "sequential"),
    "mini-batches, together": (by_minibatches, "vectorised"),
    "the server": (on_the_server, "sequential"),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("way", WAYS)
def test_a_step_copies_nothing_and_waits_for_nothing(way, case):
    run, executor = WAYS[way]

    def train(steps: int, device: str) -> Tensor:
        fed = Federation(executor=executor, device=device, **{"training": FP32} | CASES[case])
        fed.training = replace(fed.training, epochs=1, steps=steps)
        return unmarked(run(fed)).cpu()

    expected = train(3, "cpu")
    with pretend_gpu() as record:
        trained = train(3, "cuda")
        uploads = list(record.uploads)
        waits = list(record.waits)
        train(2, "cuda")

    assert not record and record.waits == waits * 2
    # Where clients train together on mini-batches, the keys of a step's draws go along with it.
    uploads_of_a_step = 2 * len(uploads) - len(record.uploads)
    assert uploads_of_a_step == (way == "mini-batches, together")
    assert len(uploads) <= 3 + 2 * len(Federation().sizes)
    if case != "noise":  # which a GPU draws in another way
        assert torch.equal(trained, expected)


def test_broadcasts_rows_states_and_replies_go_to_a_gpu_from_pinned_memory():
    with pretend_gpu() as record:
        fed = Federation(method=Ditto(), device="cuda", training=FP32, group_size=2)
        fed.run_rounds([0, 1, 2], None)
    assert len(fed.states.refs(3)) == 1 and not record
    copies = [wait for wait in record.waits if "to cuda" in wait]
    assert record.uploads and not [wait for wait in copies if "raypfl/clients" in wait or "raypfl/federation" in wait]


def test_a_group_of_old_and_new_clients_gets_its_state_in_another_dtype_and_waits_for_nothing():
    states = [{"level": np.ones(2, np.float32)}, {}]
    with pretend_gpu() as record:
        clients = Federation(device="cuda", training=FP32).clients([0, 1], states=states)
        default = per_client(torch.full((2, 2), 0.1, dtype=torch.float64).to("cuda"))
        waits = list(record.waits)
        rows = clients.state.get("level", default=default)
        assert record.waits == waits and len(record.uploads) == 3
    assert rows.tolist() == [[1, 1], [0.1, 0.1]] and not record


class Watching(SGD):
    """SGD with momentum that notes the addresses of what it steps on."""

    def step_(self, theta, grad, memory, lr):
        for tensor in (theta, grad, *memory.values()):
            ADDRESSES.extend(row.data_ptr() for row in tensor.reshape(-1, theta.shape[-1]))
        super().step_(theta, grad, memory, lr)


ADDRESSES: list[int] = []


@pytest.mark.parametrize("way", [way for way in WAYS if way != "the server"])
def test_rows_of_models_gradients_and_memories_are_aligned(way):
    run, executor = WAYS[way]
    ADDRESSES.clear()
    training = replace(FP32, optimizer=Watching(momentum=0.9), momentum=0.0)
    with pretend_gpu() as record:
        fed = Federation(executor=executor, training=training, device="cuda")
        run(fed)
    assert fed.model.num_parameters % 4 and not record
    assert len(ADDRESSES) >= 3 * len(fed.sizes) and not any(address % 16 for address in ADDRESSES)
