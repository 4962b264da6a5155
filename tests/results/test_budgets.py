"""Results over simulated time: the cost of a target, the score on a budget, and where they are shown."""

from __future__ import annotations

import csv
from dataclasses import replace

import pyarrow as pa
import pytest

import raypfl
from raypfl.engine.events import RoundFinished
from raypfl.integrations.tracking.entries import round_points
from raypfl.results.budgets import cost_to_target, score_within
from raypfl.results.display.outcome import as_json
from raypfl.results.numbers import metric_curve, positions
from raypfl.results.report import budgets, page
from raypfl.results.run_groups import group_runs
from raypfl.runs.replay import events_of
from tests.results.test_picture import made_up
from tests.support.runs import TIMED, experiment


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> list[raypfl.Result]:
    folder = tmp_path_factory.mktemp("budgets")
    settings = TIMED | {"rounds": 8, "evaluation__every": 2, "training__lr": 0.05}
    return [raypfl.run(experiment(folder, method=method, **settings)) for method in ("ditto", "fedavg")]


def spent(result: raypfl.Result, axis: str, until: int) -> float:
    """What a run spent in its first rounds, added up row by row."""
    total = 0.0
    for row in result.rounds.to_pylist()[:until]:
        if axis == "round":
            total += 1
        elif axis == "megabytes":
            total += (row["bytes_up"] + row["bytes_down"]) / 1e6
        elif axis == "simulated_seconds":
            total += row["simulated_seconds"]
        else:
            total += row["joules"] / 1e3
    return total


@pytest.mark.parametrize("axis", ["round", "megabytes", "simulated_seconds", "kilojoules"])
def test_a_target_costs_what_was_spent_until_the_first_evaluation_that_reached_it(runs, axis):
    for result in runs:
        curve = {}
        for number in (2, 4, 6, 8):
            (row,) = [r for r in result.summary(number) if (r["protocol"], r["model"]) == ("local", "global")]
            curve[number] = 100 * row["accuracy"]

        for target in (curve[2] - 1, curve[6], max(curve.values())):
            first = min(number for number, score in curve.items() if score >= target - 1e-9)
            cost = cost_to_target(result, target, axis, "local", "global")
            assert cost == pytest.approx(spent(result, axis, first))
        assert cost_to_target(result, 101.0, axis, "local", "global") is None

        assert score_within(result, spent(result, axis, 5), axis, "local", "global") == pytest.approx(curve[4])
        assert score_within(result, 0.99 * spent(result, axis, 2), axis, "local", "global") is None


def test_the_run_whose_final_mean_is_the_target_reaches_it():
    for seed in range(20):
        runs = [made_up("fedavg", ("global",), 0.7, seed), made_up("ditto", ("personal",), 0.9, seed)]
        table = budgets.for_target(group_runs(runs), "local", [])
        rounds = {label: cells[0] for _, label, cells in table.lines}
        assert rounds["fedavg"] in ("5", "10") and rounds["ditto"] == "5"


def test_seeds_reach_the_target_by_their_mean_and_what_sends_nothing_is_no_budget():
    runs = []
    for seed, (early, late) in enumerate([(0.6, 0.8), (0.7, 0.9)]):
        for method, gain, megabytes in (("fedavg", 0.0, 1), ("ditto", 0.06, 2), ("local", 0.06, 0)):
            run = made_up(method, seed=seed, rounds=(5, 10))
            evaluations = run.evaluations.to_pydict()
            evaluations["accuracy"] = [{5: early, 10: late}[round] + gain for round in evaluations["round"]]
            sent = {name: [megabytes * 50_000] * 10 for name in ("bytes_up", "bytes_down")}
            rounds = pa.table(run.rounds.to_pydict() | sent)
            runs.append(replace(run, evaluations=pa.table(evaluations), rounds=rounds))

    groups = group_runs(runs)
    target = budgets.for_target(groups, "local", ["megabytes"])
    assert target.title == "To 85.0\u00a0%" and target.headings == ["rounds", "MB, up and down"]
    assert [cells for *_, cells in target.lines] == [["10", "1"], ["10", "2"], ["10", "0"]]

    within = budgets.within_budgets(groups, "local", ["megabytes"])
    assert within.headings == ["1 MB, up and down"]
    assert [cells for *_, cells in within.lines] == [["85.0"], ["71.0"], ["91.0"]]


def test_a_round_has_its_place_though_its_record_and_those_of_later_ones_are_lost(runs):
    for result in runs:
        cut = replace(result, rounds=result.rounds.slice(0, 4))
        assert positions(cut, "round").tolist() == list(range(9))
        times = positions(result, "simulated_seconds").tolist()
        assert positions(cut, "simulated_seconds").tolist() == times[:5] + [times[4]] * 4
        (group,) = group_runs([cut])
        assert metric_curve(group, "local", "global", "megabytes").x[-1] == pytest.approx(sum(cut.megabytes))


def test_a_round_has_its_place_though_the_records_of_earlier_ones_are_lost(runs):
    for result in runs:
        continued = replace(result, rounds=result.rounds.slice(4))
        assert positions(continued, "round").tolist() == list(range(9))
        times = positions(result, "simulated_seconds").tolist()
        assert positions(continued, "simulated_seconds").tolist() == [0.0] * 5 + times[5:]

        megabytes = positions(continued, "megabytes")
        assert not megabytes[:5].any() and megabytes[8] == pytest.approx(sum(continued.megabytes))
        assert cost_to_target(continued, 101.0, "megabytes", "local", "global") is None


@pytest.mark.usefixtures("without_figures")
def test_simulated_time_and_energy_are_in_the_report_its_table_the_json_and_the_metrics(runs, tmp_path):
    text = page.write(runs, tmp_path / "report.html").read_text()
    for part in ("Against simulated time", "Against energy", "on equal budgets", "simulated seconds</th>"):
        assert part in text
    table = page.write(runs, tmp_path / "report.csv")
    rows = list(csv.DictReader(table.open()))
    for result in runs:
        total = spent(result, "simulated_seconds", 8)
        method = type(result.experiment.method).__name__.lower()
        (row,) = [row for row in rows if (row["method"], row["tested_on"]) == (method, "local")]
        assert float(row["simulated_seconds"]) == pytest.approx(total)
        assert as_json([result], {})["runs"][0]["simulated_seconds"] == pytest.approx(total)

        last = [event for event in events_of(result) if isinstance(event, RoundFinished)][-1]
        points = {name: value for name, value, _ in round_points(last)}
        assert points["simulated/time"] == pytest.approx(total)
        assert points["simulated/joules_total"] == pytest.approx(1e3 * spent(result, "kilojoules", 8))


def test_a_run_without_simulated_time_has_no_metric_of_it(tmp_path):
    result = raypfl.run(experiment(tmp_path, rounds=1))
    (event,) = [event for event in events_of(result) if isinstance(event, RoundFinished)]
    assert not [name for name, _, _ in round_points(event) if "simulated" in name]
    assert "simulated_seconds" not in as_json([result], {})["runs"][0]
