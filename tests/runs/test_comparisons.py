"""A comparison's folder: cut off and gone on with, made longer, reported on, tracked."""

from __future__ import annotations

import re
import shlex
import signal
from pathlib import Path

import pytest
import yaml
from typer.testing import Result as Ended

from raypfl.common.errors import NoRun, RaypflError
from raypfl.results.report import find_runs
from raypfl.runs import driver
from raypfl.runs.result import RunResult, description
from tests.support.command import raypfl, raypfl_json
from tests.support.runs import Interrupt
from tests.support.tracking import runs_of, with_database

SMALL = ["rounds=2", "engine.backend=inline", "engine.executor=vectorised", "partition.clients=4", "evaluation.every=1"]
QUIETLY = [*SMALL, "tracking.mlflow=false"]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    return tmp_path


def only_folder(pattern: str = "runs/digits-*") -> Path:
    (folder,) = Path().glob(pattern)
    return folder


def hashes(outcome: dict) -> list[str]:
    return [run["weights_hash"] for run in outcome["runs"]]


@pytest.fixture
def cut_off(monkeypatch: pytest.MonkeyPatch):
    """Carries out a command in which the run of a method is interrupted after a round."""

    def command(method: str, *words: str, round: int = 1) -> Ended:
        real = driver.resume

        def pressed(folder, *, listeners, overrides):
            stop = [Interrupt(round)] if Path(folder).name.startswith(method) else []
            return real(folder, listeners=[*listeners, *stop], overrides=overrides)

        with monkeypatch.context() as patch:
            patch.setattr(driver, "resume", pressed)
            return raypfl(*words)

    return command


def test_a_comparison_has_a_folder_with_its_runs_its_picture_and_what_names_them():
    outcome = raypfl_json("run", *QUIETLY, "--method", "fedavg,ditto", "--seeds", "2")
    folder = only_folder()
    runs = ["fedavg-s0", "fedavg-s1", "ditto-s0", "ditto-s1"]
    assert yaml.safe_load((folder / "comparison.yaml").read_text()) == {
        "words": ["digits", *QUIETLY, "methods=[fedavg,ditto]", "seeds=2"],
        "runs": runs,
    }
    assert [Path(run["run_dir"]) for run in outcome["runs"]] == [folder.absolute() / run for run in runs]
    assert Path(outcome["picture"]) == folder.absolute() / "picture.png" and (folder / "picture.png").exists()


def test_a_named_baseline_is_what_methods_are_compared_with_on_the_terminal_and_in_the_table(elsewhere: Path):
    refused = raypfl("run", *QUIETLY, "--method", "fedavg,ditto", "--baseline", "fedavgg")
    assert refused.exit_code == 2 and "did you mean 'fedavg'?" in refused.stderr and not Path("runs").exists()
    words = ["run", *QUIETLY, "--method", "fedavg,ditto", "--baseline", "ditto"]
    compared = raypfl_json(*words)["differences"]
    assert {(row["method"], row["against"], row["seeds_paired"]) for row in compared} == {("fedavg", "ditto", 1)}
    folder = only_folder()
    again = raypfl("resume", str(folder), "--baseline", "fedavg")
    assert "fedavg  ditto" not in again.stdout and "ditto   fedavg" in again.stdout
    for name in ("table.csv", "table.tex"):
        done = raypfl("report", str(folder), "--out", name, "--baseline", "fedavg")
        assert done.stdout == f"Report: {name}\n" and "against" in Path(name).read_text()
    assert raypfl("report", str(folder / "ditto-s0"), "--baseline", "ditto").exit_code == 2


def test_where_there_is_no_run_those_inside_are_named():
    raypfl_json("run", *QUIETLY, "--method", "fedavg,ditto", "--seeds", "4")
    folder = only_folder()
    inside = sorted(str(one.parent) for one in folder.glob("*/experiment.yaml"))
    for place, kind in ((folder, f"{folder} is a comparison, not a run"), ("runs", "runs is not the folder of a run")):
        named = f"{kind}: it has no experiment.yaml. Runs are in {', '.join(inside[:6])} and 2 more."
        for asked in (RunResult.load, description):
            with pytest.raises(NoRun, match=re.escape(named)):
                asked(place)


def test_one_method_with_two_sets_of_options_has_two_folders():
    raypfl_json("run", *QUIETLY, "methods=[{name: ditto, lam: 1.0}, {name: ditto, lam: 2.0}]")
    assert [run.name for run in sorted(only_folder().glob("ditto*"))] == ["ditto-s0", "ditto-s0-2"]


def test_settings_of_a_methods_own_are_in_the_table_the_report_and_mlflow(elsewhere: Path, mlflow_database: Path):
    with_database(elsewhere / "runs", mlflow_database)
    tracked = [*SMALL, "tracking.system_metrics=false", "tracking.models_mb=0"]
    own = "{name: ditto, settings: {training.lr: 0.05, training.optimizer: adam}}"
    done = raypfl("run", *tracked, f"methods=[fedavg, {own}]")
    assert done.exit_code == 0, done.output
    label = "ditto training.optimizer=adam training.lr=0.05"
    assert f"{label}, seed 0" in done.stdout and "\nfedavg, seed 0" in done.stdout
    (parent,) = runs_of(elsewhere / "runs", "tags.kind = 'comparison'")
    assert f"{label} | local" in parent.data.tags["mlflow.note.content"]
    kinds = {"difference", "difference_low", "difference_high", "seeds_ahead", "draws_ahead"}
    for protocol in ("local", "global"):  # in which one method or the other is best
        (behind,) = {key.split("/")[2] for key in parent.data.metrics if f"/{protocol}/" in key}
        assert behind in ("fedavg", label.replace("=", "_"))
        assert {key.split("/")[0] for key in parent.data.metrics if f"/{protocol}/" in key} == kinds
    children = runs_of(elsewhere / "runs", "tags.kind = 'run'")
    names = {re.sub(r" [\d.]+ %", "", child.info.run_name): child.data.params["training.lr"] for child in children}
    assert names == {"fedavg s0": "0.1", "ditto s0 training.optimizer=adam training.lr=0.05": "0.05"}


def test_an_interrupted_comparison_goes_on_to_all_its_ends_and_the_same_bits(
    elsewhere: Path, cut_off, mlflow_database: Path
):
    with_database(elsewhere / "runs", mlflow_database)
    tracked = [*SMALL, "tracking.system_metrics=false", "tracking.models_mb=0"]
    stopped = cut_off("ditto", "run", *tracked, "--method", "fedavg,ditto,local")
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

    whole = raypfl_json("run", *QUIETLY, "--method", "fedavg,ditto,local")
    assert hashes(raypfl_json("resume", str(folder))) == hashes(whole)
    parents = runs_of(elsewhere / "runs", "tags.kind = 'comparison'")
    assert [parent.info.status for parent in parents] == ["FINISHED"]
    assert all(method in parents[0].data.tags["mlflow.note.content"] for method in ("fedavg", "ditto", "local"))
    children = runs_of(elsewhere / "runs", "tags.kind = 'run'")
    assert [child.data.tags["method"] for child in children] == ["fedavg", "ditto", "local"]
    assert {child.data.tags["mlflow.parentRunId"] for child in children} == {parents[0].info.run_id}
    assert {child.info.status for child in children} == {"FINISHED"}


def test_what_is_finished_of_an_interrupted_comparison_is_reported_on(cut_off):
    cut_off("ditto", "run", *QUIETLY, "--method", "fedavg,ditto,local")
    folder = only_folder()
    for named in (folder, Path("runs")):
        results, notes = find_runs([named])
        assert [result.run_dir.name for result in results] == ["fedavg-s0"]
        assert f"{folder / 'ditto-s0'} was stopped before its first evaluation." in notes
        assert any(f"`raypfl resume {folder / 'local-s0'}` finishes an interrupted one" in note for note in notes)


def test_a_comparison_interrupted_before_its_first_round_says_how_to_continue(monkeypatch: pytest.MonkeyPatch):
    def pressed(*given, **named):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(driver, "check", pressed)
        stopped = raypfl("run", *QUIETLY)
    folder = only_folder()
    assert stopped.exit_code == 130
    assert f"Stopped. 0 of 2 runs are finished. To continue: raypfl resume {folder}\n" in stopped.stderr
    assert [run["status"] for run in raypfl_json("resume", str(folder))["runs"]] == ["finished", "finished"]


def test_a_comparison_is_made_longer_and_an_interruption_keeps_the_change(cut_off):
    raypfl_json("run", *QUIETLY)
    folder = only_folder()
    stopped = cut_off("none", "resume", str(folder), "rounds=3")
    assert stopped.exit_code == 0
    whole = raypfl_json("run", *QUIETLY, "rounds=3")
    assert hashes(raypfl_json("resume", str(folder))) == hashes(whole)


def test_going_on_with_a_change_that_was_interrupted_repeats_the_change(monkeypatch: pytest.MonkeyPatch):
    raypfl_json("run", *QUIETLY)
    folder = only_folder()

    def pressed(*given, **named):
        raise KeyboardInterrupt

    monkeypatch.setattr(driver, "resume", pressed)
    stopped = raypfl("resume", str(folder), "rounds=3")
    earlier = "0 of 2 runs are finished with rounds=3; earlier results exist for 2."
    assert f"{earlier} To continue: raypfl resume {folder} rounds=3\n" in stopped.stderr


def test_an_interrupted_extension_shows_all_runs_at_what_they_have(cut_off):
    raypfl_json("run", *QUIETLY, "--method", "fedavg,local")
    folder = only_folder()
    stopped = cut_off("fedavg", "resume", str(folder), "rounds=9", round=3)
    table, places = stopped.stdout.split("Picture")
    assert all(word in table for word in ("fedavg", "local", "rounds=2"))
    assert all(f"{folder / run}  weights" in places for run in ("fedavg-s0", "local-s0")) and "Try next" not in places
    assert "Stopped. 0 of 2 runs are finished with rounds=9; earlier results exist for 1." in stopped.stderr


def test_what_is_suggested_starts_from_what_ran_and_not_from_what_was_typed_first():
    raypfl_json("run", *QUIETLY, "--method", "fedavg,local", "--seeds", "3")
    folder = only_folder()
    for words in ((str(folder), "rounds=3", "checkpoint.keep=4"), (str(folder),)):
        suggested = raypfl("resume", *words).stdout.split("Try next")[1]
        (again,) = [line for line in suggested.splitlines() if "raypfl run" in line]
        assert " rounds=3 " in again and again.endswith(" seeds=3 checkpoint.keep=4 partition.alpha=0.1")
        assert f"raypfl resume {folder} rounds=6\n" in suggested


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("method=ditto", "method cannot be changed once a comparison has started"),
        ("seed=3", "seed cannot be changed once a comparison has started"),
        ("rouns=3", "rouns is not a setting of an experiment"),
        ("method.lam=1", "method.lam is not an option of fedavg"),
    ],
)
def test_a_change_that_does_not_suit_all_runs_is_refused_before_any_goes_on(change, sentence):
    raypfl_json("run", *QUIETLY)
    before = {file: file.read_bytes() for file in Path("runs").rglob("*.yaml")}
    refused = raypfl("resume", str(only_folder()), change)
    assert refused.exit_code == 2 and sentence in refused.stderr
    assert {file: file.read_bytes() for file in Path("runs").rglob("*.yaml")} == before


def test_a_failed_run_of_a_comparison_is_run_again_by_resume(monkeypatch: pytest.MonkeyPatch):
    real = driver.resume

    def failing(folder, *, listeners, overrides):
        if Path(folder).name.startswith("ditto"):
            raise RaypflError("Client 3 lost its mind.")
        return real(folder, listeners=listeners, overrides=overrides)

    with monkeypatch.context() as patch:
        patch.setattr(driver, "resume", failing)
        failed = raypfl("run", *QUIETLY)
    folder = only_folder()
    assert failed.exit_code == 1 and "Client 3 lost its mind." in failed.stderr and "fedavg" in failed.stdout
    assert f"1 of 2 runs are finished. To continue: raypfl resume {folder}\n" in failed.stderr
    assert [run["status"] for run in raypfl_json("resume", str(folder))["runs"]] == ["finished", "finished"]


def test_checkpoints_in_a_common_place_are_kept_apart_by_comparison(elsewhere: Path):
    for _ in range(2):
        raypfl_json("run", *QUIETLY, f"checkpoint.location={elsewhere / 'kept'}")
    comparisons = sorted(folder.name for folder in Path("runs").glob("digits-*"))
    assert sorted(folder.name for folder in (elsewhere / "kept").iterdir()) == comparisons
    assert {folder.name for folder in (elsewhere / "kept").glob("*/*")} == {"fedavg-s0", "ditto-s0"}


def test_a_comparison_that_was_not_tracked_is_recorded_below_one_parent(elsewhere: Path, mlflow_database: Path):
    with_database(elsewhere / "runs", mlflow_database)
    raypfl_json("run", *QUIETLY, "tracking.system_metrics=false", "tracking.models_mb=0")
    for _ in range(2):
        recorded = raypfl("track", str(only_folder()))
        assert recorded.exit_code == 0, recorded.output
    (parent,) = runs_of(elsewhere / "runs", "tags.kind = 'comparison'")
    children = runs_of(elsewhere / "runs", "tags.kind = 'run'")
    assert [child.data.tags["mlflow.parentRunId"] for child in children] == [parent.info.run_id] * 2


def test_a_terminated_comparison_is_one_that_goes_on(cut_off, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Interrupt, "__init__", lambda self, round: self.__dict__.update(round=1, number=signal.SIGTERM))
    stopped = cut_off("fedavg", "run", *QUIETLY)
    assert stopped.exit_code == 130 and "0 of 2 runs are finished." in stopped.stderr
