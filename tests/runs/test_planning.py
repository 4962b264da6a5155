"""A plan is what the run will do on its clients' devices, for few clients and for a million."""

from __future__ import annotations

import json
import tracemalloc
from itertools import pairwise

import numpy as np
import pytest

import raypfl
from raypfl.common.errors import ConfigError
from raypfl.devices import ClientTurns, Exchange, Training, Turn
from raypfl.devices.hardware import LogNormalHardware
from raypfl.results.display import plan as display
from raypfl.runs.planning.plan import Plan, plan, planned
from tests.support.command import raypfl as command
from tests.support.runs import EVENTFUL, experiment


def quietly(event: object) -> None:
    """A listener that does nothing."""


@pytest.mark.parametrize("method", ["ditto", "heterofl"])
def test_a_run_is_its_plan(tmp_path, method):
    settings = experiment(tmp_path, **EVENTFUL, method=method, rounds=8, data__unseen_fraction=0.17)
    expected = plan(settings, quietly)
    rounds = raypfl.run(settings).rounds
    columns = {
        "clients": expected.clients,
        "dropped": expected.dropped,
        "late": expected.late,
        "bytes_down": expected.bytes_down,
        "bytes_up": expected.bytes_up,
        "simulated_seconds": expected.seconds,
        "simulated_time": expected.begins + expected.seconds,
        "joules": expected.joules,
    }
    for name, column in columns.items():
        assert rounds[name].to_pylist() == column.tolist(), name

    took_part = np.bincount(np.concatenate(rounds["cohort"].to_pylist()), minlength=12)
    assert sorted(took_part)[2:] == sorted(expected.taken_part) and len(expected.taken_part) == 10
    assert sum(turn.kind == "counted" for turn in expected.turns) == expected.clients.sum()


def test_an_asynchronous_run_is_its_plan(tmp_path):
    settings = experiment(
        tmp_path,
        devices__hardware="lognormal",
        devices__dropout=0.2,
        asynchronous__buffer=2,
        cohort__size=6,
        rounds=10,
        partition__clients=20,
        data__unseen_fraction=0.1,
    )
    expected = plan(settings, quietly)
    rounds = raypfl.run(settings).rounds
    columns = {
        "clients": expected.clients,
        "dropped": expected.dropped,
        "bytes_down": expected.bytes_down,
        "bytes_up": expected.bytes_up,
        "simulated_time": expected.begins + expected.seconds,
        "joules": expected.joules,
    }
    for name, column in columns.items():
        np.testing.assert_allclose(rounds[name].to_pylist(), column, rtol=1e-12, err_msg=name)

    staleness = np.concatenate(rounds["staleness"].to_pylist())
    np.testing.assert_array_equal(np.bincount(staleness), np.bincount(expected.staleness))
    assert staleness.max() >= 2 and sum(expected.dropped) > 0
    took_part = np.bincount(np.concatenate(rounds["cohort"].to_pylist()), minlength=20)
    assert sorted(took_part)[2:] == sorted(expected.taken_part) and len(expected.taken_part) == 18

    # In the picture, nobody is at two places, and no place has two turns at a time.
    for place in range(6):
        turns = [turn for turn in expected.turns if turn.place == place]
        assert all(earlier.ends <= later.begins for earlier, later in pairwise(turns))
    assert sum(turn.kind == "counted" for turn in expected.turns) == expected.clients.sum()
    assert {turn.place for turn in expected.turns} == set(range(6))


@pytest.mark.parametrize("num_clients", [100_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_a_plan_takes_less_than_200_bytes_a_device_and_completion(num_clients):
    settings = raypfl.Experiment(rounds=1000, cohort={"fraction": 0.001}, devices={"hardware": "lognormal"})
    turn = Turn((Exchange((Training(10),), 1e6, 1e6),))
    tracemalloc.start()
    devices = LogNormalHardware().devices(num_clients, 0)
    plan = planned(settings, ClientTurns(devices=devices, turn=turn, num_samples=np.full(num_clients, 100)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 200 * num_clients and plan.clients.sum() == plan.num_clients == num_clients
    # Each client takes part with a chance of 1/1000, in 1000 rounds.
    assert plan.drawn.mean() == pytest.approx(1 - np.exp(-1), abs=2 / np.sqrt(num_clients))


@pytest.mark.parametrize(("taken_part", "gini"), [([3, 3, 3], 0.0), ([0, 0, 0, 8], 0.75), ([1, 2, 3, 4], 0.25)])
def test_ginis_coefficient_is_0_for_equal_shares_and_nearly_1_for_one_client_alone(taken_part, gini):
    nothing = np.ones(1)
    rest = dict.fromkeys(
        ("begins", "seconds", "joules", "bytes_down", "bytes_up", "clients", "dropped", "late"), nothing
    )
    of_shares = Plan(Turn(()), 4, taken_part=np.array(taken_part), drawn=nothing, turns=(), **rest)
    assert of_shares.gini == pytest.approx(gini)


def test_numbers_of_rounds_have_three_digits_that_count():
    assert [display._three_digits(number) for number in (0.01234, 12.34, 99.96, 12219.8, 1.2e9)] == [
        "0.0123",
        "12.3",
        "100",
        "12,200",
        "1,200,000,000",
    ]


def test_the_command_prints_numbers_and_draws_a_picture(tmp_path):
    picture = tmp_path / "plan.png"
    words = [
        "plan",
        "method=fedavg",
        "devices.hardware=lognormal",
        "cohort.fraction=0.1",
        "rounds=50",
        f"--picture={picture}",
    ]
    result = command(*words, "--clients=1000", "--json", "-q", draws=True)
    assert result.exit_code == 0, result.output
    numbers = json.loads(result.stdout)
    assert numbers["clients"] == 1000 and numbers["clients_a_round"] == {"clients": 100, "dropped": 0, "late": 0}
    assert numbers["rounds_a_day"] == pytest.approx(50 * 86400 / numbers["simulated_seconds"])
    assert numbers["round_seconds"]["p50"] <= numbers["round_seconds"]["p95"] <= numbers["round_seconds"]["max"]
    assert picture.read_bytes().startswith(b"\x89PNG")

    table = command(*words, "-q").stdout
    assert "rounds a day" in table and "20 clients are drawn" in table


def test_the_command_plans_each_method_also_where_all_rounds_end_at_their_deadline(tmp_path):
    methods = "[fedavg, {name: fedavg, settings: {cohort.deadline: 0.001, cohort.late: drop}}]"
    words = [
        "plan",
        "devices.hardware=lognormal",
        "rounds=4",
        f"methods={methods}",
        f"--picture={tmp_path / 'plan.png'}",
    ]
    result = command(*words, "--json", "-q")
    assert result.exit_code == 0, result.output
    late = [numbers["clients_a_round"]["late"] for numbers in json.loads(result.stdout).values()]
    assert late == [0, 20]
    assert {file.name for file in tmp_path.iterdir()} == {"plan-1.png", "plan-2.png"}


def test_the_command_plans_the_methods_that_it_is_given_and_asynchronous_rounds(tmp_path):
    words = ["plan", "fedbuff-digits", "--method=fedavg,ditto", "asynchronous.buffer=5", "rounds=8", "--json", "-q"]
    result = command(*words, f"--picture={tmp_path / 'plan.png'}")
    assert result.exit_code == 0, result.output
    numbers = json.loads(result.stdout)
    assert list(numbers) == ["fedavg", "ditto"]
    for plan_of_method in numbers.values():
        staleness = plan_of_method["staleness"]
        assert sum(staleness["histogram"]) == 40 and len(staleness["histogram"]) == staleness["max"] + 1


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"asynchronous__buffer": 2, "method": "mime"}, r"leave asynchronous\.buffer out"),
        ({"objective": "regression"}, r"objective is 'regression', which is for numbers"),
        ({"model__pretrain": "public"}, r"There is no pool called 'public'"),
        ({"privacy__noise": 1.0, "privacy__unit": "client"}, r"by method\.weighting=uniform"),
    ],
)
def test_a_plan_of_a_run_that_would_be_refused_is_refused(tmp_path, settings, sentence):
    with pytest.raises(ConfigError, match=sentence):
        plan(experiment(tmp_path, devices__hardware="lognormal", **settings), quietly)


def test_a_plan_without_devices_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"set devices\.hardware, as in raypfl plan"):
        plan(experiment(tmp_path), quietly)
