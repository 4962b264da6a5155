"""Runs in simulated time: what a turn is, what is recorded, and the same bits through a stop and partial work."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import raypfl
from raypfl.clients.clients import Clients
from raypfl.clients.group import ClientGroup
from raypfl.common.errors import ConfigError
from raypfl.devices import Training, Turn
from raypfl.engine.events import RoundFinished, Warned
from raypfl.engine.prepared import Prepared
from raypfl.federation.cohort_draw import draw_cohort
from raypfl.federation.method import Method
from raypfl.methods import FedAvg
from raypfl.methods.partial_models.partial_presets import LGFedAvg
from raypfl.methods.sub_networks.heterofl import HeteroFL
from raypfl.runs.choices.turn import turn_of
from raypfl.runs.replay import events_of
from tests.support.federation import FP64, Federation
from tests.support.runs import EVENTFUL, TIMED, Interrupt, experiment, same_tables


def prepared_turn(settings: raypfl.Experiment) -> tuple[Prepared, Turn]:
    data = settings.load_data()
    prepared = Prepared(settings, data)
    turn = turn_of(prepared)
    assert turn is not None
    return prepared, turn


@pytest.mark.parametrize(
    ("changes", "trainings"),
    [
        ({"method": "fedavg", "training__epochs": 3}, [Training(32, epochs=3)]),
        ({"method": "fedavg", "training__steps": 7, "training__smallest_batch": 2}, [Training(32, 1, 7, smallest=2)]),
        ({"method": "ditto"}, [Training(32, 1), Training(32, 1)]),
        ({"method": "apfl"}, [Training(32, 1, models=2)]),
        ({"method": "fedavg", "engine__executor": "vectorised"}, [Training(32, 1)]),
    ],
)
def test_a_turn_is_what_the_method_asks_of_a_client(tmp_path, changes, trainings):
    settings = experiment(tmp_path, **(TIMED | {"training__epochs": 1, "training__batch_size": 32} | changes))
    prepared, turn = prepared_turn(settings)
    (exchange,) = turn.exchanges
    assert list(exchange.trainings) == trainings
    assert exchange.down_bytes == exchange.up_bytes == 4 * prepared.model.size


def test_a_run_records_the_rounds_that_are_known_before_it(tmp_path):
    settings = experiment(tmp_path, **EVENTFUL, rounds=12)
    events = []
    result = raypfl.run(settings, listeners=[events.append])
    prepared, turn = prepared_turn(settings)
    turns = prepared.turns(turn)

    time = 0.0
    joules = 0.0
    rounds = result.rounds.to_pylist()
    finished = [event for event in events if isinstance(event, RoundFinished)]
    for row, event in zip(rounds, finished, strict=True):
        cohort = draw_cohort(settings.cohort, 12, settings.seed, row["round"], turns, time=time)
        time = cohort.ends
        joules += cohort.joules
        assert row["cohort"] == list(cohort.clients)
        assert (row["dropped"], row["late"]) == (len(cohort.dropped), len(cohort.late))
        assert (row["simulated_time"], row["simulated_seconds"], row["joules"]) == (time, cohort.seconds, cohort.joules)
        assert (event.simulated.time, event.simulated.joules_total) == (time, pytest.approx(joules))
    assert [event.simulated for event in events_of(result) if isinstance(event, RoundFinished)] == [
        event.simulated for event in finished
    ]
    assert sum(row["late"] for row in rounds) and sum(row["dropped"] for row in rounds)

    for row in rounds:
        down, up = ({}, {})
        for entry in result.ledger.to_pylist():
            if entry["round"] == row["round"]:
                (down if entry["direction"] == "down" else up)[entry["name"]] = entry
        assert down["theta"]["clients"] == row["clients"] + row["dropped"] + row["late"]
        assert down["theta"]["bytes"] == turn.down_bytes
        assert sum(entry["clients"] for entry in up.values()) == row["clients"]


def test_simulated_time_goes_on_where_a_stopped_run_left_it(tmp_path):
    whole = raypfl.run(experiment(tmp_path, **EVENTFUL))
    stopped = raypfl.run(experiment(tmp_path, **EVENTFUL), run_dir=tmp_path / "stopped", listeners=[Interrupt(3)])
    assert stopped.status == "stopped"
    resumed = raypfl.resume(tmp_path / "stopped")
    assert resumed.weights_hash == whole.weights_hash and same_tables(resumed, whole)


def test_devices_that_nothing_depends_on_change_no_bit(tmp_path):
    plain = raypfl.run(experiment(tmp_path, rounds=2))
    timed = raypfl.run(experiment(tmp_path, rounds=2, **TIMED))
    assert timed.weights_hash == plain.weights_hash
    assert "joules" not in plain.rounds.column_names


class SendsMore(Method):
    """A second exchange from round 4 on."""

    def round(self, server, cohort):
        super().round(server, cohort)
        if cohort.round > 3:
            super().round(server, cohort)


class SendsMoreLater(SendsMore, FedAvg):
    pass


class SendsMoreSlicesLater(SendsMore, HeteroFL):
    pass


class SendsMoreHeadsLater(SendsMore, LGFedAvg):
    pass


class ReceivesMoreLater(FedAvg):
    """A second model is sent to clients from round 4 on."""

    def round(self, server, cohort):
        second = server["theta"][: None if cohort.round > 3 else 0]
        self.step(server, cohort.run(self.train_with, theta=server["theta"], second=second)["theta"], cohort.task.model)

    def train_with(self, clients, theta, second):
        return self.train(clients, theta)


NETWORKS = "{name: heterogeneous, networks: [{name: mlp, hidden: [8]}, {name: mlp, hidden: [8, 8]}], feature_dim: 8}"


@pytest.mark.parametrize("method", [SendsMoreLater, ReceivesMoreLater])
def test_a_method_that_does_not_send_what_the_rehearsal_did_is_told_of_once(tmp_path, method):
    events = []
    settings = TIMED | {"method": f"{__name__}:{method.__name__}", "evaluation__every": 0}
    raypfl.run(experiment(tmp_path, **settings), listeners=[events.append])
    (warning,) = [event.text for event in events if isinstance(event, Warned) and "rehearsed" in event.text]
    assert warning.startswith(f"The messages of {method.__name__} differ in size from round to round")

    events.clear()
    raypfl.run(experiment(tmp_path, **(settings | {"method": "ditto"})), listeners=[events.append])
    assert not [event for event in events if isinstance(event, Warned) and "rehearsed" in event.text]


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("{name: CLASS, rates: [1, 0.5, 0.1]}", {}),
        ("{name: CLASS, rates: [1, 0.5, 0.1], assignment: dynamic}", {}),
        ("CLASS", {"model": NETWORKS}),
    ],
    ids=["slices", "slices drawn anew", "different networks"],
)
def test_other_messages_than_rehearsed_are_told_of_where_clients_differ_in_their_slices_or_networks(
    method, changes, tmp_path
):
    plain, sends_more = ("lg-fedavg", SendsMoreHeadsLater) if changes else ("heterofl", SendsMoreSlicesLater)
    for name, warnings in ((plain, 0), (f"{__name__}:{sends_more.__name__}", 1)):
        events = []
        settings = TIMED | changes | {"method": method.replace("CLASS", name), "evaluation__every": 0}
        raypfl.run(experiment(tmp_path, **settings), listeners=[events.append])
        assert sum(isinstance(event, Warned) and "rehearsed" in event.text for event in events) == warnings


def test_rounds_of_several_exchanges_cannot_go_on_without_the_late(tmp_path):
    with pytest.raises(ConfigError, match="PeFLL has 3 exchanges in a round, which cannot go on without"):
        raypfl.run(experiment(tmp_path, method="pefll", **EVENTFUL))


@pytest.mark.parametrize("executor", ["vectorised", "sequential"])
def test_a_share_of_the_work_is_the_first_steps_of_the_whole(executor):
    federation = Federation(executor=executor, sizes=(7, 4, 11, 7), training=replace(FP64, batch_size=2, epochs=3))
    clients = (0, 1, 2, 3)
    all_steps = np.array([12, 6, 18, 12])
    shares = np.array([0.5, 1.0, 0.99, 0.0])
    expected_steps = [6, 6, 17, 1]

    def group(ids: tuple[int, ...], work: np.ndarray | None) -> Clients:
        return Clients(ClientGroup(federation.context, ids, round=1, lr=0.1, work=work))

    start = federation.model.init(0)
    partial = group(clients, shares)
    assert group(clients, None).num_steps().tolist() == all_steps.tolist()
    assert partial.num_steps().tolist() == expected_steps
    trained = partial.sgd(partial.loss, start)
    by_minibatch = start
    for batch in partial.minibatches():
        by_minibatch = batch.step(partial.loss, by_minibatch)

    for client in clients:
        alone = group((client,), None)
        expected = alone.sgd(alone.loss, start, steps=expected_steps[client])[0]
        assert torch.allclose(trained[client], expected, rtol=1e-12)
        assert torch.allclose(by_minibatch[client], expected, rtol=1e-12)
