"""The round loop on the inline backend: results, stop and resume, failures, availability."""

from __future__ import annotations

import math
import signal
import textwrap
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch

import raypfl
from raypfl.common.errors import CheckpointError, ConfigError, Diverged, RaypflError
from raypfl.engine.events import Checkpointed, Evaluated, Progress, RoundFinished, RunFinished, RunStarted, Warned
from raypfl.engine.prepared import Prepared
from raypfl.engine.state.run_tables import RunTables
from raypfl.results.display.notices import run_notices
from raypfl.runs.records import is_finished
from raypfl.storage.tree import flatten
from tests.support.processes import exit_code
from tests.support.runs import Interrupt, experiment, same_tables
from tests.support.tiers import methods

METHODS = "tests.support.federated_methods:"


def test_a_run_tells_its_listeners_everything_in_order(tmp_path):
    events = []
    result = raypfl.run(experiment(tmp_path), listeners=[events.append])
    kinds = [type(e) for e in events if not isinstance(e, Warned | Progress)]

    assert kinds[0] is RunStarted and kinds[-1] is RunFinished
    assert [e.round for e in events if isinstance(e, RoundFinished)] == [1, 2, 3, 4, 5, 6]
    assert [e.round for e in events if isinstance(e, Evaluated)] == [3, 6]
    assert [e.round for e in events if isinstance(e, Checkpointed)] == [2, 4, 6]
    assert result.status == "finished" and result.round == 6


def test_short_rounds_are_saved_by_the_seconds_that_they_take_unless_checkpoints_have_a_number_of_rounds(
    tmp_path, monkeypatch
):
    def run(name: str, **changes) -> tuple[list[int], raypfl.Result]:
        events = []
        small = {"method": "fedavg", "partition__clients": 3, "cohort__size": 2, "training__steps": 1}
        small |= {"evaluation__every": 7, "checkpoint__every": "null"}
        settings = experiment(tmp_path, output=tmp_path / name, rounds=25, **(small | changes))
        result = raypfl.run(settings, listeners=[events.append])
        return [e.round for e in events if isinstance(e, Checkpointed)], result

    monkeypatch.setattr("raypfl.engine.state.run_checkpoints.SECONDS_PER_CHECKPOINT", math.inf)
    never_rounds, never = run("never")
    every_rounds, every = run("every", checkpoint__every=9)
    monkeypatch.setattr("raypfl.engine.state.run_checkpoints.SECONDS_PER_CHECKPOINT", 0.0)
    always_rounds, always = run("always")

    assert (never_rounds, every_rounds, always_rounds) == ([25], [9, 18, 25], [10, 20, 25])
    for other in (every, always):
        assert other.weights_hash == never.weights_hash and same_tables(other, never)


@pytest.mark.parametrize("executor", ["vectorised", "sequential"])
def test_a_process_in_which_something_left_gradients_off_trains_all_the_same(tmp_path, executor):
    """A KeyboardInterrupt in an earlier run of the process can leave torch's gradient mode switched off."""
    settings = experiment(tmp_path, rounds=2, engine__executor=executor)
    whole = raypfl.run(settings)
    with torch.no_grad():
        assert raypfl.run(settings).weights_hash == whole.weights_hash
    assert whole.rounds["loss"][1].as_py() < whole.rounds["loss"][0].as_py()


def test_training_learns_and_personal_models_fit_their_own_clients_better(tmp_path):
    result = raypfl.run(experiment(tmp_path, rounds=25, cohort__size=12, evaluation__every=25))
    accuracy = {(s["model"], s["protocol"]): s["accuracy"] for s in result.summary()}
    assert accuracy["global", "global"] > 0.85
    assert accuracy["personal", "local"] > accuracy["personal", "global"]


def test_a_loaded_result_equals_that_of_the_run(default_run):
    result = default_run
    again = raypfl.Result.load(result.run_dir)
    assert again.weights_hash == result.weights_hash and same_tables(again, result)
    assert again.experiment == result.experiment
    assert result.global_model().shape == (64 * 16 + 16 + 16 * 10 + 10,)

    trained = set(np.unique(np.concatenate(result.rounds["cohort"].to_pylist())).tolist())
    for client in range(12):
        assert ("personal" in result.client_state(client)) == (client in trained)


@pytest.mark.parametrize(("method", "number"), [("fedavg", signal.SIGTERM), ("ditto", signal.SIGINT)])
def test_a_stopped_run_resumes_to_the_same_bits(tmp_path, method, number):
    whole = raypfl.run(experiment(tmp_path, method=method))
    stopped = raypfl.run(experiment(tmp_path, method=method), listeners=[Interrupt(3, number)])
    assert stopped.status == "stopped" and stopped.round == 3
    resumed = raypfl.resume(stopped.run_dir)
    assert resumed.status == "finished"
    assert resumed.weights_hash == whole.weights_hash and same_tables(resumed, whole)


# With such a dropout, the first round has no client.
@pytest.mark.parametrize(("records", "dropout"), [("add_round", 0.0), ("add_round", 0.99), ("add_evaluations", 0.0)])
def test_a_second_ctrl_c_waits_until_a_round_or_its_evaluation_is_recorded(tmp_path, monkeypatch, records, dropout):
    def interrupted(self, *arguments, **options):
        if not sent:
            for _ in range(2):
                sent.append(signal.SIGINT)
                signal.raise_signal(signal.SIGINT)
        return record(self, *arguments, **options)

    record = getattr(RunTables, records)
    sent: list[int] = []
    monkeypatch.setattr(RunTables, records, interrupted)
    stopped = raypfl.run(experiment(tmp_path, devices__dropout=dropout))
    assert len(sent) == 2 and stopped.status == "stopped"

    resumed = raypfl.resume(stopped.run_dir)
    whole = raypfl.run(experiment(tmp_path, devices__dropout=dropout))
    assert resumed.weights_hash == whole.weights_hash and same_tables(resumed, whole)


def test_a_run_killed_in_the_middle_of_a_round_resumes_to_the_same_bits(tmp_path, default_run):
    killing = experiment(tmp_path, method=METHODS + "KillsItsActor", method__marks=tmp_path)
    assert exit_code(raypfl.run, killing, run_dir=tmp_path / "killed") == -signal.SIGKILL
    resumed = raypfl.resume(tmp_path / "killed")
    assert resumed.weights_hash == default_run.weights_hash


def test_an_extended_run_is_unfinished_until_its_end(tmp_path):
    folder = Path(raypfl.run(experiment(tmp_path, rounds=1)).run_dir)
    events = []
    raypfl.resume(folder, overrides=["rounds=2"], listeners=[lambda event: events.append((event, is_finished(folder)))])

    assert [finished for event, finished in events if isinstance(event, RoundFinished)] == [False]
    assert is_finished(folder)


def test_lost_states_send_the_run_back_to_its_checkpoint_and_on_to_the_same_bits(tmp_path, default_run):
    events = []
    losing = experiment(tmp_path, method=METHODS + "LosesStates", method__marks=tmp_path)
    result = raypfl.run(losing, listeners=[events.append])
    assert any("Going on from round 2 again, 1 round back" in e.text for e in events if isinstance(e, Warned))
    assert result.weights_hash == default_run.weights_hash and same_tables(result, default_run)


def test_bytes_are_counted_on_from_a_checkpoint_and_in_a_repeated_round_once(tmp_path):
    events = []
    whole = raypfl.run(experiment(tmp_path), listeners=[events.append])
    stopped = raypfl.run(experiment(tmp_path), listeners=[Interrupt(3)])
    raypfl.resume(stopped.run_dir, listeners=[events.append])
    raypfl.run(experiment(tmp_path, method=METHODS + "LosesStates", method__marks=tmp_path), listeners=[events.append])

    for direction in ("up", "down"):
        expected = np.cumsum(whole.rounds[f"bytes_{direction}"].to_pylist())
        reported = [(e.round, getattr(e, f"bytes_{direction}_total")) for e in events if isinstance(e, RoundFinished)]
        assert [round for round, _ in reported] == [1, 2, 3, 4, 5, 6, 4, 5, 6, 1, 2, 3, 4, 5, 6]
        assert all(total == expected[round - 1] for round, total in reported)


def test_a_damaged_checkpoint_is_skipped_for_the_one_before_with_a_warning(tmp_path, default_run):
    stopped = raypfl.run(experiment(tmp_path), listeners=[Interrupt(4)])
    newest = max((stopped.run_dir / "checkpoints").glob("*-round-*"))
    file = newest / "server.safetensors"
    file.write_bytes(file.read_bytes()[:-7])
    events = []
    resumed = raypfl.resume(stopped.run_dir, listeners=[events.append])

    assert any(isinstance(e, Warned) and newest.name in e.text for e in events)
    assert next(e for e in events if isinstance(e, RunStarted)).first_round == 2
    assert resumed.weights_hash == default_run.weights_hash


def test_resuming_a_finished_run_with_more_rounds_equals_one_long_run(tmp_path, default_run):
    short = raypfl.run(experiment(tmp_path, rounds=3))
    longer = raypfl.resume(short.run_dir, overrides=["rounds=6"])
    assert longer.weights_hash == default_run.weights_hash


def test_personal_models_are_made_at_the_learning_rate_of_the_last_round(tmp_path, monkeypatch):
    rates = []
    monkeypatch.setattr(raypfl.methods.Ditto, "personal_model", lambda self, clients, server: rates.append(clients.lr))
    raypfl.run(
        experiment(tmp_path, rounds=3, training__schedule="exponential", training__decay=0.5, evaluation__every=1)
    )
    assert sorted(set(rates), reverse=True) == [0.1, 0.05, 0.025]


def test_a_folder_without_a_run_is_not_resumed(tmp_path):
    run = raypfl.run(experiment(tmp_path, rounds=2))
    for above in (tmp_path, run.run_dir.parent):
        with pytest.raises(CheckpointError, match=rf"not the folder of a run.*Runs are in {run.run_dir}"):
            raypfl.resume(above)


def test_seeds_give_different_runs_and_the_same_seed_the_same_run(tmp_path):
    hashes = [raypfl.run(experiment(tmp_path, seed=seed, rounds=2)).weights_hash for seed in (0, 0, 1)]
    assert hashes[0] == hashes[1] != hashes[2]


def test_a_client_that_keeps_failing_is_named_with_its_round_and_first_traceback_in_few_lines(tmp_path):
    with pytest.raises(RaypflError) as caught:
        raypfl.run(experiment(tmp_path, method=METHODS + "FailsOnClient3", cohort__size=12))
    text = str(caught.value)
    assert text.startswith("Client 3 failed in round 1:")
    assert text.count("LookupError: the client's disk is on fire") == 1 and len(text.splitlines()) < 30


def test_a_failing_client_can_be_skipped_and_is_counted_and_costs_nobody_else(tmp_path):
    events = []
    skipping = {"method": METHODS + "FailsOnClient3", "cohort__size": 12, "failures__on_client_failure": "skip"}
    result = raypfl.run(experiment(tmp_path, **skipping), listeners=[events.append])

    assert result.rounds["failed"].to_pylist() == [1] * 6
    assert result.rounds["clients"].to_pylist() == [11] * 6

    ups = [r["clients"] for r in result.ledger.to_pylist() if r["direction"] == "up"]
    assert ups == [11] * 6
    assert sum("Client 3" in e.text for e in events if isinstance(e, Warned)) >= 1


def test_a_passing_failure_is_retried_and_leaves_no_trace(tmp_path, default_run):
    retried = raypfl.run(experiment(tmp_path, method=METHODS + "FailsOnce", method__marks=tmp_path))
    assert retried.weights_hash == default_run.weights_hash and same_tables(retried, default_run)


def test_a_diverging_client_stops_the_run_with_its_number_and_round(tmp_path):
    with pytest.raises(RaypflError, match=r"diverged on client \d+ in round \d+.*training.lr"):
        raypfl.run(experiment(tmp_path, training__lr=1e8))


@pytest.mark.parametrize("mode", [{}, {"devices__hardware": "lognormal", "asynchronous__buffer": 3}])
def test_a_run_that_skips_failing_clients_has_diverged_if_they_all_do(tmp_path, mode):
    folder = tmp_path / "run"
    with pytest.raises(Diverged, match=r"Only . of \d clients of round . succeeded"):
        raypfl.run(experiment(tmp_path, training__lr=1e8, failures__on_client_failure="skip", **mode), run_dir=folder)
    assert raypfl.Result.load(folder).status == "diverged"


def test_a_failed_run_keeps_its_last_finished_round(tmp_path):
    with pytest.raises(RaypflError):
        raypfl.run(experiment(tmp_path, method=METHODS + "FailsInRound4"), run_dir=tmp_path / "late")
    assert raypfl.Result.load(tmp_path / "late").status == "failed"
    assert raypfl.Result.load(tmp_path / "late").round == 3


def test_clients_drop_out_after_the_first_message_by_seed(tmp_path):
    dropping = experiment(tmp_path, method="fedavg", rounds=10, devices__dropout=0.4, evaluation__every=0)
    result = raypfl.run(dropping)
    rounds = result.rounds.to_pylist()
    ledger = result.ledger.to_pylist()
    assert sum(r["dropped"] for r in rounds) > 0

    for r in rounds:
        clients_by_direction = {e["direction"]: e["clients"] for e in ledger if e["round"] == r["round"]}
        assert r["clients"] + r["dropped"] == 6
        assert clients_by_direction["down"] == 6 and clients_by_direction["up"] == r["clients"]

    again = raypfl.run(dropping)
    assert again.weights_hash == result.weights_hash


def test_availability_is_uneven_over_clients(tmp_path):
    result = raypfl.run(
        experiment(
            tmp_path,
            method="fedavg",
            rounds=60,
            cohort__size=12,
            devices__availability="{name: uniform, low: 0.1, high: 0.9}",
            evaluation__every=0,
            checkpoint__every=0,
            training__steps=1,
            training__batch_size=1,
            engine__group_size=12,
        )
    )
    taken_part = np.bincount(np.concatenate(result.rounds["cohort"].to_pylist()), minlength=12)

    assert taken_part.max() > 2 * taken_part.min()


@pytest.mark.parametrize("method", methods(raypfl.methods.METHODS))
def test_a_round_without_a_reply_changes_nothing(tmp_path, method):
    small = {"rounds": 2, "partition__clients": 2, "cohort__size": 2, "evaluation__every": 0, "checkpoint__every": 0}
    result = raypfl.run(experiment(tmp_path, method=method, devices__dropout=0.999, **small))
    assert result.status == "finished" and np.isnan(result.rounds["loss"].to_pylist()).all()
    assert result.rounds["clients"].to_pylist() == [0, 0]

    settings = result.experiment
    data = settings.load_data()
    initial = flatten(settings.method.start(Prepared(settings, data).task))
    final = flatten(result.server_state())

    assert final[0] == initial[0] and all(torch.equal(final[1][name], tensor) for name, tensor in initial[1].items())


def test_evaluations_have_a_row_for_each_client_protocol_and_model(default_run):
    table = default_run.evaluations
    assert table.schema.names == [
        *["round", "client", "protocol", "model", "samples", "accuracy", "loss", "ece", "auc", "left_out"]
    ]

    last = [r for r in table.to_pylist() if r["round"] == 6]
    for protocol, model, clients in (
        ("local", "personal", 12),
        ("local", "global", 12),
        ("global", "personal", 12),
        ("global", "global", 1),
    ):
        assert len([r for r in last if (r["protocol"], r["model"]) == (protocol, model)]) == clients

    local = [r for r in last if r["protocol"] == "local" and r["model"] == "global"]
    pooled = next(r for r in last if r["protocol"] == "global" and r["model"] == "global")
    assert pooled["samples"] == sum(r["samples"] for r in local)

    correct = sum(r["accuracy"] * r["samples"] for r in local)
    assert pooled["accuracy"] == pytest.approx(correct / pooled["samples"])


def test_batch_norm_statistics_train_travel_and_evaluate(tmp_path, monkeypatch):
    module = tmp_path / "normed.py"
    module.write_text(
        textwrap.dedent("""
            from torch import nn
            def net(input_shape, num_classes):
                return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144,
                num_classes))
        """)
    )
    monkeypatch.syspath_prepend(tmp_path)
    settings = {"method": "fedavg", "rounds": 15, "cohort__size": 12, "evaluation__every": 15}
    result = raypfl.run(experiment(tmp_path, model="normed:net", **settings))
    theta = result.global_model()

    assert theta.shape == (4 * 9 + 4 + 8 + 1440 + 10 + 8,)
    assert not torch.equal(theta[-8:-4], torch.zeros(4)) and (theta[-4:] > 0).all()
    assert next(s for s in result.summary() if s["model"] == "global")["accuracy"] > 0.7


class FailsOnTheServer(raypfl.methods.FedAvg):
    """FedAvg whose server code fails in round 4."""

    def start(self, task):
        return {"theta": task.model.init(task.seed)}

    def round(self, server, cohort):
        if cohort.round == 4:
            raise KeyError("moments")


def test_an_error_in_a_methods_server_code_keeps_the_finished_rounds_and_is_shown(tmp_path):
    events = []
    with pytest.raises(RaypflError, match=r"(?s)FailsOnTheServer.* failed in round 4: KeyError: 'moments'"):
        mistaken = experiment(tmp_path).replace(method=FailsOnTheServer())
        raypfl.run(mistaken, run_dir=tmp_path / "run", listeners=[events.append])
    assert events[-1].status == "failed" and raypfl.Result.load(tmp_path / "run").round == 3


def test_a_folder_that_holds_a_run_is_not_run_in_again(tmp_path):
    run = raypfl.run(experiment(tmp_path, rounds=1))
    with pytest.raises(RaypflError, match="already has a run"):
        raypfl.run(experiment(tmp_path, training__lr=0.01), run_dir=run.run_dir)


def test_a_client_that_does_not_exist_has_no_state(tmp_path):
    result = raypfl.run(experiment(tmp_path, rounds=1))
    for stranger in (-1, 12):
        with pytest.raises(ConfigError, match=f"There is no client {stranger}; clients are numbered from 0 to 11"):
            result.client_state(stranger)


def test_only_an_experiment_can_be_run(tmp_path):
    with pytest.raises(ConfigError, match=r"takes an Experiment, not 'mine\.yaml'; .*Experiment\.from_yaml"):
        raypfl.run("mine.yaml")


def test_a_folder_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"There is no folder .*nothing"):
        raypfl.Result.load(tmp_path / "nothing")


def test_a_run_without_test_samples_finishes(tmp_path):
    result = raypfl.run(experiment(tmp_path, data__test_fraction=0.0, rounds=2))
    assert result.status == "finished"


class NeverHasAModel(raypfl.Method):
    """A method that has no global model at any time."""

    def global_model(self, server):
        return None

    def start(self, task):
        return {"rounds": 0}

    def round(self, server, cohort):
        server["rounds"] += 1


def test_a_method_that_has_no_model_yet_runs_to_its_end(tmp_path):
    result = raypfl.run(experiment(tmp_path).replace(method=NeverHasAModel()))
    assert result.status == "finished" and result.server_state() == {"rounds": 6}
    assert result.summary() == [] and np.isnan(result.rounds["loss"].to_pylist()).all()
    (notice,) = (notice for notice in run_notices(result) if "no results" in notice)
    assert "or NeverHasAModel.global_model (test_engine.py, line " in notice and notice.endswith("returned nothing.")


def test_a_result_is_a_line_and_holds_arrow_tables(tmp_path):
    result = raypfl.run(experiment(tmp_path, rounds=1))
    assert repr(result) == f"<Result: ditto, finished after round 1 of 1, in {result.run_dir}>"
    assert all(isinstance(t, pa.Table) for t in (result.rounds, result.evaluations, result.ledger))
