"""Sweeps: search spaces, how trials are stopped, copied and resumed, and the files that they leave."""

from __future__ import annotations

import contextlib
import csv
import fcntl
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from raypfl import Experiment, Result
from raypfl.common.errors import ConfigError, Stopped
from raypfl.common.files import locked
from raypfl.engine import history
from raypfl.engine.events import Checkpointed, Event, RunFinished, RunStarted
from raypfl.experiment.spaces import draws_of_point, spaces_of, values_by_column, values_by_setting
from raypfl.integrations.tuning.pictures import importances
from raypfl.integrations.tuning.result import SweepResult, tune
from raypfl.integrations.tuning.search import check, search
from raypfl.integrations.tuning.sweep import Sweep, load
from raypfl.integrations.tuning.trial import SweepContext, Trial, close, metric_values, run_seeds, schedule_of
from raypfl.results.report.searches.folders import CONFIGURATIONS
from raypfl.results.report.searches.page import read as read_search
from raypfl.runs.driver import resume, run
from raypfl.runs.records import write_description
from raypfl.storage import lease
from tests.support.command import raypfl
from tests.support.processes import start_command
from tests.support.runs import Interrupt as InterruptRun
from tests.support.sweeps import SMALL, TOGETHER, Interrupt, mlflow_runs, silent, small, tracked_in

ROOT = Path(__file__).parents[2]


def test_a_space_inside_a_choice_counts_only_where_the_choice_is_made():
    methods = ["fedavg", {"name": "ditto", "lam": {"loguniform": [0.1, 10]}}]
    spaces = spaces_of({"method": {"choice": methods}, "rounds": {"grid": [2, 4]}})
    assert [space.name for space in spaces] == ["method", "method.lam@1", "rounds"]

    assert values_by_setting(spaces, {"method": 0, "method.lam@1": 3.0, "rounds": 1}) == {
        "method": "fedavg",
        "rounds": 4,
    }
    ditto = {"method": 1, "method.lam@1": 3.0, "rounds": 0}
    assert values_by_setting(spaces, ditto) == {"method": {"name": "ditto", "lam": 3.0}, "rounds": 2}
    assert values_by_column(spaces, ditto) == {"method": "ditto", "method.lam": 3.0, "rounds": 2}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"search": {"training.lr": {"loguniforn": [1, 2]}}}, "did you mean 'loguniform'"),
        ({"search": {"training.lr": {"loguniform": [0, 2]}}}, "0 < low < high"),
        ({"search": {"training.lr": [1, 2]}}, "must be one space"),
        ({"metric": {"protocol": "local"}}, "looks at test data"),
        ({"scheduler": "asha", "seeds": 2}, "one run, but seeds is 2"),
        ({"searcher": "optuna", "search": {"training.lr": {"grid": [1, 2]}}}, "does not go through"),
        ({"search": {"training.lr": {"grid": [1, 2]}}}, "trials=3 would repeat equal trials; write trials: 1"),
        ({"metric": [{"protocol": "val"}, {"protocol": "val", "value": "worst_decile"}]}, "several objectives"),
        ({"scheduler": "pb2"}, "changes numbers only"),
        ({"trails": 3}, "did you mean 'trials'"),
        ({"output": "here"}, "output is a setting of the experiment; write it under experiment"),
        ({"scheduler": "ashaa"}, "did you mean 'asha'"),
        ({"scheduler": {"name": "pbt", "factor": 4}}, "scheduler.factor has no effect with scheduler: pbt"),
        ({"search": {"training.lr": {"quniform": [0, 1]}}}, r"must be \[low, high, step\]"),
        ({"search": {"training.lr": {"quniform": [0.1, 0.2, 0.5]}}}, "fewer than two multiples"),
        ({"points": [{"training.lr": 2}]}, "search.training.lr does not have"),
        ({"points": [{"training.lr": 0.1}] * 4}, "points has 4 configurations, but trials is 3"),
        ({"stop": {"value": 0.9}, "seeds": 2}, "stop.value ends a trial that is one run"),
        ({"search": {}}, "search is empty; it needs at least 1 entry"),
        ({"search": {"output": {"choice": ["a", "b"]}}}, "search has output, which changes no result beyond"),
        ({"search": {"engine.threads": {"choice": [1, 2]}}}, "search has engine.threads, which changes no result"),
        ({"stop": 0.9}, "stop is 0.9; it must be options as 'key: value'"),
        ({"metric": "accuracy"}, r"metric\[0\] is 'accuracy'; it must be options as 'key: value'"),
        ({"experiment": "digits"}, "experiment is 'digits'; it must be options as 'key: value'"),
        ({"search": ["seed"]}, r"search is \['seed'\]; it must be options as 'key: value'"),
        ({"metric": {"values": "loss"}}, "did you mean 'value'"),
        ({"searcher": {"seed": -1}}, r"searcher\.seed is -1; it must be greater than or equal to 0"),
        ({"seeds": True}, "seeds is True; it must be a whole number"),
    ],
)
def test_an_invalid_sweep_is_refused_in_a_sentence(changes: dict, sentence: str):
    for assignments in ((), ("rounds=2", "search.training.epochs=null")):
        with pytest.raises(ConfigError, match=sentence):
            load(small(**changes), assignments)


@pytest.mark.parametrize(
    ("spaces", "sentence"),
    [
        ({"training.lr": {"choice": [0.1, -1]}}, r"training\.lr is -1"),
        ({"method": {"choice": ["fedavg", {"name": "apfl", "alpha": {"uniform": [0.5, 2]}}]}}, r"method\.alpha is 2"),
        ({"training.steps": {"uniform": [1, 3]}}, r"training\.steps is 1\.76; it must be a whole number"),
    ],
)
def test_a_value_outside_of_a_settings_range_is_refused_before_anything_runs(tmp_path: Path, spaces, sentence):
    sweep = load(small(search=spaces), [f"output={tmp_path}"])
    with pytest.raises(ConfigError, match=sentence):
        search(sweep, *check(sweep), tmp_path / "s", silent, silent)
    assert not (tmp_path / "s").exists()


def test_a_folder_with_another_sweep_is_refused_with_the_settings_that_differ(tmp_path: Path):
    described = load(small(), [f"output={tmp_path}"])
    described.write(tmp_path)
    other = load(small(), [f"output={tmp_path}", "rounds=9", "searcher=optuna", "trials=5"])
    with pytest.raises(ConfigError, match=r"its sweep.yaml has other values of experiment.rounds, searcher.name\. "):
        search(other, *check(other), tmp_path, silent, silent)


def test_a_command_names_settings_of_the_experiment_with_or_without_their_section():
    assert load(small(), ["experiment.rounds=9"]) == load(small(), ["rounds=9"])


@pytest.mark.parametrize(("points", "trials"), [((), 1), ([{"training.lr": 1}], 2)])
def test_grids_alone_have_one_pass_by_default(points, trials):
    changes = {key: value for key, value in small(points=points).items() if key != "trials"}
    assert load({**changes, "search": {"training.lr": {"grid": [1, 2]}}}).trials == trials
    assert load({**changes, "search": {"training.lr": {"choice": [1, 2]}}}).trials == 10


def test_a_command_that_sets_what_the_sweep_searches_is_refused():
    with pytest.raises(ConfigError, match=r"training\.lr is set, but the sweep searches it"):
        load(small(), ["training.lr=0.1"])
    assert load(small(), ["training.lr=0.1", "search.training.lr=null", "search.seed={choice: [1, 2]}"])


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (["data.val_fraction=0"], "is on validation data, but data.val_fraction is 0"),
        (["metric.model=personal"], "but fedavg makes no personal models"),
        (["metric.model=global", "search.method={choice: [fedavg, local]}"], "but local makes no global models"),
        (
            ["scheduler=asha", "scheduler.grace=4"],
            "but a trial has 4 rounds, so it would decide nothing",
        ),
        (["scheduler=asha", "evaluation.every=0"], "evaluation.every is 4.*so it would decide nothing"),
        (["scheduler=asha", "scheduler.grace=3", "evaluation.every=2"], "so it would decide nothing"),
        (["scheduler=pbt", "scheduler.interval=4"], "so it would decide nothing. Choose a smaller scheduler.interval"),
        (["scheduler=pbt", "search.method={choice: [fedavg, ditto]}"], r"these depend on method\.name"),
        (
            ["scheduler=pbt", "partition=dirichlet", "search.partition.alpha={uniform: [0.1, 1]}"],
            r"these depend on partition\.alpha",
        ),
    ],
)
def test_a_sweep_that_could_find_nothing_is_refused_before_anything_runs(
    tmp_path: Path, changes: list[str], sentence: str
):
    with pytest.raises(ConfigError, match=sentence):
        check(load(small(), [f"output={tmp_path}", *changes]))


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("scheduler", [{"name": "median", "grace": 1}, {"name": "pb2", "interval": 1}])
def test_other_schedulers_of_ray_tune_take_a_sweep_to_its_end(tmp_path: Path, scheduler: dict):
    sweep = load(small(search={"training.lr": {"uniform": [0.001, 1]}}, scheduler=scheduler), [f"output={tmp_path}"])
    trials = search(sweep, *check(sweep), tmp_path / "sweep", silent, silent)
    assert len(trials) == 3 and all(trial.has_ended and not trial.error and trial.values for trial in trials)
    assert any(trial.round == 4 for trial in trials)


@pytest.mark.parametrize("file", sorted((ROOT / "tune_configs").glob("*.yaml")), ids=lambda file: file.stem)
def test_every_search_that_comes_with_raypfl_is_valid_and_says_where_it_is_from(file: Path):
    sweep = load(file)
    lowest = {space.name: space.values[0] if space.is_range else 0 for space in sweep.spaces}
    assert sweep.configured(lowest).rounds > 0
    assert sweep.source or file.stem.startswith("digits"), "a grid of a paper names its section"


@pytest.mark.thorough
@pytest.mark.usefixtures("ray_cluster")
def test_a_sweep_leaves_a_table_pictures_and_the_best_configuration_which_repeats_the_trials_bits(
    tmp_path: Path, mlflow_database: Path
):
    file = tmp_path / "small.yaml"
    tracking = tracked_in(tmp_path, mlflow_database)
    asha = {"name": "asha", "grace": 1, "factor": 2}
    described = small(experiment=SMALL["experiment"] | {"tracking": tracking}, scheduler=asha, trials=2)
    file.write_text(yaml.safe_dump(described | {"points": [{"training.lr": 0.25}], "tensorboard": True}))
    words = [str(file), f"output={tmp_path}/runs", "search.training.lr.qloguniform=[0.05, 0.5, 0.05]", "--quiet"]

    two_trials = raypfl("tune", *words, "concurrent=1")
    assert two_trials.exit_code == 0, two_trials.output
    folder = tmp_path / "runs/small"
    times = {summary: summary.stat().st_mtime_ns for summary in folder.glob("trials/*/summary.json")}
    assert len(times) == 2 and len(list(folder.glob("tune/*/events.out.tfevents*"))) == 2

    five_trials = raypfl("tune", *words, "trials=5", "concurrent=1")
    assert five_trials.exit_code == 0, five_trials.output
    assert all(summary.stat().st_mtime_ns == time for summary, time in times.items()), "a finished trial ran again"

    rows = list(csv.DictReader((folder / "trials.csv").open()))
    assert len(rows) == 5 and {row["status"] for row in rows} == {"finished", "stopped"}
    values = [float(row["accuracy/val"]) for row in rows]
    assert values == sorted(values, reverse=True)
    rates = {row["trial"]: 20 * float(row["training.lr"]) for row in rows}
    assert rates["00000"] == 5 and all(rate == pytest.approx(round(rate)) for rate in rates.values())
    assert all(int(row["round"]) == 4 for row in rows if row["status"] == "finished")
    assert {"configurations.png", "importance.png"} <= {file.name for file in folder.iterdir()}

    described = Experiment.from_yaml(folder / "best.yaml").override(["engine.backend=inline"])
    best = run(described, run_dir=tmp_path / "best")
    trial = Result.load(folder / "trials" / rows[0]["trial"])
    assert best.weights_hash == trial.weights_hash and best.round == 4
    assert all((folder / "trials" / row["trial"] / "summary.json").exists() for row in rows), "a stopped trial, too"

    reported = raypfl("report", str(folder), "--out", str(tmp_path / "report.html"))
    assert reported.exit_code == 0, reported.output
    page = (tmp_path / "report.html").read_text()
    assert page.count("data:image/png") == 2 and f"{100 * values[0]:.1f}" in page

    (parent,), children = mlflow_runs(tracking["uri"])
    assert parent.info.status == "FINISHED", "a scheduler that stops trials does not stop the sweep"
    assert {run.info.status for run in children} == {"FINISHED", "KILLED"}


@pytest.mark.thorough
@pytest.mark.usefixtures("ray_cluster")
def test_a_sweep_takes_a_users_searcher_and_scheduler_and_a_value_that_ends_trials(tmp_path: Path):
    sweep = {
        "searcher": {"name": "tests.support.custom_searcher:DoublingSearcher", "options": {"first": 0.1}},
        "scheduler": {"name": "ray.tune.schedulers:MedianStoppingRule", "options": {"min_samples_required": 9}},
        "stop": {"value": 0.0},
        "trials": 2,
    }
    outcome = tune(small(**sweep), [f"output={tmp_path}", "concurrent=1"])
    assert [(trial.status, trial.round) for trial in outcome.trials] == [("stopped", 1)] * 2
    assert {trial.drawn["training.lr"] for trial in outcome.trials} == {0.1, 0.2}
    best = outcome.grid.get_best_result()
    assert best.metrics["accuracy/val"] == outcome.best.values["accuracy/val"]


@pytest.mark.thorough
@pytest.mark.usefixtures("ray_cluster")
def test_when_its_time_is_over_a_sweep_ends_with_what_its_trials_have_reached(tmp_path: Path):
    outcome = tune(small(concurrent=1), [f"output={tmp_path}", "rounds=100000", "stop.seconds=6"])
    assert outcome.trials and {trial.status for trial in outcome.trials} == {"stopped"}
    for trial in outcome.trials:
        if trial.round:  # on a busy machine none has finished a round
            assert trial.round <= Result.load(tmp_path / "small/trials" / trial.name).round < 100000


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"scheduler": {"name": "pbt", "options": {"quantile": 0.5}}}, "did you mean 'quantile_fraction'"),
        ({"scheduler": {"name": "asha", "options": {"max_t": 3}}}, "other settings determine"),
        ({"searcher": {"name": "tests.support.custom_searcher:DoublingSearcher"}}, "cannot be made: TypeError"),
        ({"searcher": {"name": "tests.support.custom_searcher:DoublingSearchr"}}, "has no 'DoublingSearchr'"),
    ],
)
@pytest.mark.usefixtures("ray_cluster")
def test_options_that_ray_tune_refuses_are_refused_and_leave_no_file(tmp_path: Path, changes: dict, sentence: str):
    with pytest.raises(ConfigError, match=sentence):
        tune(small(**changes), [f"output={tmp_path}"])
    assert not list(tmp_path.rglob("*"))


def test_a_point_is_placed_in_the_spaces_that_count_for_it():
    choices = ["fedavg", {"name": "ditto", "lam": {"loguniform": [0.1, 10]}}]
    spaces = spaces_of({"method": {"choice": choices}, "rounds": {"qrandint": [10, 30, 10]}})
    for point in ({"method": "fedavg", "rounds": 30}, {"method": "ditto", "method.lam": 2.5, "rounds": 10}):
        assert values_by_column(spaces, draws_of_point(spaces, point)) == point

    for point, sentence in (
        ({"method": "fedavg", "rounds": 15}, "search.rounds does not have"),
        ({"method": "fedavg", "rounds": 10, "method.lam": 1.0}, "'method.lam', which is not searched there"),
        ({"method": "ditto", "rounds": 10}, "without method.lam"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            draws_of_point(spaces, point)


@pytest.mark.parametrize("space", [["quniform", [0.1, 1, 0.25]], ["qlograndint", [3, 50, 5]]])
def test_values_of_a_quantised_space_are_multiples_within_its_bounds_also_after_pbt_changed_them(space: list):
    kind, (low, high, step) = space
    (quantised,) = spaces_of({"training.lr": {kind: [low, high, step]}})
    values = {quantised.value(low + (high - low) * (k - 20) / 60) for k in range(100)}
    assert values == {step * k for k in range(1, 100) if low <= step * k <= high}


def test_a_quantised_space_includes_its_bounds_though_floating_point_numbers_are_a_little_off():
    (quantised,) = spaces_of({"training.lr": {"quniform": [0.3, 0.7, 0.1]}})
    draws = [{"training.lr": 3 * 0.1}, {"training.lr": 0.4}, {"training.lr": 0.5}, {"training.lr": 7 * 0.1}]
    assert draws[-1]["training.lr"] > 0.7 > 0.1 * (0.7 // 0.1)
    assert [quantised.value(draw["training.lr"]) for draw in draws] == [0.3, 0.4, 0.5, 0.7]
    assert draws_of_point([quantised], {"training.lr": 0.7}) == {"training.lr": 0.7}
    assert importances([quantised], draws, [0.1, 0.2, 0.3, 0.4]) == {"training.lr": 1.0}


def test_the_command_line_changes_and_drops_searched_settings():
    described = small(search={**SMALL["search"], "training.batch_size": {"choice": [8, 16]}})
    changes = ["search.training.lr.uniform=[0.1, 0.2]", "search.training.batch_size=null", "search.seed={grid: [1, 2]}"]
    assert load(described, changes).search == {"training.lr": {"uniform": [0.1, 0.2]}, "seed": {"grid": [1, 2]}}


def test_mlflow_gets_the_models_of_trials_only_if_the_sweep_says_so():
    assert load(small()).base.tracking.models_mb == 0
    assert load(small(), ["tracking.models_mb=3"]).base.tracking.models_mb == 3
    assert "models_mb" not in load(small()).settings()["tracking"], "a run of best.yaml uploads its models"


def test_in_mlflow_a_sweep_is_named_after_what_it_searches_however_many_trials_it_has(
    tmp_path: Path, mlflow_database: Path
):
    file = tmp_path / "rates.yaml"
    tracking = tracked_in(tmp_path, mlflow_database)
    described = SMALL["experiment"] | {"tracking": tracking, "rounds": 1, "output": str(tmp_path / "runs")}
    # The experiment's own values, which are the defaults, are among those that are searched.
    search = {"training.lr": {"grid": [0.1, 0.2]}, "method.server_optimizer": {"grid": ["sgd", "adam"]}}
    file.write_text(yaml.safe_dump(small(experiment=described, search=search, trials=1)))
    carried_out = raypfl("tune", str(file), *TOGETHER, "--quiet")
    assert carried_out.exit_code == 0, carried_out.output
    (parent,), children = mlflow_runs(tracking["uri"])
    assert parent.info.run_name == "small: fedavg by method.server_optimizer and training.lr" and len(children) == 4
    for child in children:
        params = child.data.params
        values = f"method.server_optimizer={params['method.server_optimizer']} training.lr={params['training.lr']}"
        score = 100 * child.data.metrics["accuracy/val/global"]
        assert child.info.run_name == f"fedavg {score:.1f} % s0 {values}", "by validation data, not by test data"

    best = max(child.data.metrics["accuracy/val/global"] for child in children)
    assert parent.data.metrics == {"accuracy/val": best}, "no differences on test data"
    headings, _, first, *others = parent.data.tags["mlflow.note.content"].splitlines()
    assert headings == "| trial | status | round | accuracy/val | method.server_optimizer | training.lr |"
    assert f"| finished | 1 | {100 * best:.1f} % |" in first and len(others) == 3


def run_schedule(sweep: Sweep, schedule: list[dict], folder: Path) -> Result:
    """Repeat a trial without Ray Tune: stop the run where its settings change, and continue with the next ones."""
    ends = [part["after"] for part in schedule[1:]]
    for part, end in zip(schedule, [*ends, None], strict=True):
        experiment = sweep.configured(part["drawn"]).override(["engine.backend=inline"])
        write_description(folder, experiment)

        def stop(event: object, end: int | None = end) -> None:
            if isinstance(event, Checkpointed) and event.round == end:
                raise Stopped("The settings change.")

        result = resume(folder, listeners=[stop], lockstep=True)
    return result


@pytest.mark.thorough
@pytest.mark.usefixtures("ray_cluster")
def test_trials_of_pbt_go_on_from_others_checkpoints_and_best_yaml_says_with_which_settings(tmp_path: Path):
    # Trials wait for each other: otherwise one may end before another has begun, and nothing is copied.
    halves = {"quantile_fraction": 0.5, "resample_probability": 0.0, "synch": True}
    pbt = {"name": "pbt", "interval": 1, "options": halves}
    outcome = tune(small(scheduler=pbt, trials=4, concurrent=2), [f"output={tmp_path}", "rounds=6"])
    trials = outcome.trials
    assert [(trial.status, trial.round) for trial in trials] == [("finished", 6)] * 4

    runs = [Result.load(tmp_path / "small/trials" / trial.name) for trial in trials]
    assert all(run.rounds["round"].to_pylist() == list(range(1, 7)) for run in runs)
    first_losses = {run.rounds["loss"][0].as_py() for run in runs}
    assert len(first_losses) < 4, "no trial went on from another's first round"
    assert len({run.experiment.training.lr for run in runs}) > 1
    copied = [entry for run in runs for entry in run.history if "parent" in entry]
    assert any("training.lr" in entry["changed"] for entry in copied)
    assert all(run.history[-1]["settings"] == run.experiment.to_dict() for run in runs)

    changed = False
    for trial, result in zip(trials, runs, strict=True):
        schedule = schedule_of(result.run_dir)
        changed |= len(schedule) > 1
        assert run_schedule(outcome.sweep, schedule, tmp_path / trial.name).weights_hash == result.weights_hash
    assert changed, "no settings were changed"

    comments = [line.removeprefix("# ") for line in (tmp_path / "small/best.yaml").read_text().splitlines()]
    assert outcome.changes == comments[1 : 1 + len(outcome.changes)]
    parts = [line for line in comments if line.startswith("  rounds ")]
    assert len(outcome.schedule) == len(parts) or not outcome.changes


@pytest.mark.thorough
@pytest.mark.usefixtures("ray_cluster")
def test_a_trials_value_is_the_mean_over_seeds_whose_runs_share_the_actors_of_its_placement_group(tmp_path: Path):
    sweep = load(small(trials=1, seeds=2), [f"output={tmp_path}", "ray.actors=1", "ray.cpus_per_actor=0.5"])
    (trial,) = search(sweep, *check(sweep), tmp_path / "seeds", silent, silent)

    runs = [Result.load(tmp_path / f"seeds/trials/00000/seed-{seed}") for seed in range(2)]
    assert [run.experiment.seed for run in runs] == [0, 1]
    assert [run.metadata["actors"] for run in runs] == [1, 1]
    rows = [row for result in runs for row in result.summary() if row["protocol"] == "val"]
    values = [row["accuracy"] for row in rows]
    assert len(values) == 2
    assert trial.values == {"accuracy/val": pytest.approx(sum(values) / 2)}
    assert (trial.status, trial.round) == ("finished", 4)

    inline = run(runs[1].experiment.override(["engine.backend=inline"]), run_dir=tmp_path / "inline")
    assert runs[1].weights_hash == inline.weights_hash


def test_seeds_of_a_trial_advance_together_and_have_the_bits_of_lone_runs(tmp_path: Path):
    sweep = load(small(trials=1, seeds=2), [f"output={tmp_path}", "engine.executor=auto"])
    events = SimpleNamespace(put=silent)
    configuration = {"training.lr": 0.1}
    means = run_seeds(configuration, SweepContext(sweep, ["accuracy/val"], tmp_path, "", events), "00000")

    accuracies = []
    for seed in range(2):
        result = Result.load(tmp_path / f"trials/00000/seed-{seed}")
        assert result.metadata["together"] == 2
        alone = run(sweep.configured(configuration, seed).override(["engine.backend=inline"]))
        assert result.weights_hash == alone.weights_hash
        (row,) = (row for row in alone.summary() if row["protocol"] == "val")
        accuracies.append(row["accuracy"])
    assert means == {"accuracy/val": sum(accuracies) / 2}


def test_trials_that_need_nothing_of_each_other_advance_together_to_the_bits_of_lone_runs_also_after_an_interruption(
    tmp_path: Path,
):
    ditto = {"name": "ditto", "lam": {"loguniform": [0.01, 1]}}
    searched = {"method": {"choice": ["fedavg", ditto]}, "training.lr": {"loguniform": [0.01, 1e9]}}
    points = [
        {"method": "fedavg", "training.lr": 0.1},
        {"method": "fedavg", "training.lr": 1e9},  # diverges
        {"method": "ditto", "method.lam": 0.5, "training.lr": 0.1},
        {"method": "fedavg", "training.lr": 0.2},
    ]
    described = small(search=searched, points=points, trials=4)
    changes = [f"output={tmp_path}", *TOGETHER]
    interrupted = tune(described, changes, show=Interrupt())
    assert interrupted.status == "stopped"
    outcome = tune(described, changes)
    assert [trial.status for trial in outcome.trials] == ["finished", "diverged", "finished", "finished"]
    assert outcome.trials[1].error.startswith("Training diverged")
    with pytest.raises(ConfigError, match="without Ray Tune"):
        _ = outcome.grid

    together = []
    for trial in outcome.trials:
        if trial.status == "finished":
            result = Result.load(outcome.folder / "trials" / trial.name)
            together.append(result.metadata.get("together"))
            alone = run(outcome.sweep.configured(trial.drawn).override(["engine.backend=inline"]))
            assert result.weights_hash == alone.weights_hash
            by_model = {row["model"]: row["accuracy"] for row in alone.summary() if row["protocol"] == "val"}
            accuracy = by_model.get("personal", by_model["global"])
            assert (trial.round, trial.values) == (4, {"accuracy/val": accuracy})
    assert together == [2, None, 2]  # after the interruption, without the one that diverged


@pytest.mark.thorough
@pytest.mark.usefixtures("ray_cluster")
def test_a_sweep_without_ray_tune_has_the_configurations_table_and_best_yaml_that_it_has_with_it(tmp_path: Path):
    searched = {"training.lr": {"loguniform": [0.01, 1]}, "training.steps": {"grid": [1, 2]}}
    described = small(search=searched, trials=2, seeds=2, points=[{"training.lr": 0.1, "training.steps": 2}])
    outcomes = []
    for name, changes in (("tune", ["concurrent=2"]), ("tasks", [])):
        outcomes.append(tune(described, [f"output={tmp_path}/{name}", "engine.executor=auto", *changes]))

    with_tune, without = outcomes
    assert (with_tune.folder / "tune").exists() and not (without.folder / "tune").exists()
    assert len(without.rows()) == 3 and without.rows() == with_tune.rows()
    for file in ("best.yaml", "trials.csv"):
        texts = [(outcome.folder / file).read_text().replace(str(outcome.folder.parent), "") for outcome in outcomes]
        assert texts[0] == texts[1]

    for trial in without.trials:
        for seed in range(2):
            runs = [Result.load(outcome.folder / f"trials/{trial.name}/seed-{seed}") for outcome in outcomes]
            assert runs[0].weights_hash == runs[1].weights_hash


@pytest.mark.thorough
@pytest.mark.usefixtures("ray_cluster")
def test_a_trial_whose_process_died_goes_on_although_tune_gave_it_up(tmp_path: Path):
    dies_twice = {"name": "tests.support.federated_methods:KillsItsServer", "marks": str(tmp_path), "at": 3, "times": 2}
    # A limit of concurrent trials is what only Ray Tune has.
    described = small(experiment={**SMALL["experiment"], "method": dies_twice}, trials=1, concurrent=1)
    sweep = load(described, [f"output={tmp_path}", "checkpoint.every=1"])
    statuses: set[str] = set()

    def show(trials: list[Trial]) -> None:
        statuses.update(trial.status for trial in trials)

    (trial,) = search(sweep, *check(sweep), tmp_path / "dies", silent, show)
    assert (trial.status, trial.error) == ("finished", "") and statuses == {"running", "waiting", "finished"}

    trained = Result.load(tmp_path / "dies/trials/00000")
    alone = run(trained.experiment.override(["tracking.mlflow=false"]), run_dir=tmp_path / "alone")
    assert trained.weights_hash == alone.weights_hash


def test_a_stopped_trial_has_its_results_and_a_heard_end_whatever_its_process_had_time_for(tmp_path: Path):
    sweep = load(small(), [f"output={tmp_path}", "rounds=20", "engine.backend=inline"])
    folder = tmp_path / "trial"
    stopped = run(sweep.configured({"training.lr": 0.1}), run_dir=folder, listeners=[InterruptRun(2)])
    assert stopped.status == "stopped"

    for has_results, is_heard in ((True, True), (True, False), (False, True), (False, False)):
        if not has_results:
            (folder / "summary.json").unlink()
        events: list = []
        close(folder, events.append, is_heard)

        assert (folder / "summary.json").exists()
        ends = [(event.status, event.round) for event in events if isinstance(event, RunFinished)]
        assert ends == ([] if has_results and is_heard else [("stopped", stopped.round)])


DYING = """
import sys
from pathlib import Path
from raypfl.common.files import locked
from raypfl.storage.lease import hold_lease
with locked(Path(sys.argv[1])), hold_lease(sys.argv[1] + "/checkpoints", "dying", print):
    print("held", flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def at_work_on(run: Path) -> Iterator[Callable[[], None]]:
    """While active, a process is at work on a run, as one of a killed sweep may still be; yields what kills it."""
    run.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-c", DYING, str(run)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT) as process:
        assert process.stdout.readline() == b"held\n"

        def kill() -> None:
            process.kill()
            process.wait()

        yield kill


def test_a_trial_waits_for_the_process_of_a_killed_sweep_that_is_still_at_work_on_it(tmp_path: Path, monkeypatch):
    configuration = {"training.lr": 0.1}
    sweep = load(small(trials=1, points=[configuration]), [f"output={tmp_path}", "engine.backend=inline"])
    trial = sweep.folder / "trials/00000"
    write_description(trial, sweep.configured(configuration))
    with at_work_on(trial) as kill:
        flock = fcntl.flock

        def kill_and_flock(file, operation) -> None:
            if ".00000.lock" in file.name:
                kill()
            flock(file, operation)

        monkeypatch.setattr(fcntl, "flock", kill_and_flock)
        assert tune(sweep).status == "finished"


def test_a_trial_on_ray_tune_waits_for_it_too(tmp_path: Path, monkeypatch):
    sweep = load(small(seeds=2), [f"output={tmp_path}"])
    context = SweepContext(sweep, ["accuracy/val"], tmp_path, "", SimpleNamespace(put=silent))
    trial = tmp_path / "trials/00000/seed-1"
    write_description(trial, sweep.configured({"training.lr": 0.1}, seed=1))
    with at_work_on(trial) as kill:
        clock = SimpleNamespace(monotonic=time.monotonic, strftime=time.strftime, sleep=lambda seconds: kill())
        monkeypatch.setattr(lease, "time", clock)
        assert run_seeds({"training.lr": 0.1}, context, "00000")


def test_a_sweep_that_another_process_carries_out_is_refused(tmp_path: Path):
    sweep = load(small(), [f"output={tmp_path}", "engine.backend=inline"])
    with locked(sweep.folder), pytest.raises(ConfigError, match="is already running in another process"):
        tune(sweep)


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_optuna_searches_for_two_objectives_at_once(tmp_path: Path):
    objectives = [{"protocol": "val"}, {"protocol": "val", "value": "worst_decile"}]
    sweep = load(small(trials=2, searcher="optuna", metric=objectives), [f"output={tmp_path}"])
    trials = search(sweep, *check(sweep), tmp_path / "optuna", silent, silent)
    assert [sorted(trial.values) for trial in trials] == [["accuracy/val", "worst_decile/val"]] * 2
    assert {path.name for path in (tmp_path / "optuna/trials").iterdir()} == {trial.name for trial in trials}


def test_a_value_that_a_choice_lists_twice_was_drawn_if_one_of_them_was():
    sweep = load(small(search={"training.steps": {"choice": [2, 2, 3]}}))
    result = SweepResult(sweep, [Trial("0", {"training.steps": 0})], ["max"], Experiment().measures)
    assert result.never_drawn == ["training.steps=3"]


@pytest.mark.parametrize(
    ("status", "heading"), [("finished", "# The best of 2 configurations"), ("waiting", "# The best so far .* 1 of 2 ")]
)
def test_the_best_configuration_says_whether_others_are_still_to_come(tmp_path: Path, monkeypatch, status, heading):
    sweep = load(small(trials=2), [f"output={tmp_path}"])
    configuration = draws_of_point(sweep.spaces, {"training.lr": 0.1})
    ended = Trial("0", configuration, "finished", values={"accuracy/val": 0.5})
    trials = [ended, Trial("1", configuration, status)]
    monkeypatch.setattr(SweepResult, "_draw", lambda result: None)
    sweep.folder.mkdir()
    SweepResult(sweep, trials, ["max"], Experiment().measures).write_files()
    assert re.match(heading, (sweep.folder / "best.yaml").read_text())


def test_a_trial_whose_metric_is_undefined_is_never_the_best(tmp_path: Path):
    sweep = load(small(trials=2), [f"output={tmp_path}"])
    first, _ = check(sweep)
    values = metric_values(sweep, first, [{"protocol": "val", "model": "global"}])
    undefined = Trial("0", {"training.lr": 0.2}, "finished", values=values)
    infinite = Trial("12345e67", {"training.lr": 0.1}, "finished", values={"accuracy/val": math.inf})

    alone = SweepResult(sweep, [undefined], ["min"], first.measures)
    assert alone.best is None
    assert alone.rows()[0]["accuracy/val"] is None
    assert alone.status == "failed"
    assert SweepResult(sweep, [undefined, infinite], ["min"], first.measures).best is infinite

    sweep.write(sweep.folder)
    SweepResult(sweep, [infinite], ["min"], first.measures).write_files()
    assert not (sweep.folder / CONFIGURATIONS).exists()  # for which no trial has a finite value
    (sweep.folder / "trials").mkdir()
    (method,) = read_search(sweep.folder, first.measures).methods
    assert method.rows[0][0][0] == "12345e67" and method.figures == []


DIVERGING = small(
    search={"training.lr": {"loguniform": [0.001, 1000]}},
    points=[{"training.lr": rate} for rate in (0.001, 1000)],
    trials=2,
)
"""With a rate of 1000, training diverges in round 2, after an accuracy in round 1 that 0.001 does not reach."""


def test_a_trial_that_diverges_is_never_the_best_and_is_trained_once(tmp_path: Path):
    changes = [f"output={tmp_path}", *TOGETHER]
    starts: list[str] = []

    def note(trial: str, seed: int, event: Event) -> None:
        if isinstance(event, RunStarted):
            starts.append(trial)

    sweep = load(DIVERGING, changes)
    outcome = tune(sweep, hear=note)
    good, diverged = outcome.rows()
    assert (good["trial"], good["status"], outcome.best.name) == ("00000", "finished", "00000")
    assert (diverged["status"], diverged["round"], diverged["accuracy/val"]) == ("diverged", 1, None)
    assert diverged["error"].startswith("Training diverged on client 0 in round 2")
    assert tune(sweep, hear=note).rows() == [good, diverged]
    assert starts.count("00001") == 1


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_a_trial_that_diverges_is_trained_once_on_ray_tune_too(tmp_path: Path):
    for _ in range(2):
        good, diverged = tune(DIVERGING, [f"output={tmp_path}", "concurrent=1"]).rows()
        assert (good["trial"], good["status"]) == ("00000", "finished")
        assert (diverged["status"], diverged["round"], diverged["accuracy/val"]) == ("diverged", 1, None)
        assert diverged["error"].startswith("Training diverged on client 0 in round 2")
    history_of = tmp_path / "small/trials/00001/history.jsonl"
    assert len(history_of.read_text().splitlines()) == 1, "it was trained again"


@pytest.mark.thorough
@pytest.mark.usefixtures("ray_cluster")
def test_an_interrupted_sweep_leaves_its_trials_unfinished_and_goes_on_later(tmp_path: Path):
    sweep = load(small(trials=2, concurrent=1), [f"output={tmp_path}", "rounds=20"])
    assert not any(trial.has_ended for trial in tune(sweep, show=Interrupt()).trials)
    assert {trial.status for trial in tune(sweep).trials} == {"finished"}


@pytest.mark.thorough
@pytest.mark.usefixtures("ray_cluster")
def test_a_killed_sweep_keeps_its_finished_trials_and_its_mlflow_run(tmp_path: Path, mlflow_database: Path):
    import ray

    settings = SMALL["experiment"] | {
        "tracking": tracked_in(tmp_path, mlflow_database),
        "rounds": 20,
        "output": str(tmp_path / "runs"),
        "ray": {"address": ray.get_runtime_context().gcs_address},
    }
    described = small(experiment=settings, concurrent=1, searcher="optuna", points=[{"training.lr": 0.25}])
    file = tmp_path / "small.yaml"
    file.write_text(yaml.safe_dump(described))
    process = start_command(["tune", str(file), "--quiet"], tmp_path / "log")
    folder = tmp_path / "runs/small"

    def is_second_under_way() -> bool:
        ended = {end.parent for end in folder.glob("trials/*/summary.json")}
        saved = {checkpoint.parents[1] for checkpoint in folder.glob("trials/*/checkpoints/*-round-[3-9]")}
        return bool(ended and saved - ended)

    deadline = time.monotonic() + 240
    while not is_second_under_way() and time.monotonic() < deadline and process.is_alive():
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.join()
    assert is_second_under_way()

    (first_summary,) = folder.glob("trials/*/summary.json")
    time_of_summary = first_summary.stat().st_mtime_ns
    continued = raypfl("tune", str(file), "--quiet")
    assert continued.exit_code == 0, continued.output

    rows = list(csv.DictReader((folder / "trials.csv").open()))
    assert [row["status"] for row in rows] == ["finished"] * 3
    assert "0.25" in {row["training.lr"] for row in rows}
    assert first_summary.stat().st_mtime_ns == time_of_summary, "a finished trial ran again"
    assert {path.name for path in (folder / "trials").iterdir()} == {row["trial"] for row in rows}, "a folder is left"
    (parent,), children = mlflow_runs(settings["tracking"]["uri"])
    assert len(children) == 3 and {run.info.status for run in (parent, *children)} == {"FINISHED"}


@pytest.mark.thorough
@pytest.mark.usefixtures("ray_cluster")
def test_a_killed_sweep_without_ray_tune_continues_from_the_checkpoints_of_its_trials(tmp_path: Path):
    import ray

    settings = SMALL["experiment"] | {
        "rounds": 40,
        "checkpoint": {"every": 1},
        "engine": {"executor": "vectorised"},
        "ray": {"address": ray.get_runtime_context().gcs_address},
    }

    def described(name: str) -> Path:
        file = tmp_path / f"{name}.yaml"
        file.write_text(yaml.safe_dump(small(experiment={**settings, "output": str(tmp_path / name)})))
        return file

    process = start_command(["tune", str(described("killed")), "--quiet"], tmp_path / "log")
    folder = tmp_path / "killed/small"

    def trials_under_way() -> set[str]:
        return {file.parents[1].name for file in folder.glob("trials/*/checkpoints/*-round-[3-9]")}

    deadline = time.monotonic() + 240
    while not trials_under_way() and time.monotonic() < deadline and process.is_alive():
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.join()
    under_way = trials_under_way()
    assert under_way and not list(folder.glob("trials/*/summary.json"))

    # Ray's processes may still be at work on the trials; their leases end with them.
    for name in ("killed", "undisturbed"):
        ended = raypfl("tune", str(described(name)), "--quiet")
        assert ended.exit_code == 0, ended.output

    trials = sorted((folder / "trials").iterdir())
    assert len(trials) == 3
    for trial in trials:
        undisturbed = tmp_path / "undisturbed/small/trials" / trial.name
        assert Result.load(trial).weights_hash == Result.load(undisturbed).weights_hash
        if trial.name in under_way:
            assert history.read(trial)[-1]["from_round"] > 0, "the trial began anew"


def test_bounds_of_a_quantised_space_need_not_be_multiples_of_its_step():
    from raypfl.integrations.tuning.ray_tune import domain

    (quantised,) = spaces_of({"method.lam": {"quniform": [0.2, 1, 0.3]}})
    assert {quantised.value(domain(quantised).sample()) for _ in range(50)} == {0.3, 0.6, 0.9}
