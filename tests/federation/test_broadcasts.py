"""An unchanged tensor that is sent down again is neither stored again nor copied again on the actors."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import pytest
import torch

from raypfl.common.errors import MethodError
from raypfl.common.messages import Broadcast, Mean
from raypfl.engine.backends.inline import Inline
from raypfl.federation.exchange.broadcasts import INLINE_BYTES
from raypfl.methods import Method
from tests.federation.test_cohort import exchange, federation
from tests.support.federation import Federation

LARGE = INLINE_BYTES // 8 + 1  # numbers of float64 of which a tensor is an object of its own
RING = 3


class Ring(Method):
    """The server keeps its last models and sends them down each round."""

    def start(self, task):
        return {"past": [torch.full((LARGE,), 0.0, dtype=torch.float64)], "seen": []}

    def round(self, server, cohort):
        reply = cohort.run(self.train, past=Broadcast(server["past"], charged=False))
        server["past"] = [*server["past"], reply["mean"]][-RING:]

    def train(self, clients, past):
        SEEN.append([(float(tensor[0]), tensor.data_ptr()) for tensor in past])
        return {"mean": Mean(past[-1].repeat(len(clients), 1) + 1, charged=False)}


SEEN: list[list[tuple[float, int]]] = []


class Counting(Inline):
    """Counts the large tensors that are put where groups can get at them."""

    large = 0

    def broadcast(self, arrays, inside=True):
        self.large += sum(array.nbytes > INLINE_BYTES for array in arrays.values())
        return super().broadcast(arrays, inside)


def test_a_ring_of_past_models_costs_one_model_a_round_on_the_server_and_on_the_clients():
    SEEN.clear()
    fed = Federation(method=Ring(), group_size=2, backend=Counting)
    for round in range(1, 7):
        fed.run_rounds(None)
        assert fed.runner.backend.large == round

    values = [[value for value, _ in past] for past in SEEN[::2]]
    assert values == [[0], [0, 1], [0, 1, 2], [1, 2, 3], [2, 3, 4], [3, 4, 5]]
    assert SEEN[::2] == SEEN[1::2]  # both groups are shown the same memory

    for before, after in zip(SEEN[::2], SEEN[2::2], strict=False):
        after_places = dict(after)
        assert all(after_places[value] == where for value, where in before if value in after_places)

    assert fed.ledger.entries == []


def sends(fed: Federation, **arguments: Any) -> float:
    """Return the first number of `theta` as clients see it."""
    return float(exchange(fed, **arguments)["theta"])


@pytest.mark.parametrize("changed", ["in place", "through data", "through NumPy", "in one bit"])
def test_a_tensor_that_was_changed_is_sent_again_however_it_was_changed(changed):
    first = lambda clients, theta: {"theta": Mean(theta[:1].repeat(len(clients), 1)[:, 0])}  # noqa: E731
    fed = federation(first, group_size=2, backend=Counting)
    theta = torch.zeros(LARGE, dtype=torch.float64)
    assert [sends(fed, theta=theta), sends(fed, theta=theta), fed.runner.backend.large] == [0, 0, 1]

    if changed == "in place":
        theta += 2
    elif changed == "through data":
        theta.data += 2
    elif changed == "through NumPy":
        theta.numpy()[0] = 2
    else:
        theta[-1] = -0.0

    assert sends(fed, theta=theta) == (0 if changed == "in one bit" else 2) and fed.runner.backend.large == 2


def test_a_tensor_not_sent_for_a_round_is_forgotten_on_the_server_and_on_the_clients():
    references = []

    def answer(clients, **arguments):
        references.extend(weakref.ref(tensor) for tensor in arguments.values())

    fed = federation(answer, backend=Counting)
    theta = torch.zeros(LARGE, dtype=torch.float64)
    exchange(fed, theta=theta)
    exchange(fed)

    assert fed.runner.backend.large == 1 and references[0]() is not None
    fed.round = 2
    exchange(fed)
    exchange(fed, small=torch.zeros(2))

    assert references[0]() is None
    exchange(fed, theta=theta)
    assert fed.runner.backend.large == 2


@pytest.mark.parametrize("size", [3, LARGE])
def test_changing_a_broadcast_in_place_is_refused_and_leaves_the_servers_tensor_unchanged(size):
    def answer(clients, past):
        past[1].add_(1)

    past = [torch.zeros(size, dtype=torch.float64) for _ in range(2)]
    fed = federation(answer)
    with pytest.raises(MethodError, match=r"changed past\[1\] in place"):
        exchange(fed, past=past)
    assert not past[1].any()

    fed.method.__dict__["answer"] = lambda clients, past: {"x": Mean(past[1].repeat(len(clients), 1))}
    assert not exchange(fed, past=past)["x"].any()


def test_a_list_of_tensors_goes_down_and_each_is_charged():
    def answer(clients, past, again):
        assert isinstance(past, list) and isinstance(again, tuple)
        return {"x": Mean((past[0].sum() + again[0].sum()).expand(len(clients)))}

    fed = federation(answer)
    three = torch.ones(3)
    four = torch.ones(4)
    assert float(exchange(fed, past=[three, four], again=Broadcast((four,), charged=1))["x"]) == 7

    down = [(e.name, e.numbers) for e in fed.ledger.entries if e.direction == "down"]
    assert down == [("past/0", 3), ("past/1", 4), ("again/0", 1)]
    with pytest.raises(MethodError, match="cannot send 'past', a list"):
        exchange(fed, past=[three, 1.0], again=())


def test_a_tensor_of_a_list_is_an_extra_that_all_clients_share():
    def answer(clients, past):
        anchored = clients.sgd(lambda p, b, anchor: (p - anchor[0]).square().sum(), clients.initial, anchor=past[0])
        return {"x": Mean(anchored)}

    fed = federation(answer)
    exchange(fed, past=[torch.zeros(5, fed.model.num_parameters, dtype=torch.float64)])  # as many rows as clients


def test_a_round_leaves_the_servers_tensors_unchanged():
    fed = federation(lambda clients, theta: {"theta": Mean(theta.repeat(len(clients), 1))})
    theta = torch.arange(float(LARGE), dtype=torch.float64)
    reply = exchange(fed, theta=theta)
    assert torch.equal(reply["theta"], theta) and np.array_equal(theta.numpy(), np.arange(LARGE))
