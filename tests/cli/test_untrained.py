"""A run that trained nothing says so where its result is printed, in JSON and in the report; so does its plan."""

from __future__ import annotations

import json

import pytest

from raypfl.results.report.page import write
from raypfl.runs.result import RunResult
from tests.support.command import raypfl

DEVICES = ["rounds=2", "devices.hardware=lognormal", "method=fedavg"]


def words_of(result) -> str:
    return " ".join(result.output.split())


@pytest.mark.usefixtures("without_figures")
def test_a_run_in_which_nobody_meets_the_deadline_says_that_nothing_was_trained(tmp_path):
    inline = ["engine.backend=inline", "tracking.mlflow=false", "-q"]
    missed = ["run", *DEVICES, *inline, "cohort.deadline=0.001", f"--run-dir={tmp_path / 'run'}"]
    sentence = "Nothing was trained, since no client counted in any round. None met cohort.deadline: raise it"
    printed = raypfl(*missed)
    assert sentence in words_of(printed), printed.output

    # The run is finished, so that this only prints its results again.
    numbers = json.loads(raypfl(*missed, "--json").stdout)
    assert [notice.startswith(sentence) for notice in numbers["runs"][0]["notices"]] == [True]
    assert sentence in write([RunResult.load(tmp_path / "run")], tmp_path / "report.html").read_text()

    met = ["run", *DEVICES, *inline, f"--run-dir={tmp_path / 'other'}"]
    finished = raypfl(*met)
    assert "fedavg" in finished.output and "othing was trained" not in finished.output
    assert json.loads(raypfl(*met, "--json").stdout)["runs"][0]["notices"] == []


def test_a_plan_in_which_nobody_meets_the_deadline_says_that_nothing_will_be_trained(tmp_path):
    missed = ["plan", *DEVICES, "cohort.deadline=0.001", f"--picture={tmp_path / 'plan.png'}", "-q"]
    sentence = "Nothing will be trained, since no client counts in any round. None meets cohort.deadline: raise it"
    printed = words_of(raypfl(*missed))
    assert sentence in printed and "nan" not in printed
    assert "all 20 clients are drawn, but the work of 20 of them never counts" in printed

    def refuse_constant(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    numbers = json.loads(raypfl(*missed, "--json").stdout, parse_constant=refuse_constant)
    assert numbers["notices"][0].startswith(sentence) and numbers["gini"] is None


@pytest.mark.usefixtures("without_figures")
def test_a_run_without_test_samples_says_why_it_has_no_table_and_a_file_has_the_sentence_in_one_line(tmp_path):
    inline = ["engine.backend=inline", "tracking.mlflow=false", "-q"]
    words = ["run", "rounds=1", "method=fedavg", "data.test_fraction=0", f"--run-dir={tmp_path / 'run'}"]
    result = raypfl(*words, *inline)
    assert result.exit_code == 0, result.output
    (line,) = [line for line in result.stdout.splitlines() if "There are no results" in line]
    assert line.endswith("has samples for evaluation.protocols; raise data.test_fraction.")
