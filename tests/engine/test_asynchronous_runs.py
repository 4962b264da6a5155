"""Runs with asynchronous rounds: the bits of synchronous ones where they must be, and their own through everything."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import raypfl
from raypfl import Mean
from raypfl.cli.app import app
from raypfl.common.errors import CheckpointError, ConfigError, LostState, RaypflError
from raypfl.engine.building.rounds import schedule_for
from raypfl.engine.events import Evaluated, Event, RoundFinished, RunStarted
from raypfl.federation.asynchronous.schedule import ScheduledClients, make_schedule
from raypfl.methods import METHODS, FedAvg
from raypfl.methods.global_model.mime import Mime
from raypfl.methods.partial_models.fedgh import FedGH
from raypfl.runs.choices import asynchronous_methods
from raypfl.runs.preparing import prepare
from raypfl.runs.replay import events_of
from tests.support.federated_methods import Marked
from tests.support.processes import exit_code
from tests.support.runs import ON_RAY, Interrupt, experiment, same_tables
from tests.support.tiers import with_quick

BUFFERED = {
    "devices__hardware": "lognormal",
    "cohort__size": 8,
    "asynchronous__buffer": 2,
    # Clients of several rounds train at once.
    "engine__executor": "vectorised",
}
BATCH_NORM = "{name: resnet10, width: 4, stem: cifar}"
EQUAL = {
    "devices__hardware": "{name: lognormal, speed_spread: 0, bandwidth_spread: 0}",
    "training__steps": 3,
    "training__batch_size": 1,
}


def buffered(tmp_path, **changes) -> raypfl.Experiment:
    return experiment(tmp_path, **{"rounds": 12, "partition__clients": 20} | BUFFERED | changes)


@pytest.mark.parametrize(
    ("method", "executor"),
    [("fedavg", "sequential"), ("ditto", "vectorised"), ("scaffold", "sequential"), ("fednh", "vectorised")],
)
def test_a_buffer_of_a_cohort_and_equal_durations_are_synchronous_rounds_to_the_bit(tmp_path, method, executor):
    settings = {"method": method, "engine__executor": executor, "rounds": 3, **EQUAL}
    synchronous = raypfl.run(experiment(tmp_path, **settings))
    asynchronous = raypfl.run(experiment(tmp_path, **settings, asynchronous__buffer=6))
    assert asynchronous.weights_hash == synchronous.weights_hash
    assert asynchronous.ledger.equals(synchronous.ledger)
    for name in ("loss", "bytes_up", "bytes_down", "clients", "dropped", "cohort"):
        assert asynchronous.rounds[name].equals(synchronous.rounds[name])
    np.testing.assert_allclose(asynchronous.rounds["simulated_time"], synchronous.rounds["simulated_time"])
    np.testing.assert_allclose(asynchronous.rounds["joules"], synchronous.rounds["joules"])


# Every round is evaluated, so that the run stops between two whose clients have trained together.
STOPPED = {"checkpoint__every": 0, "evaluation__every": 1, "devices__dropout": 0.1, "rounds": 8}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return raypfl.run(buffered(tmp_path_factory.mktemp("whole"), **STOPPED))


@pytest.mark.parametrize("stop", with_quick(range(1, 7), {3}))
def test_a_run_that_is_stopped_after_any_round_resumes_to_the_same_bits(tmp_path, whole, stop):
    stopped = raypfl.run(buffered(tmp_path, **STOPPED), listeners=[Interrupt(stop)])
    assert stopped.status == "stopped" and stopped.round == stop
    resumed = raypfl.resume(stopped.run_dir)
    assert resumed.weights_hash == whole.weights_hash and same_tables(resumed, whole)


def test_a_run_that_is_stopped_before_its_first_round_resumes_to_the_same_bits(tmp_path, whole):
    def interrupt(event: Event) -> None:
        if isinstance(event, RunStarted):
            signal.raise_signal(signal.SIGINT)

    stopped = raypfl.run(buffered(tmp_path, **STOPPED), listeners=[interrupt])
    assert stopped.status == "stopped" and stopped.round == 0
    resumed = raypfl.resume(stopped.run_dir)
    assert resumed.weights_hash == whole.weights_hash and same_tables(resumed, whole)


def test_a_run_whose_rounds_are_extended_has_the_bits_of_one_that_was_as_long_at_once(tmp_path):
    # A convolution rounds by the number of clients that train at once: those of round 4, also with some of round 5.
    settings = {"model": "cnn", "engine__group_size": 3, "evaluation__every": 0}
    whole = raypfl.run(buffered(tmp_path, **settings, rounds=11))

    # Of a group that trained before the checkpoint of round 4, some clients' states count from round 5 on only.
    for rounds in (4, 6):
        shorter = raypfl.run(buffered(tmp_path, **settings, rounds=rounds))
        assert raypfl.resume(shorter.run_dir, overrides=["rounds=11"]).weights_hash == whole.weights_hash


class KillsItsActor(Marked):
    """Kill the process that trains client 5, once; not in the rehearsal before the run, whose trainings are a step."""

    def train(self, clients, theta):
        if 5 in clients.ids and clients.training.steps is None and self.once("actor"):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().train(clients, theta)


class KillsItsProcess(Marked):
    """Kill the process that trains client 10 for the second time, once."""

    def train(self, clients, theta):
        is_rehearsed = clients.training.steps is not None
        if 10 in clients.ids and not is_rehearsed and not self.once("trained") and self.once("killed"):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().train(clients, theta)


@pytest.mark.thorough
def test_a_process_that_is_killed_while_clients_of_several_models_train_resumes_to_the_same_bits(tmp_path):
    # Client 10 trains again for round 9. The checkpoint before, of round 6, holds replies of round 7.
    often = {"checkpoint__every": 2, "devices__dropout": 0.1}
    killing = {"method": "tests.engine.test_asynchronous_runs:KillsItsProcess", "method__marks": tmp_path}
    folder = tmp_path / "run"
    assert exit_code(raypfl.run, buffered(tmp_path, **often, **killing), run_dir=folder) == -signal.SIGKILL
    assert sorted(folder.glob("checkpoints/*-round-*"))[-1].name.endswith("round-6")

    resumed = raypfl.resume(folder)
    whole = raypfl.run(buffered(tmp_path, **often))
    assert resumed.weights_hash == whole.weights_hash and same_tables(resumed, whole)


UNBUFFERED = {"asynchronous__mixing": 0.6, "asynchronous__buffer": 1, "rounds": 16}


ONE_BY_ONE = {"engine__executor": "sequential", "engine__group_size": 1, "asynchronous__buffer": 4, "rounds": 8}
"""Some clients train before their replies are needed, if there are several actors."""


@pytest.fixture(scope="module")
def inline(tmp_path_factory):
    """Inline runs of clients that train together, and one by one."""
    return {
        False: raypfl.run(buffered(tmp_path_factory.mktemp("inline"), **UNBUFFERED)),
        True: raypfl.run(buffered(tmp_path_factory.mktemp("inline"), **ONE_BY_ONE)),
    }


OTHER_PLACES = [(2, False), (3, True), (1, False)]
PLACES = [(2, True), *(pytest.param(*place, marks=pytest.mark.thorough) for place in OTHER_PLACES)]


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize(("actors", "one_by_one"), PLACES)
def test_any_number_of_actors_gives_the_bits_of_an_inline_run_and_so_do_two_of_which_one_is_killed(
    tmp_path, inline, actors, one_by_one
):
    killing = {"method": "tests.engine.test_asynchronous_runs:KillsItsActor", "method__marks": tmp_path}
    # A new process takes seconds to start: one of two actors is killed, and no other.
    is_killing = actors == 2 and one_by_one
    changes = ON_RAY | {"ray__actors": actors} | (killing if is_killing else {})
    result = raypfl.run(buffered(tmp_path, **(ONE_BY_ONE if one_by_one else UNBUFFERED), **changes))
    assert (tmp_path / "actor").exists() == is_killing
    expected = inline[one_by_one]
    assert result.weights_hash == expected.weights_hash and same_tables(result, expected)


class GoesBack(Marked):
    """Lose all states when rounds from the third on begin, once each, and list the clients that train."""

    def round(self, server, cohort):
        if cohort.round >= 3 and self.once(f"lost states {cohort.round}"):
            raise LostState("A node is gone.")
        super().round(server, cohort)

    def train(self, clients, theta):
        is_rehearsed = clients.training.steps is not None
        if not is_rehearsed:
            with Path(self.marks, "trained").open("a") as file:
                file.writelines(f"{client}\n" for client in clients.ids)
        return super().train(clients, theta)


@pytest.mark.thorough
@pytest.mark.usefixtures("ray_cluster")
def test_clients_that_trained_before_a_checkpoint_and_train_again_after_it_begin_at_their_old_states(tmp_path, inline):
    going_back = {"method": "tests.engine.test_asynchronous_runs:GoesBack", "method__marks": tmp_path}
    result = raypfl.run(buffered(tmp_path, **ONE_BY_ONE, **going_back, **ON_RAY, checkpoint__every=1))
    assert len([*tmp_path.glob("lost states *")]) == 6

    # A client's training is repeated only if others have yet to train for the same round: nothing but that is lost.
    trainings = len((tmp_path / "trained").read_text().splitlines())
    assert trainings > ONE_BY_ONE["rounds"] * ONE_BY_ONE["asynchronous__buffer"]
    assert result.weights_hash == inline[True].weights_hash and same_tables(result, inline[True])


def test_a_run_has_the_staleness_and_the_times_of_its_schedule(tmp_path):
    description = buffered(tmp_path, evaluation__every=4)
    events = []
    result = raypfl.run(description, listeners=[events.append])

    job, prepared = prepare(description, tmp_path / "other", lambda event: None, lockstep=False)
    schedule = schedule_for(job.experiment, job.turns, prepared.task.trained)
    recorded = np.concatenate(result.rounds["staleness"].to_pylist())
    np.testing.assert_array_equal(np.bincount(recorded), np.bincount(schedule.staleness))
    assert recorded.max() >= 2
    np.testing.assert_allclose(result.rounds["simulated_time"], schedule.round_ends)
    assert [event.round for event in events if isinstance(event, Evaluated)] == [4, 8, 12]
    for row, cohort in enumerate(result.rounds["cohort"].to_pylist()):
        assert sorted(cohort) == sorted(schedule.clients[schedule.joining(row + 1, row + 1)])


class AsksForRound(FedAvg):
    """A method whose clients ask for their round, which clients in several rounds have not in common."""

    def train(self, clients, theta):
        assert clients.round > 0
        return super().train(clients, theta)


class AveragesTheSent(FedAvg):
    """A method that takes what it is sent for one model, even if it is a row for each client."""

    def train(self, clients, theta):
        return super().train(clients, theta.reshape(-1, clients.model.size).mean(0))


@pytest.mark.parametrize(
    ("method", "together"),
    [
        *[(name, True) for name in ("fedavg", "ditto", "apfl", "fednh", "fedproto", "pfedme", "scaffold")],
        ("tests.engine.test_asynchronous_runs:AsksForRound", False),
        ("tests.engine.test_asynchronous_runs:AveragesTheSent", False),
    ],
)
def test_a_rehearsal_tells_whether_clients_with_different_models_can_train_in_one_group(tmp_path, method, together):
    job, _ = prepare(buffered(tmp_path, method=method), tmp_path / "run", lambda event: None, lockstep=False)
    assert job.together is together


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"method": "pefll"}, "PeFLL has 3 exchanges in a round"),
        ({"method": "apple"}, "returns 'core', .*: the server needs the `core` of each client"),
        ({"method": "fednova"}, "returns 'normaliser', .* after training: .* A late reply counts"),
        ({"method": "pfedhn"}, "gets 'theta' as a Scatter"),
        # The first half of its rounds are FedAvg's.
        ({"method": "pfedsim"}, "gets 'model' as a Scatter"),
        ({"method": "feddyn"}, "FedDyn keeps state on the server .* Set asynchronous.staleness=constant"),
        ({"model": BATCH_NORM}, r"the variances of batch norm \(.*bn1.running_var\) negative. Set asynchronous.mixing"),
        ({"asynchronous__buffer": 21}, "asynchronous.buffer is 21, but after 20 replies of round 1 no client is left"),
        ({"devices__partial_work": 0.5}, "devices.partial_work is for synchronous rounds"),
        ({"privacy__noise": 1.0}, "privacy.noise is for synchronous rounds"),
        ({"analyses": "[flntk]"}, "analyses is for synchronous rounds"),
        ({"cohort__deadline": 5.0}, "cohort.deadline"),
        ({"asynchronous__slope": 2.0}, "asynchronous.slope"),
    ],
    ids=lambda value: "" if isinstance(value, str) else "-".join(value),
)
def test_what_asynchronous_rounds_cannot_do_is_refused_before_a_run(tmp_path, changes, problem):
    with pytest.raises(ConfigError, match=problem):
        raypfl.run(buffered(tmp_path, **changes))


@pytest.mark.parametrize("changes", [{"asynchronous__mixing": 0.6}, {"method": "fedbn"}, {"method": "local"}])
def test_late_replies_keep_variances_of_batch_norm_above_zero(tmp_path, changes):
    settings = {"model": BATCH_NORM, "training__smallest_batch": 2, "training__steps": 2, "rounds": 8} | changes
    result = raypfl.run(buffered(tmp_path, **settings))
    assert max(map(max, result.rounds["staleness"].to_pylist())) > 1
    assert np.isfinite(result.evaluations["loss"].to_numpy()).all()


class NeedsAnOption(FedAvg):
    """A method with an option that has no default."""

    strength: float


def test_the_list_of_asynchronous_methods_says_which_need_options_or_cannot_be_imported(monkeypatch):
    def broken():
        raise ConfigError("it is broken")

    class Broken(FedAvg):
        __post_init__ = lambda self: broken()  # noqa: E731

    entries = {"fedavg": FedAvg, "mime": Mime, "fedgh": FedGH, "needy": NeedsAnOption, "broken": Broken}
    monkeypatch.setattr(METHODS, "_entries", entries)
    listed = asynchronous_methods.AsynchronousMethods()
    assert listed.summary("fedavg") == "can be asynchronous"
    assert listed.reasons["mime"] == "several exchanges a round"
    assert listed.reasons["fedgh"] == "the server needs the `means` of each client"
    assert listed.reasons["needy"] == "unknown, since it needs options: strength"
    assert "it is broken" in listed.reasons["broken"]


@pytest.mark.slow
def test_the_list_says_which_methods_can_be_asynchronous():
    listed = CliRunner().invoke(app, ["list", "asynchronous"]).stdout
    assert re.search(r"^ mime +cannot be asynchronous: several exchanges a", listed, re.MULTILINE)
    assert re.search(r"^ scaffold +can be asynchronous *$", listed, re.MULTILINE)


def test_asynchronous_rounds_need_devices(tmp_path):
    with pytest.raises(ConfigError, match=r"asynchronous\.buffer .*devices\.hardware"):
        experiment(tmp_path, asynchronous__buffer=2)


def test_dropped_clients_are_counted_where_they_were_sent_a_message(tmp_path):
    description = buffered(tmp_path, devices__dropout=0.3)
    result = raypfl.run(description)
    job, _ = prepare(description, tmp_path / "other", lambda event: None, lockstep=False)
    schedule = make_schedule(ScheduledClients(job.turns.turn_seconds(np.arange(20)), 8, dropout=0.3), 12, 0, 2)
    assert result.rounds["dropped"].to_pylist() == [schedule.drops[schedule.sent_in(n)].sum() for n in range(1, 13)]
    assert schedule.drops.sum() > 3


def test_the_rounds_of_a_finished_run_can_be_told_to_those_that_did_not_hear_them(whole):
    rounds = [event for event in events_of(whole) if isinstance(event, RoundFinished)]
    assert [event.clients for event in rounds] == whole.rounds["clients"].to_pylist()
    assert [event.simulated.time for event in rounds] == whole.rounds["simulated_time"].to_pylist()


@pytest.mark.parametrize(
    ("before", "words"),
    [
        ({"devices__hardware": "lognormal", "cohort__size": 8}, ["asynchronous.buffer=2"]),
        (BUFFERED, ["asynchronous.buffer=3"]),
        (BUFFERED, ["training.epochs=3"]),
    ],
)
def test_a_run_that_continues_another_with_other_asynchronous_rounds_is_refused(tmp_path, before, words):
    settings = {"rounds": 6, "checkpoint__every": 1, "checkpoint__keep": 9, "engine__executor": "vectorised"}
    parent = raypfl.run(experiment(tmp_path, **settings | before)).run_dir
    with pytest.raises(CheckpointError, match=r"not fit this schedule, .* round 3 ends .* since its first round"):
        raypfl.resume(parent, from_round=3, new_run_dir=tmp_path / "new", overrides=words)
    assert not (tmp_path / "new").exists()


def test_a_run_that_continues_another_at_the_same_pace_may_have_another_learning_rate(tmp_path):
    parent = raypfl.run(buffered(tmp_path, rounds=6, checkpoint__every=1, checkpoint__keep=9)).run_dir
    lower = raypfl.resume(parent, from_round=3, new_run_dir=tmp_path / "new", overrides=["training.lr=0.01"])
    assert (lower.status, lower.round) == ("finished", 6)


class FailsInThirdTurn(FedAvg):
    """FedAvg whose clients return nan in their third turn; two rounds are rehearsed."""

    def train(self, clients, theta):
        turns = clients.state.get("turns", default=torch.zeros(())) + 1
        clients.state["turns"] = turns
        trained = super().train(clients, theta)["theta"].rows
        return {"theta": Mean(torch.where(turns[:, None] < 3, trained, torch.nan))}


def test_a_client_that_returns_nan_is_named_with_its_own_round_and_learning_rate(tmp_path):
    halving = {"training__lr": 0.125, "training__schedule": "exponential", "training__decay": 0.5}
    with pytest.raises(RaypflError) as caught:
        raypfl.run(buffered(tmp_path, method=f"{__name__}:FailsInThirdTurn", partition__clients=8, **halving))
    found = re.search(r"for client \d+ in round (\d+)\. .* at training\.lr \((.*) now\)", str(caught.value))
    assert found and float(found[2]) == pytest.approx(0.125 * 0.5 ** (int(found[1]) - 1), rel=1e-2)
