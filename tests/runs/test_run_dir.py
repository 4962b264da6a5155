"""`raypfl run --run-dir FOLDER`: the command that starts a run or, given again, continues it."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from raypfl.runs import driver
from raypfl.runs.result import description
from tests.support.command import raypfl, raypfl_json
from tests.support.runs import Interrupt

SMALL = ["rounds=3", "engine.backend=inline", "partition.clients=4", "evaluation.every=1", "tracking.mlflow=false"]
KEPT = ["--run-dir", "kept/mine"]
COMMAND = ["run", *SMALL, "--method", "fedavg", *KEPT]
COMPARISON = ["run", *SMALL, "--method", "fedavg,ditto", *KEPT]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path


def hashes(outcome: dict) -> list[str]:
    return [run["weights_hash"] for run in outcome["runs"]]


def cut_off(monkeypatch: pytest.MonkeyPatch, method: str, *words: str) -> None:
    """Carry out a command in which the run of a method is interrupted after its first round."""
    real = driver.resume

    def pressed(folder, *, listeners, overrides):
        stop = [Interrupt(1)] if type(description(folder).method).__name__.lower() == method else []
        return real(folder, listeners=[*listeners, *stop], overrides=overrides)

    with monkeypatch.context() as patch:
        patch.setattr(driver, "resume", pressed)
        assert raypfl(*words).exit_code == 130


@pytest.mark.parametrize(("command", "cut"), [(COMMAND, "fedavg"), (COMPARISON, "ditto")])
def test_the_same_command_starts_then_continues_then_shows_what_is_finished(
    monkeypatch: pytest.MonkeyPatch, command: list[str], cut: str
):
    undisturbed = hashes(raypfl_json(*(word.replace("mine", "undisturbed") for word in command)))
    cut_off(monkeypatch, cut, *command)
    assert hashes(raypfl_json(*command)) == undisturbed
    with monkeypatch.context() as patch:
        patch.setattr(driver, "resume", None)  # nothing is left to run
        assert hashes(raypfl_json(*command)) == undisturbed


def test_a_comparison_killed_while_its_folder_was_made_is_begun(elsewhere: Path):
    inside = elsewhere / "kept" / "mine" / "fedavg-s0"
    inside.mkdir(parents=True)
    assert [run["status"] for run in raypfl_json(*COMPARISON)["runs"]] == ["finished"] * 2
    assert sorted(one.name for one in inside.parent.iterdir() if one.is_dir()) == ["ditto-s0", "fedavg-s0"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["training.lr=0.3"], r"kept/mine has another run: training.lr is 0.1 there, not 0.3. Name another folder\.$"),
        (["rounds=9"], r"rounds is 3 there, not 9.*`raypfl resume kept/mine KEY=VALUE`"),
        (["checkpoint.location=elsewhere"], r"checkpoint.location is None there, not 'elsewhere'"),
        (["engine.executor=sequential"], r"engine.executor is 'vectorised' there, not 'sequential'"),
        (["seeds=2"], r"kept/mine has a single run, and this command a comparison of 2"),
    ],
)
def test_another_run_is_refused_and_left_as_it_was(elsewhere: Path, words: list[str], sentence: str):
    if not (elsewhere / "kept").exists():
        raypfl_json(*COMMAND)
    before = (elsewhere / "kept" / "mine" / "experiment.yaml").read_text()
    refused = raypfl(*COMMAND, *words)
    assert refused.exit_code == 2
    assert re.search(sentence, " ".join(refused.output.split()))
    assert (elsewhere / "kept" / "mine" / "experiment.yaml").read_text() == before


def test_a_comparison_is_not_taken_for_a_run_nor_for_another_comparison():
    raypfl_json(*COMPARISON)
    for words, sentence in (
        (COMMAND, "kept/mine has a comparison of 2 runs, and this command a single run"),
        (
            ["run", *SMALL, "--method", "fedavg,fedprox", *KEPT],
            "kept/mine/ditto-s0 has another run: method.name is 'ditto' there",
        ),
    ):
        refused = raypfl(*words)
        assert (refused.exit_code, sentence in " ".join(refused.output.split())) == (2, True), refused.output


def test_what_changes_no_result_may_differ_the_second_time(monkeypatch: pytest.MonkeyPatch, elsewhere: Path):
    cut_off(monkeypatch, "fedavg", *COMMAND)
    assert raypfl_json(*COMMAND, "ray.address=other:6379", "checkpoint.keep=7")["runs"][0]["status"] == "finished"
    kept = description(elsewhere / "kept" / "mine")
    assert (kept.ray.address, kept.checkpoint.keep) == ("other:6379", 7)


def test_a_folder_that_was_lost_is_written_again_from_the_checkpoints_of_a_finished_run(elsewhere: Path):
    location = f"checkpoint.location=file://{elsewhere}/store"
    first = raypfl_json(*COMMAND, location)
    mine, tables = elsewhere / "kept" / "mine", ("rounds", "evaluations", "ledger")
    before = [pq.read_table(mine / f"{name}.parquet") for name in tables]
    shutil.rmtree(elsewhere / "kept")
    assert hashes(raypfl_json(*COMMAND, location)) == hashes(first)
    assert [pq.read_table(mine / f"{name}.parquet") for name in tables] == before
