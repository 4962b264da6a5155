"""Sweeps with ASHA whose trials advance together: its decisions, the trials' bits, interruptions and records."""

from __future__ import annotations

import csv
import json
import math
import pickle
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
from ray.tune.schedulers import AsyncHyperBandScheduler

from raypfl import Result
from raypfl.common.errors import Stopped
from raypfl.engine.events import Evaluated
from raypfl.integrations.tuning.result import SweepResult, tune
from raypfl.integrations.tuning.together.asha import REPORTS, Asha
from raypfl.runs.driver import run
from raypfl.runs.several import processes
from tests.support.command import raypfl
from tests.support.sweeps import TOGETHER, Interrupt, mlflow_runs, small, times_of_ends, tracked_file

SWEEP = small(
    search={"training.lr": {"loguniform": [0.001, 1]}},
    scheduler={"name": "asha", "grace": 1, "factor": 2},
    trials=6,
)


@pytest.mark.parametrize("mode", ["max", "min"])
def test_decisions_are_those_of_ray_tune_for_the_same_reports_in_every_process_and_after_a_kill(
    tmp_path: Path, mode: str
):
    draw = random.Random(0)
    trials = [f"{number:05}" for number in range(20)]
    settings = {"time_attr": "round", "metric": "loss", "mode": mode, "max_t": 30, "reduction_factor": 2.5}

    with_tune = AsyncHyperBandScheduler(**settings)
    asha = Asha(tmp_path / REPORTS, AsyncHyperBandScheduler(**settings), "loss", trials)
    several = [pickle.loads(pickle.dumps(asha)) for _ in range(3)]
    for trial in trials:
        with_tune.on_trial_add(None, SimpleNamespace(trial_id=trial))

    rounds = dict.fromkeys(trials, 0)
    stopped = {}
    while going := [trial for trial in trials if rounds[trial] < 30 and trial not in stopped]:
        trial = draw.choice(going)
        rounds[trial] += 3  # so that a report may pass a rung
        is_last = rounds[trial] == 30
        value = math.nan if draw.random() < 0.05 else draw.random()

        # What Tune's controller does: see TuneController._process_trial_result.
        tune_trial = SimpleNamespace(trial_id=trial)
        result = {"round": rounds[trial], "loss": value}
        decision = "CONTINUE" if is_last else with_tune.on_trial_result(None, tune_trial, result)
        if is_last or decision == "STOP":
            with_tune.on_trial_complete(None, tune_trial, result)
        if decision == "STOP":
            stopped[trial] = rounds[trial]

        process = draw.choice(several)
        assert process.goes_on(trial, rounds[trial], value, is_last) == (decision == "CONTINUE")
        if draw.random() < 0.2:
            with (tmp_path / REPORTS).open("a") as file:
                file.write('{"trial": "0')  # a kill cut this line off
        # A run that continues from an earlier checkpoint reports a round again, perhaps in another process.
        assert draw.choice(several).goes_on(trial, rounds[trial], 0.0, is_last) == (decision == "CONTINUE")

    assert 0 < len(stopped) < 20
    assert all(asha.stopped_after(trial) == stopped.get(trial) for trial in trials)


def test_trials_under_asha_advance_together_to_the_bits_of_lone_runs_also_after_an_interruption(tmp_path: Path):
    statuses: list[set[str]] = []

    def note(outcome: SweepResult) -> None:
        statuses.append({trial.status for trial in outcome.trials})

    changes = [f"output={tmp_path}", *TOGETHER]
    interrupted = tune(SWEEP, changes, show=Interrupt())
    assert interrupted.status == "stopped"
    outcome = tune(SWEEP, changes, show=note)
    assert {trial.status for trial in outcome.trials} == {"finished", "stopped"}
    assert any({"running", "stopped"} <= seen for seen in statuses), "what is shown lags behind"

    together = []
    for trial in outcome.trials:

        def stop(event: object, end: int = trial.round) -> None:
            if isinstance(event, Evaluated) and event.round == end < 4:
                raise Stopped("as ASHA did")

        result = Result.load(outcome.folder / "trials" / trial.name)
        together.append(result.metadata["together"])
        experiment = outcome.sweep.configured(trial.drawn).override(["engine.backend=inline"])
        alone = run(experiment, listeners=[stop])
        assert (result.status, result.round) == (trial.status, trial.round) == (alone.status, alone.round)
        assert result.weights_hash == alone.weights_hash
        assert result.evaluations.equals(alone.evaluations)
    assert max(together) == 6

    times = times_of_ends(outcome.folder)
    assert tune(SWEEP, changes).rows() == outcome.rows()
    assert times_of_ends(outcome.folder) == times, "a trial that had ended ran again"


def test_a_trial_killed_between_its_decision_and_its_end_ends_with_the_same_round(tmp_path: Path):
    changes = [f"output={tmp_path}", *TOGETHER, "checkpoint.every=1"]
    outcome = tune(SWEEP, changes)
    before = [(trial.status, trial.round, trial.values) for trial in outcome.trials]
    for trial in outcome.trials:
        if trial.status == "stopped":
            (outcome.folder / "trials" / trial.name / "summary.json").unlink()
    reports = (outcome.folder / REPORTS).read_text()
    assert all(json.loads(line)["trial"] for line in reports.splitlines())

    shown: set[tuple[str, int]] = set()
    again = tune(
        SWEEP, changes, show=lambda outcome: shown.update((trial.status, trial.round) for trial in outcome.trials)
    )
    assert [(trial.status, trial.round, trial.values) for trial in again.trials] == before
    assert {end for end in shown if end[0] == "stopped"} == {trial[:2] for trial in before if trial[0] == "stopped"}
    assert (outcome.folder / REPORTS).read_text() == reports


@pytest.mark.thorough
@pytest.mark.usefixtures("ray_cluster")
def test_one_trial_after_another_has_the_table_that_it_has_on_ray_tune(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    on_tune = tune(SWEEP, [f"output={tmp_path}/tune", "engine.executor=auto", "concurrent=1"])
    monkeypatch.setattr(processes, "MOST_RUNS", 1)
    without = tune(SWEEP, [f"output={tmp_path}/inline", *TOGETHER])

    assert (on_tune.folder / "tune").exists() and not (without.folder / "tune").exists()
    assert without.rows() == on_tune.rows()
    assert {row["status"] for row in without.rows()} == {"finished", "stopped"}
    for trial in without.trials:
        runs = [Result.load(outcome.folder / "trials" / trial.name) for outcome in (without, on_tune)]
        assert runs[0].weights_hash == runs[1].weights_hash


@pytest.mark.thorough
@pytest.mark.usefixtures("ray_cluster")
def test_trials_under_asha_in_several_processes_are_recorded_and_more_of_them_compete_with_the_first(
    tmp_path: Path, mlflow_database: Path
):
    file, uri = tracked_file(tmp_path, mlflow_database, SWEEP)
    words = ["tune", str(file), f"output={tmp_path}/runs", "engine.executor=auto", "--quiet"]
    folder = tmp_path / "runs/small"
    for trials in (6, 9):
        ended = raypfl(*words, f"trials={trials}")
        assert ended.exit_code == 0, ended.output
    assert not (folder / "tune").exists()

    rows = list(csv.DictReader((folder / "trials.csv").open()))
    assert len(rows) == 9 and {row["status"] for row in rows} == {"finished", "stopped"}
    (parent,), children = mlflow_runs(uri)
    by_trial = {child.data.tags["trial"]: child.info.status for child in children}
    assert parent.info.status == "FINISHED"
    assert by_trial == {row["trial"]: "FINISHED" if row["status"] == "finished" else "KILLED" for row in rows}

    reported = raypfl("report", str(folder), "--out", str(tmp_path / "report.html"))
    assert reported.exit_code == 0, reported.output
