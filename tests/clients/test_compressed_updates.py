"""Compressed updates in whole rounds and runs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import raypfl
from raypfl.clients.compression import Compressor
from raypfl.clients.compression.compressors import QSGD, Half, Sign, TopK
from raypfl.common.errors import ConfigError, MethodError, RaypflError
from raypfl.experiment.comparison import experiments
from raypfl.methods import METHODS, FedAvg
from tests.methods.test_every_method import changes_for
from tests.support.federation import FP32, FP64, Federation
from tests.support.runs import ON_RAY, TIMED, Interrupt, experiment, same_tables

COHORTS = ([0, 1, 3], [2, 3, 4], [0, 2, 4], [1, 3, 4])


class Remembering(FedAvg):
    """FedAvg whose clients remember what they trained."""

    def train(self, clients, theta):
        reply = super().train(clients, theta)
        clients.state["trained"] = reply["theta"].rows
        return reply


class Each(FedAvg):
    """Sends its model as a row, and twice what it learned as a sum that no argument is compared with."""

    def train(self, clients, theta):
        trained = clients.sgd(clients.loss, theta)
        return {"theta": raypfl.Each(trained), "moved": raypfl.Sum(2 * (trained - theta))}

    def round(self, server, cohort):
        server["reply"] = cohort.run(self.train, theta=server["theta"])
        server["theta"] = server["reply"]["theta"].mean(0)


def federation(method: FedAvg, **options: Any) -> Federation:
    return Federation(sizes=(7, 4, 11, 7, 2), method=method, **options)


def bytes_up(source: Federation) -> int:
    return sum(entry.clients * entry.bytes for entry in source.ledger.entries if entry.direction == "up")


@pytest.mark.parametrize("group_size", [None, 1, 2])
@pytest.mark.parametrize("compressor", [TopK(fraction=0.1), Sign(), Sign(error_feedback=False)])
def test_rounds_are_those_of_a_loop_in_which_each_client_keeps_what_was_lost(compressor, group_size):
    fed = federation(Remembering(), compressor=compressor, group_size=group_size, training=FP64)
    theta = fed.method.start(fed.task)["theta"].numpy().astype(np.float64)
    errors = {client: np.zeros(len(theta)) for client in range(5)}

    for cohort in COHORTS:
        server = fed.run_rounds(cohort)
        total = np.zeros(len(theta))

        for client in cohort:
            update = fed.state_of(client)["trained"] - theta + errors[client]
            read = np.zeros(len(theta))
            if isinstance(compressor, TopK):
                largest = np.argsort(-np.abs(update))[: -(-len(theta) // 10)]
                read[largest] = update[largest]
            else:
                read = np.abs(update).mean() * np.sign(update)
            if compressor.error_feedback:
                errors[client] = update - read
            total += fed.sizes[client] * (theta + read)

        theta = total / sum(fed.sizes[client] for client in cohort)
        # Messages have numbers of 32 bits.
        assert server["theta"].numpy() == pytest.approx(theta, abs=1e-7)
        theta = server["theta"].numpy().copy()


@pytest.mark.parametrize("compressor", [QSGD(), TopK(fraction=0.05)])
def test_groups_change_no_bit_and_messages_are_as_long_as_they_are_encoded(compressor):
    whole = federation(FedAvg(), compressor=compressor, training=FP32)
    alone = federation(FedAvg(), compressor=compressor, training=FP32, group_size=1, executor="sequential")
    for fed in (whole, alone):
        fed.run_rounds(*COHORTS)
    assert torch.allclose(whole.server["theta"], alone.server["theta"], rtol=0.05, atol=1e-3)

    size = whole.model.size
    length = len(compressor.encode(np.ones(size, np.float32), np.random.default_rng(0)))
    for entry in whole.ledger.entries:
        assert entry.bytes == (length if entry.direction == "up" else 4 * size) and entry.numbers == size
    assert bytes_up(whole) == bytes_up(alone) == 12 * length


def test_rows_are_compressed_and_what_is_no_update_is_sent_whole():
    plain = federation(Each())
    fed = federation(Each(), compressor=TopK(fraction=0.1))
    reply = fed.run_rounds(None)["reply"]
    start = fed.method.start(fed.task)["theta"]
    assert ((reply["theta"] != start).sum(1) == -(-fed.model.size // 10)).all()
    assert torch.equal(reply["moved"], plain.run_rounds(None)["reply"]["moved"])

    sizes = {entry.name: entry.bytes for entry in fed.ledger.entries if entry.direction == "up"}
    assert sizes["moved"] == 8 * fed.model.size > 10 * sizes["theta"]


@pytest.mark.parametrize("rows", [lambda trained: trained[0], lambda trained: trained.mean(0, keepdim=True)])
def test_a_reply_without_a_row_for_each_client_is_refused_as_without_compression(rows):
    class OneModel(FedAvg):
        def train(self, clients, theta):
            return {"theta": raypfl.Mean(rows(clients.sgd(clients.loss, theta)))}

    with pytest.raises(MethodError, match="but the group has 5 clients: its first axis must run over them"):
        federation(OneModel(), compressor=Half(error_feedback=True)).run_rounds(None)


def test_a_message_that_would_not_become_shorter_is_sent_as_it_is():
    class Longer(Half):
        def encode(self, update, generator):
            return bytes(4 * len(update))

    fed = federation(FedAvg(), compressor=Longer(error_feedback=True), training=FP32)
    plain = federation(FedAvg(), training=FP32)
    assert torch.equal(fed.run_rounds(*COHORTS)["theta"], plain.run_rounds(*COHORTS)["theta"])
    assert bytes_up(fed) == bytes_up(plain)


def test_a_compressor_of_a_users_own_is_told_what_it_must_return():
    class Text(Compressor):
        def encode(self, update, generator):
            return "short"

        def decode(self, message, size):
            return np.zeros(size, np.float32)

    class Short(Half):
        def decode(self, message, size):
            return np.zeros(3)

    with pytest.raises(
        MethodError,
        match=r"Text\.encode \(test_compressed_updates\.py, line \d+\) returned a str; it must return bytes",
    ):
        federation(FedAvg(), compressor=Text()).run_rounds(None)
    with pytest.raises(
        MethodError, match=r"Short\.decode \(test_.*, line \d+\) returned \[3\]; it must return an array of \[\d+\]"
    ):
        federation(FedAvg(), compressor=Short()).run_rounds(None)


def test_a_compressor_that_takes_other_arguments_is_refused_before_the_run(tmp_path):
    class Forgetful(Half):
        def encode(self, update):
            return b""

    with pytest.raises(ConfigError, match=r"encode .*is called with \(update, generator\), but takes \(update\)"):
        experiment(tmp_path).replace(compression=Forgetful())


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("compression", ["{name: top_k, fraction: 0.05}", "qsgd"])
def test_a_compressed_run_has_the_same_bits_on_actors_and_after_a_stop(tmp_path, compression):
    changes = {"compression": compression, "rounds": 4}
    expected = raypfl.run(experiment(tmp_path, **changes))
    on_actors = raypfl.run(experiment(tmp_path, **changes, **ON_RAY))
    assert on_actors.weights_hash == expected.weights_hash and same_tables(on_actors, expected)

    stopped = raypfl.run(experiment(tmp_path, **changes), listeners=[Interrupt(3)])
    resumed = raypfl.resume(stopped.run_dir)
    assert resumed.weights_hash == expected.weights_hash and same_tables(resumed, expected)


def test_late_replies_are_compressed_too(tmp_path):
    changes = TIMED | {"method": "fedavg", "asynchronous__buffer": 3, "rounds": 6, "cohort__size": 6}
    plain = raypfl.run(experiment(tmp_path, **changes))
    result = raypfl.run(experiment(tmp_path, **changes, compression="{name: top_k, fraction: 0.02}"))
    up = [sum(run.rounds["bytes_up"].to_pylist()) for run in (result, plain)]
    assert 0 < up[0] < 0.05 * up[1] and result.weights_hash != plain.weights_hash


def test_shorter_messages_take_less_simulated_time(tmp_path):
    changes = TIMED | {"method": "fedavg", "rounds": 2}
    plain = raypfl.run(experiment(tmp_path, **changes))
    result = raypfl.run(experiment(tmp_path, **changes, compression="sign"))
    times = [run.rounds["simulated_time"].to_pylist()[-1] for run in (result, plain)]
    assert times[0] < times[1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"privacy__secure_aggregation": True}, "privacy.secure_aggregation masks whole numbers of 64 bits"),
        ({"privacy__unit": "client", "privacy__noise": 1.0}, "privacy.unit=client bounds the updates that arrive"),
        ({"method": "pefll", "method__embedding": "linear"}, "compression has no effect on PeFLL"),
        ({"model": "{name: resnet10, width: 8}"}, "running statistics, such as those of batch norm"),
        ({"compression__fraction": 1.5}, "compression.fraction is 1.5; it must be above 0 and at most 1"),
    ],
)
def test_what_compression_cannot_do_is_refused_before_the_run(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        raypfl.run(experiment(tmp_path, compression="top_k", rounds=1, **changes))
    assert not list((tmp_path / "runs").glob("*/checkpoints"))


def test_compression_is_warned_of_where_clients_send_nothing(tmp_path):
    """As robust aggregation is: a comparison may have another method that sends something."""
    with pytest.warns(UserWarning, match="clients of Local send nothing to the server, so compression has no effect"):
        run = raypfl.run(experiment(tmp_path, method="local", compression="top_k", rounds=1))
    assert run.status == "finished"


def test_each_method_of_a_comparison_may_have_its_own():
    described = experiments(
        {"methods": ["fedavg", {"name": "fedavg", "settings": {"compression": {"name": "top_k", "fraction": 0.05}}}]}
    )
    assert [run.compression for run in described] == [None, TopK(fraction=0.05)]


@pytest.mark.thorough
@pytest.mark.parametrize("method", sorted(METHODS))
def test_every_method_runs_with_compression_or_is_refused_before_the_run(tmp_path, method):
    try:
        result = raypfl.run(experiment(tmp_path, compression="half", **changes_for(method)))
    except ConfigError as error:
        assert "compression has no effect" in str(error) or method == "feddbe"
    except RaypflError as error:
        raise AssertionError(method) from error
    else:
        assert result.round == 3
