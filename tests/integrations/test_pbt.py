"""Sweeps with PBT whose trials advance together: its decisions, the trials' bits, interruptions and records."""

from __future__ import annotations

import itertools
import json
import math
import random
from pathlib import Path

import numpy as np
import pytest

from raypfl import Result
from raypfl.common.errors import ConfigError, Stopped
from raypfl.engine.events import Event, RoundFinished, RunFinished, RunStarted
from raypfl.integrations.tuning.result import SweepResult, tune
from raypfl.integrations.tuning.search import check
from raypfl.integrations.tuning.sweep import load
from raypfl.integrations.tuning.together import pbt
from raypfl.integrations.tuning.together.pbt import GENERATIONS, Pause, WithoutPauses
from raypfl.integrations.tuning.together.pbt_decisions import PbtDecisions
from raypfl.integrations.tuning.trial import schedule_of
from raypfl.runs.driver import resume, run
from tests.integrations.test_tuning import run_schedule
from tests.support.command import raypfl
from tests.support.sweeps import TOGETHER, Interrupt, mlflow_runs, small, times_of_ends, tracked_file

SWEEP = small(
    search={"training.lr": {"loguniform": [0.001, 1]}},
    scheduler={"name": "pbt", "interval": 1},
    points=[{"training.lr": rate} for rate in (0.001, 0.1, 0.002, 0.05)],
    trials=4,
)


def decisions(**options: object) -> PbtDecisions:
    searched = {"training.lr": {"loguniform": [0.001, 1]}, "training.batch_size": {"choice": [4, 8, 16]}}
    sweep = load(small(search=searched, scheduler={"name": "pbt", "interval": 2, "options": options}))
    first, (mode,) = check(sweep)
    return PbtDecisions(sweep, first, "accuracy/val", mode)


def configurations(count: int) -> dict[str, dict]:
    return {f"{number}": {"training.lr": 0.001 * (number + 1), "training.batch_size": 1} for number in range(count)}


def test_the_worst_quarter_continues_from_the_best_with_a_configuration_near_theirs():
    values = dict(zip("01234567", [0.5, 0.1, 0.9, 0.6, 0.2, 0.8, math.nan, 0.4], strict=True))
    drawn = configurations(8)
    seen = set()
    decide = decisions(resample_probability=0.0)
    for round in range(2, 80, 2):
        copies = decide(round, drawn, values)
        assert copies.keys() == {"1", "4"}
        for copy in copies.values():
            assert copy.source in ("2", "5")
            factor = copy.drawn["training.lr"] / drawn[copy.source]["training.lr"]
            seen.add((copy.source, f"{factor:.6f}", copy.drawn["training.batch_size"]))
    # Of two lists' places, the neighbours of 1.
    assert seen == set(itertools.product("25", ["0.800000", "1.200000"], [0, 2]))


def test_decisions_follow_from_the_seed_the_round_and_the_values_and_leave_the_process_its_random_streams():
    values = {f"{number}": float(number) for number in range(8)}
    random.seed(5)
    np.random.seed(5)
    expected = (random.random(), np.random.random())
    random.seed(5)
    np.random.seed(5)
    decide = decisions(resample_probability=1.0)
    first = decide(2, configurations(8), values)
    assert (random.random(), np.random.random()) == expected
    assert decide(4, configurations(8), values) != first
    assert (
        decide(2, configurations(8), values)
        == first
        == decisions(resample_probability=1.0)(2, configurations(8), values)
    )
    assert json.loads(json.dumps([copy.drawn for copy in first.values()])) == [copy.drawn for copy in first.values()]


def test_before_the_burn_in_period_and_without_values_nothing_is_copied():
    values = {f"{number}": float(number) for number in range(8)}
    decide = decisions(burn_in_period=5)
    assert decide(4, configurations(8), values) == {} and decide(6, configurations(8), values)
    assert decide(6, configurations(8), {}) == {} == decide(6, configurations(8), {"3": 1.0})


def test_an_option_that_pbt_does_not_have_is_refused_before_anything_runs(tmp_path: Path):
    wrong = {"name": "pbt", "options": {"quantile": 0.5}}
    with pytest.raises(ConfigError, match="did you mean 'quantile_fraction'"):
        tune(small(scheduler=wrong), [f"output={tmp_path}", *TOGETHER])
    assert not list(tmp_path.iterdir())


@pytest.mark.thorough
def test_a_population_has_the_bits_of_lone_runs_and_decides_alike_after_interruptions(tmp_path: Path):
    undisturbed = tune(SWEEP, [f"output={tmp_path}/undisturbed", "rounds=3", *TOGETHER])
    changes = [f"output={tmp_path}/interrupted", "rounds=3", *TOGETHER]
    interrupted = tune(SWEEP, changes, show=Interrupt(2))  # in the second generation
    assert interrupted.status == "stopped"
    assert {trial.status for trial in interrupted.trials} == {"waiting"}
    outcome = tune(SWEEP, changes)

    assert outcome.rows() == undisturbed.rows()
    assert [(trial.status, trial.round) for trial in outcome.trials] == [("finished", 3)] * 4
    generations = recorded_generations(outcome)
    assert [generation["round"] for generation in generations] == [1, 2]
    assert generations == recorded_generations(undisturbed)

    runs = {trial.name: Result.load(outcome.folder / "trials" / trial.name) for trial in outcome.trials}
    assert {run.metadata["together"] for run in runs.values()} == {4}
    copied = set()
    for trial in outcome.trials:
        result = runs[trial.name]
        assert result.weights_hash == Result.load(undisturbed.folder / "trials" / trial.name).weights_hash
        schedule = schedule_of(result.run_dir)
        if schedule:
            copied.add(trial.name)
            alone = run_schedule(outcome.sweep, schedule, tmp_path / trial.name)
        else:
            alone = run(outcome.sweep.configured(trial.drawn).override(["engine.backend=inline"]))
        assert result.weights_hash == alone.weights_hash
        assert result.evaluations.equals(alone.evaluations)
        assert result.rounds["round"].to_pylist() == [1, 2, 3]
    assert 0 < len(copied) < 4

    last_copies = {}
    for generation in generations:
        for name, copy in generation["copies"].items():
            last_copies[name] = (generation["round"], copy)
    assert last_copies.keys() == copied
    for name, (round, copy) in last_copies.items():
        *_, parent = [entry for entry in runs[name].history if "parent" in entry]
        assert parent["parent"] == {"run": str(runs[copy["source"]].run_dir), "round": round}
        assert "training.lr" in parent["changed"]
        assert schedule_of(runs[name].run_dir)[-1] == {"after": round, "drawn": copy["drawn"]}

    times = times_of_ends(outcome.folder)
    assert tune(SWEEP, changes).rows() == outcome.rows()
    assert times_of_ends(outcome.folder) == times, "a trial that had ended ran again"


def recorded_generations(outcome: SweepResult) -> list[dict]:
    lines = (outcome.folder / GENERATIONS).read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_a_decision_that_a_kill_interrupted_is_carried_out_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    two = SWEEP | {"points": SWEEP["points"][:2], "trials": 2}
    undisturbed = tune(two, [f"output={tmp_path}/undisturbed", "rounds=2", *TOGETHER])
    changes = [f"output={tmp_path}/killed", "rounds=2", *TOGETHER]

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    for function in ("branch", "extend_schedule"):
        with monkeypatch.context() as patched:
            patched.setattr(pbt, function, die)
            with pytest.raises(KeyboardInterrupt):
                tune(two, changes)
    outcome = tune(two, changes)
    assert outcome.rows() == undisturbed.rows()
    assert recorded_generations(outcome) == recorded_generations(undisturbed)


def test_a_trial_that_diverges_leaves_the_population_and_the_others_go_on(tmp_path: Path):
    points = [{"training.lr": rate} for rate in (0.001, 1e9, 0.1)]
    described = SWEEP | {"search": {"training.lr": {"loguniform": [0.001, 1e9]}}, "points": points, "trials": 3}
    starts: list[str] = []

    def note(trial: str, seed: int, event: Event) -> None:
        if isinstance(event, RunStarted):
            starts.append(trial)

    outcome = tune(described, [f"output={tmp_path}", "rounds=2", *TOGETHER], hear=note)
    assert [trial.status for trial in outcome.trials] == ["finished", "diverged", "finished"]
    assert starts.count("00001") == 1, "it was trained again in the second generation"
    assert outcome.status == "finished" and outcome.trials[1].error.startswith("Training diverged")
    (generation,) = recorded_generations(outcome)
    assert generation["values"].keys() == {"00000", "00002"}
    assert [copy["source"] for copy in generation["copies"].values()] == ["00002"]


def test_a_run_pauses_after_its_rounds_evaluation_wherever_it_was_interrupted(tmp_path: Path):
    experiment = load(SWEEP).configured({"training.lr": 0.1}).override(["engine.backend=inline"])

    def before_evaluation(event: Event) -> None:
        if isinstance(event, RoundFinished) and event.round == 2:
            raise Stopped("before the evaluation")

    folder = tmp_path / "run"
    stopped = run(experiment, listeners=[before_evaluation], run_dir=folder)
    assert (stopped.round, stopped.last_rounds) == (2, [1])
    for _ in range(2):
        pause = Pause(2)
        paused = resume(folder, listeners=[pause])
        assert (paused.status, paused.round, paused.last_rounds, pause.has_ended_run) == ("stopped", 2, [2], True)
        (folder / "summary.json").unlink()  # which a kill came before

    last = Pause(4)
    assert (resume(folder, listeners=[last]).status, last.has_ended_run) == ("finished", False)


def test_pauses_are_not_heard_unless_a_trial_then_continues_another_one():
    heard: list[tuple[str, Event]] = []
    listener = WithoutPauses(lambda trial, seed, event: heard.append((trial, event)))
    experiment = load(SWEEP).base

    def started(round: int, **metadata: object) -> RunStarted:
        return RunStarted("", "", experiment, metadata, round)

    def ended(status: str, round: int) -> RunFinished:
        return RunFinished(status, round, "", None, {}, None, None)

    first = [started(0), ended("stopped", 2), started(2), ended("stopped", 4), started(4, parent={"round": 4})]
    for event in [*first, ended("stopped", 5)]:
        listener("0", 0, event)
    listener("1", 0, ended("finished", 6))
    assert heard == [("0", first[0]), ("0", first[3]), ("0", first[4]), ("1", ended("finished", 6))]
    listener.pass_on_ends()
    assert heard[-1] == ("0", ended("stopped", 5))


@pytest.mark.thorough
@pytest.mark.usefixtures("ray_cluster")
def test_a_population_in_several_processes_is_the_one_in_a_single_process_and_is_recorded(
    tmp_path: Path, mlflow_database: Path
):
    file, uri = tracked_file(tmp_path, mlflow_database, SWEEP)
    ended = raypfl("tune", str(file), f"output={tmp_path}/runs", "engine.executor=auto", "--quiet")
    assert ended.exit_code == 0, ended.output
    folder = tmp_path / "runs/small"
    assert not (folder / "tune").exists()

    inline = tune(SWEEP, [f"output={tmp_path}/inline", *TOGETHER])
    assert (folder / GENERATIONS).read_text() == (inline.folder / GENERATIONS).read_text()
    assert (folder / "trials.csv").read_text() == (inline.folder / "trials.csv").read_text()
    for trial in inline.trials:
        runs = [Result.load(of / "trials" / trial.name) for of in (folder, inline.folder)]
        assert runs[0].weights_hash == runs[1].weights_hash

    (parent,), children = mlflow_runs(uri)
    assert [child.info.status for child in (parent, *children)] == ["FINISHED"] * 5
    resumed = {child.data.tags["trial"] for child in children if "resumed.training.lr" in child.data.tags}
    assert resumed == {trial.name for trial in inline.trials if schedule_of(inline.folder / "trials" / trial.name)}

    reported = raypfl("report", str(folder), "--out", str(tmp_path / "report.html"))
    assert reported.exit_code == 0, reported.output
