"""A comparison's folder: interrupted and resumed, extended, reported on, tracked."""

from __future__ import annotations

import json
import re
import shlex
import signal
from pathlib import Path

import pytest
import yaml

from raypfl.common.errors import ConfigError, NoRun, RayDied, RaypflError, Unwritable
from raypfl.results.report import find_runs, write
from raypfl.results.run_groups import group_runs, methods_without_result
from raypfl.runs import driver
from raypfl.runs.records import description
from raypfl.runs.result import RunResult
from tests.support.command import hashes, interrupted, raypfl, raypfl_json
from tests.support.runs import Interrupt
from tests.support.tracking import runs_of, with_database

SMALL = [
    *("rounds=2", "partition.clients=4", "training.steps=2", "evaluation.every=1"),
    *("engine.backend=inline", "engine.executor=vectorised"),
]
UNTRACKED = [*SMALL, "tracking.mlflow=false"]


@pytest.fixture(autouse=True)
def workdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    return tmp_path


def only_folder(pattern: str = "runs/digits-*") -> Path:
    (folder,) = Path().glob(pattern)
    return folder


def test_a_comparisons_folder_has_its_runs_its_picture_and_its_description():
    outcome = raypfl_json("run", *UNTRACKED, "--method", "fedavg,ditto", "--seeds", "2")
    folder = only_folder()
    runs = ["fedavg-s0", "fedavg-s1", "ditto-s0", "ditto-s1"]

    assert yaml.safe_load((folder / "comparison.yaml").read_text()) == {
        "words": ["digits", *UNTRACKED, "methods=[fedavg,ditto]", "seeds=2"],
        "runs": runs,
    }
    assert [Path(run["run_dir"]) for run in outcome["runs"]] == [folder.absolute() / run for run in runs]
    assert Path(outcome["picture"]) == folder.absolute() / "picture.png" and (folder / "picture.png").exists()


@pytest.mark.usefixtures("without_figures")
def test_methods_are_compared_with_the_named_baseline_on_the_terminal_and_in_the_table(workdir: Path):
    refused = raypfl("run", *UNTRACKED, "--method", "fedavg,ditto", "--baseline", "fedavgg")
    assert refused.exit_code == 2 and "did you mean 'fedavg'?" in refused.stderr and not Path("runs").exists()

    words = ["run", *UNTRACKED, "--method", "fedavg,ditto", "--baseline", "ditto"]
    compared = raypfl_json(*words)["differences"]
    assert {(row["method"], row["against"], row["seeds_paired"]) for row in compared} == {("fedavg", "ditto", 1)}

    folder = only_folder()
    resumed = raypfl("resume", str(folder), "--baseline", "fedavg")
    assert "fedavg  ditto" not in resumed.stdout and "ditto   fedavg" in resumed.stdout

    for name, text in (("table.csv", "against"), ("table.tex", "Differences to fedavg are paired")):
        report = raypfl("report", str(folder), "--out", name, "--baseline", "fedavg")
        assert report.stdout == f"Report: {name}\n" and text in Path(name).read_text()

    assert raypfl("report", str(folder / "ditto-s0"), "--baseline", "ditto").exit_code == 2


def test_a_folder_that_is_no_run_is_refused_with_the_runs_inside_it():
    raypfl_json("run", *UNTRACKED, "rounds=1", "--method", "fedavg,ditto", "--seeds", "4")
    folder = only_folder()
    run_folders = sorted(str(file.parent) for file in folder.glob("*/experiment.yaml"))

    for place, kind in ((folder, f"{folder} is a comparison, not a run"), ("runs", "runs is not the folder of a run")):
        message = f"{kind}: it has no experiment.yaml. Runs are in {', '.join(run_folders[:6])} and 2 more."
        for load in (RunResult.load, description):
            with pytest.raises(NoRun, match=re.escape(message)):
                load(place)


def test_one_method_with_two_sets_of_options_has_two_folders():
    raypfl_json("run", *UNTRACKED, "methods=[{name: ditto, lam: 1.0}, {name: ditto, lam: 2.0}]")
    assert [run.name for run in sorted(only_folder().glob("ditto*"))] == ["ditto-s0", "ditto-s0-2"]


@pytest.mark.usefixtures("without_figures")
def test_settings_of_one_method_are_in_the_table_the_report_and_mlflow(workdir: Path, mlflow_database: Path):
    with_database(workdir / "runs", mlflow_database)
    tracked = [*SMALL, "tracking.system_metrics=false", "tracking.models_mb=0"]
    tuned_ditto = "{name: ditto, settings: {training.lr: 0.05, training.optimizer: adam}}"
    outcome = raypfl("run", *tracked, f"methods=[fedavg, {tuned_ditto}]")

    assert outcome.exit_code == 0, outcome.output

    label = "ditto training.optimizer=adam training.lr=0.05"
    assert f"{label}, seed 0" in outcome.stdout and "\nfedavg, seed 0" in outcome.stdout

    (parent,) = runs_of(workdir / "runs", "tags.kind = 'comparison'")
    assert f"{label} | local" in parent.data.tags["mlflow.note.content"]

    kinds = {"difference", "difference_low", "difference_high", "seeds_ahead", "draws_ahead"}
    for protocol in ("local", "global"):
        # Either method may be the best, with which the other is compared.
        (behind,) = {key.split("/")[2] for key in parent.data.metrics if f"/{protocol}/" in key}
        assert behind in ("fedavg", label.replace("=", "_"))
        assert {key.split("/")[0] for key in parent.data.metrics if f"/{protocol}/" in key} == kinds

    children = runs_of(workdir / "runs", "tags.kind = 'run'")
    names = {re.sub(r" [\d.]+ %", "", child.info.run_name): child.data.params["training.lr"] for child in children}
    assert names == {"fedavg s0": "0.1", "ditto s0 training.optimizer=adam training.lr=0.05": "0.05"}


def test_an_interrupted_comparison_goes_on_to_all_its_ends_and_the_same_bits(
    workdir: Path, monkeypatch: pytest.MonkeyPatch, mlflow_database: Path
):
    with_database(workdir / "runs", mlflow_database)
    tracked = [*SMALL, "tracking.system_metrics=false", "tracking.models_mb=0"]
    stopped = interrupted(monkeypatch, "ditto", "run", *tracked, "--method", "fedavg,ditto,local")
    folder = only_folder()
    assert stopped.exit_code == 130
    assert f"Stopped. 1 of 3 runs are finished. To continue: raypfl resume {folder}\n" in stopped.stderr
    assert "Try next" not in stopped.stdout
    finished = (folder / "fedavg-s0" / "summary.json").stat().st_mtime_ns

    resumed = raypfl("resume", str(folder))
    assert resumed.exit_code == 0, resumed.output
    assert (folder / "fedavg-s0" / "summary.json").stat().st_mtime_ns == finished
    suggested = resumed.stdout.split("Try next")[1]
    assert f"raypfl run {shlex.join(['digits', *tracked])} " in suggested
    assert f"raypfl resume {folder} rounds=4\n" in suggested and f"raypfl report {folder}\n" in suggested

    whole = raypfl_json("run", *UNTRACKED, "--method", "fedavg,ditto,local")
    assert hashes(raypfl_json("resume", str(folder))) == hashes(whole)
    parents = runs_of(workdir / "runs", "tags.kind = 'comparison'")
    assert [parent.info.status for parent in parents] == ["FINISHED"]
    assert all(method in parents[0].data.tags["mlflow.note.content"] for method in ("fedavg", "ditto", "local"))
    children = runs_of(workdir / "runs", "tags.kind = 'run'")
    assert [child.data.tags["method"] for child in children] == ["fedavg", "ditto", "local"]
    assert {child.data.tags["mlflow.parentRunId"] for child in children} == {parents[0].info.run_id}
    assert {child.info.status for child in children} == {"FINISHED"}


def test_the_finished_runs_of_an_interrupted_comparison_are_reported(monkeypatch: pytest.MonkeyPatch):
    interrupted(monkeypatch, "ditto", "run", *UNTRACKED, "--method", "fedavg,ditto,local")
    folder = only_folder()
    for named in (folder, Path("runs")):
        results, notes = find_runs([named])
        assert [result.run_dir.name for result in results] == ["fedavg-s0"]
        assert f"{folder / 'ditto-s0'} ended before its first evaluation." in notes
        assert any(f"`raypfl resume {folder / 'local-s0'}` finishes an interrupted one" in note for note in notes)


def test_a_comparison_interrupted_before_its_first_round_says_how_to_continue(monkeypatch: pytest.MonkeyPatch):
    def press_ctrl_c(*args, **options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(driver, "check", press_ctrl_c)
        stopped = raypfl("run", *UNTRACKED)
    folder = only_folder()
    assert stopped.exit_code == 130
    assert f"Stopped. 0 of 2 runs are finished. To continue: raypfl resume {folder}\n" in stopped.stderr
    assert [run["status"] for run in raypfl_json("resume", str(folder))["runs"]] == ["finished", "finished"]


def test_an_interrupted_extension_of_a_comparison_keeps_the_change(monkeypatch: pytest.MonkeyPatch):
    raypfl_json("run", *UNTRACKED)
    folder = only_folder()
    stopped = interrupted(monkeypatch, "none", "resume", str(folder), "rounds=3")
    assert stopped.exit_code == 0
    whole = raypfl_json("run", *UNTRACKED, "rounds=3")
    assert hashes(raypfl_json("resume", str(folder))) == hashes(whole)


def test_resuming_an_interrupted_change_needs_the_change_again(monkeypatch: pytest.MonkeyPatch):
    raypfl_json("run", *UNTRACKED)
    folder = only_folder()

    def press_ctrl_c(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(driver, "resume", press_ctrl_c)
    stopped = raypfl("resume", str(folder), "rounds=3")
    earlier = "0 of 2 runs are finished with rounds=3; earlier results exist for 2."
    assert f"{earlier} To continue: raypfl resume {folder} rounds=3\n" in stopped.stderr


def test_an_interrupted_extension_shows_the_earlier_results_of_all_runs(monkeypatch: pytest.MonkeyPatch):
    raypfl_json("run", *UNTRACKED, "--method", "fedavg,local")
    folder = only_folder()
    stopped = interrupted(monkeypatch, "fedavg", "resume", str(folder), "rounds=9", round=3)
    table, places = stopped.stdout.split("Picture")
    assert all(word in table for word in ("fedavg", "local", "rounds=2"))
    assert all(f"{folder / run}  weights" in places for run in ("fedavg-s0", "local-s0")) and "Try next" not in places
    assert "Stopped. 0 of 2 runs are finished with rounds=9; earlier results exist for 1." in stopped.stderr


@pytest.mark.thorough
def test_the_suggested_command_repeats_the_settings_that_ran_not_those_typed_first():
    raypfl_json("run", *UNTRACKED, "--method", "fedavg,local", "--seeds", "3")
    folder = only_folder()
    for words in ((str(folder), "rounds=3", "checkpoint.keep=4"), (str(folder),)):
        suggested = raypfl("resume", *words).stdout.split("Try next")[1]
        (command,) = [line for line in suggested.splitlines() if "raypfl run" in line]
        assert " rounds=3 " in command and command.endswith(" seeds=3 checkpoint.keep=4 partition.alpha=0.1")
        assert f"raypfl resume {folder} rounds=6\n" in suggested


def test_a_change_that_does_not_suit_all_runs_is_refused_before_any_continues():
    raypfl_json("run", *UNTRACKED)
    before = {file: file.read_bytes() for file in Path("runs").rglob("*.yaml")}
    for change, sentence in (
        ("method=ditto", "method cannot be changed once a comparison has started"),
        ("seed=3", "seed cannot be changed once a comparison has started"),
        ("rouns=3", "rouns is not a setting of an experiment"),
        ("method.lam=7", "ditto-s0, not 7.0, and decides its result"),
        ("method.lamb=1", "method.lamb is not an option of fedavg or ditto; did you mean 'method.lam'?"),
    ):
        refused = raypfl("resume", str(only_folder()), change)
        assert refused.exit_code == 2 and sentence in refused.stderr
        assert {file: file.read_bytes() for file in Path("runs").rglob("*.yaml")} == before


def test_a_client_of_one_row_has_no_test_sample_and_the_table_says_that_it_is_left_out():
    rows = [f"s{i % 3},{i % 7},{'xy'[i % 2]}" for i in range(60)]
    Path("rows.csv").write_text("\n".join(["site,a,label", *rows, "alone,1,x"]) + "\n")
    data = ["data=table", "data.root=rows.csv", "data.group=site", "data.target=label", "partition=by_column"]
    ended = raypfl("run", *data, "rounds=1", "engine.backend=inline", "tracking.mlflow=false", "--method", "ditto")
    assert "1 client without test samples is left out of local." in ended.stdout


def test_an_option_of_one_method_may_be_named_again_in_a_resume_of_its_comparison():
    raypfl_json("run", *UNTRACKED, "method.lam=2")
    resumed = raypfl("resume", str(only_folder()), "method.lam=2", "rounds=3")
    assert resumed.exit_code == 0 and "fedavg: round 3/3" in resumed.stderr and "ditto: round 3/3" in resumed.stderr


def test_a_failed_run_of_a_comparison_is_run_again_by_resume(monkeypatch: pytest.MonkeyPatch):
    real = driver.resume

    def failing(folder, **options):
        if Path(folder).name.startswith("ditto"):
            raise RaypflError("Client 3 lost its mind.")
        return real(folder, **options)

    with monkeypatch.context() as patch:
        patch.setattr(driver, "resume", failing)
        failed = raypfl("run", *UNTRACKED, "--method", "ditto,fedavg,local")
    folder = only_folder()
    assert failed.exit_code == 1 and "Client 3 lost its mind." in failed.stderr and "local" in failed.stdout
    assert f"2 of 3 runs are finished. To continue: raypfl resume {folder}\n" in failed.stderr
    assert {run["status"] for run in raypfl_json("resume", str(folder))["runs"]} == {"finished"}


def test_a_method_that_diverges_has_no_result_and_is_not_trained_again_and_the_others_finish():
    diverging = "methods=[{name: ditto, lam: 1.0e30}, fedavg, local]"
    ended = raypfl("run", *UNTRACKED, diverging)
    folder = only_folder()
    run = folder / "ditto-s0"
    with_other_settings = f"With other settings: raypfl run {run}/experiment.yaml training.lr=0.01\n"
    to_see_them = f"2 of 3 runs are finished. To see them: raypfl report {folder}\n"
    assert ended.exit_code == 1 and with_other_settings in ended.stderr and ended.stderr.endswith(to_see_them)
    assert f"ditto, seed 0, diverged ({run}): Training diverged on client " in ended.stderr
    table = " ".join(ended.stdout.split())
    assert "ditto diverged after 1 " in table and "ditto, seed 0 (diverged after round 1 of 2)" in table
    assert {"fedavg", "local"} == {line.split()[1] for line in ended.stdout.splitlines() if "of 1 " in line}

    end = (run / "summary.json").stat().st_mtime_ns
    resumed = raypfl("resume", str(folder), "--quiet", "--json")
    assert resumed.exit_code == 1 and (run / "summary.json").stat().st_mtime_ns == end
    assert "ditto, seed 0, diverged before, and was not trained again (" in resumed.stderr
    assert with_other_settings in resumed.stderr and resumed.stderr.endswith(to_see_them)
    outcome = json.loads(resumed.stdout)
    assert [run["status"] for run in outcome["runs"]] == ["diverged", "finished", "finished"]
    assert not any("ditto" in (row["method"], row["against"]) for row in outcome["differences"])

    results, _ = find_runs([folder])
    for file in ("report.html", "table.csv", "table.tex"):
        text = write(results, file).read_text()
        assert "diverged after round 1" in text, file
    assert find_runs([run])[0][0].status == "diverged"


def test_seeds_that_diverge_alike_are_told_once_with_a_command_for_all_of_them():
    ended = raypfl("run", *UNTRACKED, "methods=[{name: ditto, lam: 1.0e+37}, local]", "seeds=2", "--quiet")
    folder = only_folder()
    (command,) = re.findall(r"With other settings: raypfl (run .*)", ended.stderr)
    assert command == f"run {folder}/ditto-s0/experiment.yaml training.lr=0.01 seeds=2"
    assert f"ditto, seeds 0 and 1, diverged ({folder}/ditto-s0, {folder}/ditto-s1): " in ended.stderr


def test_a_comparison_whose_baseline_diverges_is_shown_with_the_best_of_the_others():
    diverging = "methods=[{name: ditto, lam: 1.0e30}, fedavg, local]"
    ended = raypfl("run", *UNTRACKED, diverging, "--baseline", "ditto", "--json", "--quiet")
    assert ended.exit_code == 1 and "ditto, seed 0, diverged (" in ended.stderr
    assert {row["method"] for row in json.loads(ended.stdout)["differences"]} <= {"fedavg", "local"}
    refused = raypfl("report", str(only_folder()), "--baseline", "ditto")
    assert refused.exit_code == 2 and "'ditto' has no result: it diverged after round 1." in refused.stderr


def test_a_seed_that_diverged_is_the_same_methods_after_the_others_went_on():
    ended = raypfl("run", *UNTRACKED, "seeds=2", "failures.loss_limit=2.4", "--method", "fedavg", "--json", "--quiet")
    assert [run["status"] for run in json.loads(ended.stdout)["runs"]] == ["finished", "diverged"]
    folder = only_folder()
    assert raypfl("resume", str(folder), "rounds=3", "--quiet").exit_code == 1
    results, _ = find_runs([folder])
    (group,) = group_runs(results)
    assert (group.label, len(group.results)) == ("fedavg", 1) and not methods_without_result(results)
    assert "rounds=3" in yaml.safe_load((folder / "comparison.yaml").read_text())["words"]


def test_data_on_which_all_runs_diverge_are_named_beside_a_report_on_others():
    diverging = ["training.lr=1e30", "partition.clients=5", "--method", "fedavg,ditto"]
    ended = raypfl("run", *UNTRACKED, *diverging, "--json", "--quiet")
    outcome = json.loads(ended.stdout)
    assert ended.exit_code == 1 and (outcome["differences"], len(outcome["runs"])) == ([], 2)
    assert ended.stderr.endswith("0 of 2 runs are finished.\n")
    raypfl_json("run", *UNTRACKED, "method=fedavg")
    # A run on its own has no part either, if it was never evaluated.
    raypfl("run", *UNTRACKED, "training.lr=1e30", "partition.clients=6", "method=fedavg", "--quiet")

    for file in ("report.html", "table.csv"):
        reported = raypfl("report", "runs", "--out", file)
        assert reported.exit_code == 0, reported.output
        notes = " ".join(reported.stderr.split())
        assert "No run on digits · 5 clients" in notes and "No run on digits · 6 clients" in notes
    assert Path("report.html").read_text().count("diverged after round 0") == 3


def test_seeds_and_rates_that_advance_together_go_on_without_one_that_diverges():
    rates = "methods=[fedavg, {name: fedavg, settings: {training.lr: 1.0e+30}}]"
    ended = raypfl("run", *UNTRACKED, rates, "--seeds", "2", "--json")
    assert ended.exit_code == 1 and "2 of 4 runs are finished. To see them: raypfl report" in ended.stderr
    statuses = [run["status"] for run in json.loads(ended.stdout)["runs"]]
    assert statuses == ["finished", "finished", "diverged", "diverged"]
    with pytest.raises(ConfigError, match="fedavg-s0-2 diverged before its first evaluation: Training diverged on"):
        find_runs([only_folder() / "fedavg-s0-2"])


@pytest.mark.parametrize("kind", [Unwritable, RayDied])
def test_what_no_run_can_do_without_ends_all_of_them(monkeypatch: pytest.MonkeyPatch, kind: type[RaypflError]):
    def failing(folder, **options):
        raise kind("The disk is full.")

    with monkeypatch.context() as patch:
        patch.setattr(driver, "resume", failing)
        failed = raypfl("run", *UNTRACKED)
    assert failed.exit_code == 1 and failed.stderr.count("The disk is full.") == 1


def test_a_shared_checkpoint_location_has_a_folder_for_each_comparison(workdir: Path):
    for _ in range(2):
        raypfl_json("run", *UNTRACKED, f"checkpoint.location={workdir / 'kept'}")
    comparisons = sorted(folder.name for folder in Path("runs").glob("digits-*"))
    assert sorted(folder.name for folder in (workdir / "kept").iterdir()) == comparisons
    assert {folder.name for folder in (workdir / "kept").glob("*/*")} == {"fedavg-s0", "ditto-s0"}


def test_an_untracked_comparison_is_recorded_below_one_parent(workdir: Path, mlflow_database: Path):
    with_database(workdir / "runs", mlflow_database)
    raypfl_json("run", *UNTRACKED, "tracking.system_metrics=false", "tracking.models_mb=0")
    for _ in range(2):
        recorded = raypfl("track", str(only_folder()))
        assert recorded.exit_code == 0, recorded.output
        assert f"{only_folder()} is in MLflow: mlflow ui --backend-store-uri" in recorded.stdout

    (parent,) = runs_of(workdir / "runs", "tags.kind = 'comparison'")
    children = runs_of(workdir / "runs", "tags.kind = 'run'")
    assert [child.data.tags["mlflow.parentRunId"] for child in children] == [parent.info.run_id] * 2


def test_a_comparison_ended_by_sigterm_says_how_to_continue(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Interrupt, "__init__", lambda self, round: self.__dict__.update(round=1, number=signal.SIGTERM))
    stopped = interrupted(monkeypatch, "fedavg", "run", *UNTRACKED)
    assert stopped.exit_code == 130 and "0 of 2 runs are finished." in stopped.stderr
