"""`raypfl run --run-dir FOLDER`: the same command starts a run and, repeated, continues it."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from raypfl.runs import driver
from raypfl.runs.records import description
from tests.support.command import hashes, interrupted, raypfl, raypfl_json

SMALL = [
    *("rounds=3", "partition.clients=4", "training.steps=2", "evaluation.every=1"),
    *("engine.backend=inline", "tracking.mlflow=false"),
]
RUN_DIR = ["--run-dir", "kept/mine"]
COMMAND = ["run", *SMALL, "--method", "fedavg", *RUN_DIR]
COMPARISON = ["run", *SMALL, "--method", "fedavg,ditto", *RUN_DIR]


@pytest.fixture(autouse=True)
def workdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path


@pytest.mark.parametrize(("command", "interrupted_method"), [(COMMAND, "fedavg"), (COMPARISON, "ditto")])
def test_the_same_command_starts_then_continues_then_shows_what_is_finished(
    monkeypatch: pytest.MonkeyPatch, command: list[str], interrupted_method: str
):
    undisturbed = hashes(raypfl_json(*(word.replace("mine", "undisturbed") for word in command)))
    assert interrupted(monkeypatch, interrupted_method, *command).exit_code == 130
    assert hashes(raypfl_json(*command)) == undisturbed
    with monkeypatch.context() as patch:
        patch.setattr(driver, "resume", None)  # nothing is left to run
        assert hashes(raypfl_json(*command)) == undisturbed


def test_runs_and_trials_of_code_that_was_edited_since_are_told_of(workdir: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(workdir)
    (workdir / "own_method.py").write_text("from base_of_own_method import Base\n\nclass Mine(Base):\n    pass\n")
    base = workdir / "base_of_own_method.py"
    base.write_text("from raypfl.methods import FedAvg\n\nclass Base(FedAvg):\n    pass\n")
    Path("rates.yaml").write_text(
        "experiment: {data: {name: digits, val_fraction: 0.2}}\nsearch: {training.lr: {choice: [0.1]}}"
    )
    start = ["run", *SMALL, "method=own_method:Mine", *RUN_DIR]
    resume = ["resume", "kept/mine", "rounds=4"]
    sweep = ["tune", "rates.yaml", *SMALL, "method=own_method:Mine", "trials=1", "engine.threads=1"]

    def warnings(*command: str) -> int:
        for name in ("own_method", "base_of_own_method"):  # as in another process
            sys.modules.pop(name, None)
        carried_out = raypfl(*command)
        assert carried_out.exit_code == 0, carried_out.output
        return carried_out.stderr.count("own_method (or what it imports) was edited since")

    assert [warnings(*command) for command in (start, start, sweep, sweep)] == [0, 0, 0, 0]
    base.write_text(base.read_text() + "    weighting = 'uniform'\n")
    assert [warnings(*command) for command in (start, sweep, resume, resume)] == [1, 1, 1, 0]


def test_a_comparison_killed_while_its_folder_was_made_starts_anew(workdir: Path):
    unfinished = workdir / "kept" / "mine" / "fedavg-s0"
    unfinished.mkdir(parents=True)
    assert [run["status"] for run in raypfl_json(*COMPARISON)["runs"]] == ["finished"] * 2
    assert sorted(path.name for path in unfinished.parent.iterdir() if path.is_dir()) == ["ditto-s0", "fedavg-s0"]


def test_a_command_for_another_run_is_refused_and_leaves_the_folder_as_it_was(workdir: Path):
    raypfl_json(*COMMAND)
    before = (workdir / "kept" / "mine" / "experiment.yaml").read_text()
    for words, sentence in (
        (["training.lr=0.3"], r"kept/mine has another run: training.lr is 0.1 there, not 0.3. Name another folder\.$"),
        (["rounds=9"], r"rounds is 3 there, not 9.*`raypfl resume kept/mine KEY=VALUE`"),
        (["checkpoint.location=elsewhere"], r"checkpoint.location is None there, not 'elsewhere'"),
        (["engine.executor=sequential"], r"engine.executor is 'vectorised' there, not 'sequential'"),
        (["seeds=2"], r"kept/mine has a single run, and this command a comparison of 2"),
    ):
        refused = raypfl(*COMMAND, *words)
        assert refused.exit_code == 2
        assert re.search(sentence, " ".join(refused.output.split()))
        assert (workdir / "kept" / "mine" / "experiment.yaml").read_text() == before


def test_a_comparison_is_not_mistaken_for_a_run_or_another_comparison():
    raypfl_json(*COMPARISON)
    for words, sentence in (
        (COMMAND, "kept/mine has a comparison of 2 runs, and this command a single run"),
        (
            ["run", *SMALL, "--method", "fedavg,fedprox", *RUN_DIR],
            "kept/mine/ditto-s0 has another run: method.name is 'ditto' there",
        ),
        ([*COMPARISON, "rounds=9"], "change what is there: `raypfl resume kept/mine KEY=VALUE`."),
    ):
        refused = raypfl(*words)
        assert (refused.exit_code, sentence in " ".join(refused.output.split())) == (2, True), refused.output


def test_a_comparison_does_not_take_a_run_that_has_the_name_of_one_of_its_own_for_it(workdir: Path):
    raypfl_json("run", *SMALL, "--method", "fedavg", "--run-dir", "kept/mine/fedavg-s0")
    before = (workdir / "kept/mine/fedavg-s0/experiment.yaml").read_text()
    refused = raypfl(*COMPARISON, "training.lr=0.3")
    assert (refused.exit_code, "kept/mine/fedavg-s0 already has a run" in refused.output) == (2, True)
    assert (workdir / "kept/mine/fedavg-s0/experiment.yaml").read_text() == before
    assert [path.name for path in (workdir / "kept/mine").iterdir()] == ["fedavg-s0"]


def test_settings_that_change_no_result_may_differ_the_second_time(monkeypatch: pytest.MonkeyPatch, workdir: Path):
    assert interrupted(monkeypatch, "fedavg", *COMMAND).exit_code == 130
    assert raypfl_json(*COMMAND, "tracking.experiment=other", "checkpoint.keep=7")["runs"][0]["status"] == "finished"
    settings = description(workdir / "kept" / "mine")
    assert (settings.tracking.experiment, settings.checkpoint.keep) == ("other", 7)


def test_a_lost_folder_is_written_again_from_the_checkpoints_of_a_finished_run(workdir: Path):
    location = f"checkpoint.location=file://{workdir}/store"
    first = raypfl_json(*COMMAND, location)
    run_dir = workdir / "kept" / "mine"
    tables = ("rounds", "evaluations", "ledger")
    before = [pq.read_table(run_dir / f"{name}.parquet") for name in tables]

    shutil.rmtree(workdir / "kept")
    assert hashes(raypfl_json(*COMMAND, location)) == hashes(first)
    assert [pq.read_table(run_dir / f"{name}.parquet") for name in tables] == before


@pytest.mark.parametrize(
    ("command", "words", "sentence"),
    [
        (COMMAND, ["training.lr=0.3"], "has checkpoints of another run: training.lr is 0.1 there, not 0.3."),
        (COMPARISON, ["method.weighting=uniform"], "method.weighting is 'samples' there, not 'uniform'."),
        (COMMAND, ["rounds=2"], "has already done 3"),
    ],
)
def test_checkpoints_of_another_run_are_not_taken_for_those_of_a_lost_folder(
    workdir: Path, command: list[str], words: list[str], sentence: str
):
    location = f"checkpoint.location={workdir}/store"
    raypfl_json(*command, location)
    shutil.rmtree(workdir / "kept")
    refused = raypfl(*command, location, *words)
    assert (refused.exit_code, sentence in " ".join(refused.output.split())) == (2, True), refused.output


def test_more_rounds_follow_the_checkpoints_of_a_lost_folder(workdir: Path):
    location = f"checkpoint.location={workdir}/store"
    whole = raypfl_json(*(word.replace("mine", "whole") for word in COMMAND), "rounds=5")
    raypfl_json(*COMMAND, location)
    shutil.rmtree(workdir / "kept")
    assert hashes(raypfl_json(*COMMAND, location, "rounds=5")) == hashes(whole)
