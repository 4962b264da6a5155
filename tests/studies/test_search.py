"""Searches of studies: equal numbers of trials, of which validation data alone choose."""

from __future__ import annotations

import json
import math
import os
import signal
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from xml.etree import ElementTree

import pyarrow.parquet as pq
import pytest

import raypfl
from raypfl.cli.actions import study as action
from raypfl.cli.actions.study import run_study
from raypfl.common.errors import ConfigError, RaypflError, Stopped
from raypfl.engine.events import Event, RoundFinished
from raypfl.experiment.spaces import spaces_of
from raypfl.studies.cells import plan
from raypfl.studies.description import load
from raypfl.studies.deviations import deviations
from raypfl.studies.search.choice import Score, SearchOutcome
from raypfl.studies.search.trials import SearchTrial, draw, planned_trials, with_search
from tests.support.command import raypfl as command

STUDY = """\
seeds: 2
experiment:
  rounds: 3
  data: {name: "tests.support.published_split:digits", val_fraction: 0.2}
  partition: {name: iid, clients: 4}
  model: {name: mlp, hidden: [8]}
  training: {steps: 4}
  evaluation: {every: 1, protocols: [local, val]}
  checkpoint: {every: 1}
  engine: {backend: inline}
  tracking: {mlflow: false}
methods:
  FedAvg: fedavg
  Ditto: {name: ditto, lam: 1.0}
metrics:
  PM: {protocol: local, model: deployed, choose: validation}
search:
  trials: 3
  shared: {training.lr: {loguniform: [0.001, 1]}}
  methods: {Ditto: {method.lam: {loguniform: [0.1, 10]}}}
  choose: validation
"""


@pytest.fixture(autouse=True)
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(action, "draw", lambda entries, name, file: file.touch())
    (tmp_path / "tiny.yaml").write_text(STUDY)


def trials_of(source: str, *assignments: str) -> list[SearchTrial]:
    study, changes = with_search(load(source)[0], assignments)
    return planned_trials(study, plan(study, changes))


def record_of(*assignments: str) -> dict:
    """The record of a whole run of the study, without what differs between machines and folders."""
    run_study("tiny.yaml", [], assignments, quiet=True, as_json=True, record_file=Path("record.json"))
    record = json.loads(Path("record.json").read_text())
    for part in (*record["runs"], *record["trials"]):
        del part["cpu_seconds"]
    return record


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, Path]:
    """The record of the whole study, and the folder in which it ran."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        patched.setattr(action, "draw", lambda entries, name, file: file.touch())
        Path("tiny.yaml").write_text(STUDY)
        return record_of(), folder


# What is drawn


def test_every_method_has_all_trials_with_equal_draws_of_shared_settings_and_more_trials_keep_these():
    by_method = {}
    for trial in trials_of("tiny.yaml"):
        by_method.setdefault(trial.position[0], []).append(trial)
    fedavg = by_method["FedAvg"]
    ditto = by_method["Ditto"]

    assert [trial.number for trial in fedavg] == [trial.number for trial in ditto] == [1, 2, 3]
    rates = [trial.values["training.lr"] for trial in fedavg]
    assert rates == [trial.values["training.lr"] for trial in ditto] and len(set(rates)) == 3
    assert {tuple(trial.values) for trial in ditto} == {("training.lr", "method.lam")}
    for trial in ditto:
        (cell,) = trial.cells
        assert (cell.experiment.training.lr, cell.experiment.method.lam) == tuple(trial.values.values())
        assert cell.experiment.evaluation.protocols == ("val",)

    longer = trials_of("tiny.yaml", "search.trials=5")
    assert [trial.values for trial in longer if trial.number <= 3] == [trial.values for trial in [*fedavg, *ditto]]
    assert len({cell.folder for trial in longer for cell in trial.cells}) == len(longer) == 10


def test_draws_are_uniform_over_all_seeds_and_few_of_one_seed_lie_apart():
    spaces = spaces_of(
        {
            "a": {"loguniform": [0.01, 100]},
            "b": {"randint": [1, 4]},
            "c": {"choice": ["x", "y"]},
            "d": {"quniform": [0, 1, 0.25]},
        }
    )
    smallest_gaps = []
    values: dict[str, list] = {space.key: [] for space in spaces}
    for seed in range(100):
        configurations = draw(spaces, seed, 6)
        logarithms = sorted(math.log10(configuration["a"]) for configuration in configurations)
        smallest_gaps.append(min(high - low for low, high in pairwise(logarithms)))
        for configuration in configurations:
            for key, value in configuration.items():
                values[key].append(value)

    # Six independent draws have a smallest gap of 4 / 35 of these four decades on average.
    assert fmean(smallest_gaps) > 2 * 4 / 35
    assert all(0.01 <= value < 100 for value in values["a"])
    assert fmean(math.log10(value) for value in values["a"]) == pytest.approx(0, abs=0.15)
    for key, listed in (("b", {1, 2, 3}), ("c", {"x", "y"}), ("d", {0, 0.25, 0.5, 0.75, 1})):
        assert set(values[key]) == listed
        assert max(map(values[key].count, listed)) < 2.5 * min(map(values[key].count, listed))


# What chooses


@pytest.mark.thorough
def test_test_labels_change_what_is_measured_and_not_what_is_chosen(whole: tuple[dict, Path]):
    record, folder = whole
    poisoned = record_of("data.poisoned=true", "output=poisoned")

    assert poisoned["trials"] == record["trials"]
    assert [run["weights_hash"] for run in poisoned["runs"]] == [run["weights_hash"] for run in record["runs"]]
    for entry, other in zip(record["entries"], poisoned["entries"], strict=True):
        assert min(entry["values"]) > max(other["values"])

    # The best trial by validation data is run, and no trial was evaluated on anything else.
    for method in ("FedAvg", "Ditto"):
        rows = [row for row in record["trials"] if row["method"] == method]
        assert [row["chosen"] for row in rows] == [row["score"] == max(row["score"] for row in rows) for row in rows]
    for trial in trials_of("tiny.yaml", f"output={folder}/runs"):
        result = raypfl.Result.load(trial.cells[0].folder)
        assert set(result.evaluations["protocol"].to_pylist()) == {"val"}
        (row,) = [row for row in record["trials"] if (row["method"], row["trial"]) == (trial.position[0], trial.number)]
        model = "global" if row["method"] == "FedAvg" else "personal"
        (summary,) = [summary for summary in result.summary(result.best_round) if summary["model"] == model]
        assert row["score"] == pytest.approx(100 * summary["accuracy"], abs=1e-3)

    # What the table has is a plain run with these settings.
    (chosen,) = [row["values"] for row in record["trials"] if row["method"] == "FedAvg" and row["chosen"]]
    described = plan(load("tiny.yaml")[0])[0].experiment
    whole = raypfl.run(described.override([f"training.lr={chosen['training.lr']}", "output=apart"]))
    assert record["runs"][0]["weights_hash"] == whole.weights_hash


def test_the_table_and_the_files_tell_what_was_searched(whole: tuple[dict, Path]):
    folder = whole[1] / "runs/tiny"
    page = (folder / "table.md").read_text()
    assert "Each method has 3 trials, drawn at random with seed 0: training.lr (loguniform [0.001, 1])" in page
    assert "for Ditto also method.lam" in page and "FedAvg: training.lr=" in page
    rows = (folder / "trials.csv").read_text().splitlines()
    assert rows[0] == "method,down,across,trial,score,chosen,cpu_seconds,training.lr,method.lam" and len(rows) == 7

    Path("other.yaml").write_text("extends: tiny.yaml\nsearch: {trials: 4}\n")
    study, reference = load("other.yaml")
    assert deviations(reference, study, plan(study), plan(reference), {})[0] == "search.trials is 4, not 3."
    Path("fixed.yaml").write_text("extends: tiny.yaml\nsearch: null\n")
    without_search, _ = load("fixed.yaml")
    assert deviations(study, without_search, plan(study), plan(study), {})[0] == "No settings are searched."
    expected = "Settings are searched, with 4 trials for each method."
    assert deviations(without_search, study, plan(study), plan(study), {})[0] == expected


@pytest.mark.parametrize(
    ("scores", "text"),
    [([50.0], "validation data)"), ([50.0, 43.09], "the other 43.09)"), ([50.0, 41.0, 43.0], "others 41.00 to 43.00)")],
)
def test_a_search_says_what_its_other_trials_reached(scores: list[float], text: str):
    search = with_search(load("tiny.yaml")[0], [])[0].search
    trials = [trial for trial in trials_of("tiny.yaml") if trial.position[0] == "FedAvg"]
    scored = [Score(trial, value) for trial, value in zip(trials, scores, strict=False)]
    outcome = SearchOutcome(search, scored, {trials[0].position: scored[0]})
    assert text in outcome.sentences()[2]


def test_a_trial_that_fails_has_no_score_and_another_one_is_chosen():
    Path("tiny.yaml").write_text(STUDY.replace("{loguniform: [0.001, 1]}", "{choice: [0.1, 1e30]}"))
    rates = [trial.values["training.lr"] for trial in trials_of("tiny.yaml", "search.trials=4")]
    assert rates.count(1e30) in range(2, 7)

    record = record_of("search.trials=4", "seeds=1")
    assert [row["score"] is None for row in record["trials"]] == [rate == 1e30 for rate in rates]
    assert {row["values"]["training.lr"] for row in record["trials"] if row["chosen"]} == {0.1}
    assert "has no score: " in Path("runs/tiny/table.md").read_text()

    Path("tiny.yaml").write_text(STUDY.replace("{loguniform: [0.001, 1]}", "{choice: [1e30]}"))
    with pytest.raises(RaypflError, match="FedAvg: no trial has a score"):
        run_study("tiny.yaml", ["FedAvg"], ["seeds=1", "search.trials=1"], quiet=True, as_json=True)


def test_the_table_has_the_other_columns_of_a_method_all_of_whose_trials_failed_in_one():
    Path("wild.yaml").write_text(
        "extends: tiny.yaml\nseeds: 1\nacross: {calm: {}, wild: {methods: {Ditto: {lam: 1.0e+30}}}}\n"
        "search: {trials: 1, methods: null}\n"
    )
    with pytest.raises(RaypflError, match=r"Ditto · wild: no trial has a score\."):
        run_study("wild.yaml", [], ["rounds=1"], quiet=True, as_json=True)

    rows = pq.read_table("runs/wild/table.parquet").to_pylist()
    missing = [(row["method"], row["across"]) for row in rows if row["measured"] is None]
    assert missing == [("Ditto", "wild")] and len(rows) == 4
    page = Path("runs/wild/table.md").read_text()
    assert "No trial has a score, so that nothing was run: Ditto · wild." in page and "run as described" not in page


def test_a_study_that_has_lost_its_search_keeps_no_trials_beside_its_table():
    changes = ["seeds=1", "rounds=1"]
    run_study("tiny.yaml", ["FedAvg"], [*changes, "search.trials=1"], quiet=True, as_json=True)
    files = {Path("runs/tiny/trials.csv"), Path("runs/tiny/search.yaml")}
    assert all(file.exists() for file in files)

    Path("tiny.yaml").write_text(STUDY.partition("search:")[0])
    run_study("tiny.yaml", ["FedAvg"], changes, quiet=True, as_json=True)
    assert not any(file.exists() for file in files)


def test_a_report_shows_what_was_searched_all_trials_and_the_chosen_ones(whole: tuple[dict, Path]):
    folder = whole[1] / "runs/tiny"
    reported = command("report", str(folder))
    assert reported.exit_code == 0, reported.output
    page = ElementTree.fromstring(Path("report.html").read_text())
    (section,) = [part for part in page.iter("section") if part.get("class") == "search"]
    words = " ".join("".join(section.itertext()).split())
    assert "training.lr (loguniform from 0.001 to 1) and method.lam (loguniform from 0.1 to 10)" in words

    for table, method in zip(section.iter("table"), ("FedAvg", "Ditto"), strict=True):
        rows = [row for row in whole[0]["trials"] if row["method"] == method]
        lines = list(table.find("tbody"))
        scores = [f"{row['score']:.1f}" for row in rows]
        assert [line[1].text for line in lines] == scores
        assert [line.get("class") == "best" for line in lines] == [row["chosen"] for row in rows]
        assert all(float(line[-1].text) >= 0 for line in lines), "CPU seconds"

    pictures = [picture.get("aria-label") for picture in section.iter("svg")]
    assert len(pictures) == 3 and all("one for each of 3 trials. Chosen, in a ring: " in text for text in pictures)


def test_what_is_redirected_to_a_file_has_each_sentence_in_one_line_without_blanks_at_its_end(
    whole: tuple[dict, Path],
):
    result = command("study", "tiny.yaml", f"output={whole[1]}/runs", "--quiet")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    (spaces,) = [line for line in lines if line.startswith("  Each method has 3 trials")]
    assert spaces.endswith("for Ditto also method.lam (loguniform [0.1, 10]).") and max(map(len, lines)) < 400


# Stopping, and going on


def test_a_study_that_is_stopped_in_its_search_goes_on_to_the_same_record(
    whole: tuple[dict, Path], monkeypatch: pytest.MonkeyPatch
):
    run = action.run

    def interrupted(cells: list, listen: object) -> list:
        def listen_and_stop(cell: int, event: Event) -> None:
            listen(cell, event)
            if isinstance(event, RoundFinished) and (cells[cell].method, cell, event.round) == ("Ditto", 4, 2):
                os.kill(os.getpid(), signal.SIGINT)

        return run(cells, listen_and_stop)

    with monkeypatch.context() as patched:
        patched.setattr(action, "run", interrupted)
        with pytest.raises(Stopped, match=r"of 6 trials' runs are finished. To continue: raypfl study tiny"):
            run_study("tiny.yaml", [], ["output=again"], quiet=True, as_json=True)
    finished = {file: file.stat().st_mtime_ns for file in Path("again").rglob("summary.json")}
    assert finished and not Path("again/tiny/table.md").exists()

    assert record_of("output=again") == whole[0]
    unchanged = [file for file, time in finished.items() if file.stat().st_mtime_ns == time]
    assert len(unchanged) >= 3, "FedAvg's trials were finished"


# What is refused, and what stays as it was


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("trials: 3", "trails: 3", "trails is not a key of what a study has in search; did you mean 'trials'?"),
        ("methods: {Ditto: {method", "methods: {Dito: {method", "methods.Dito is not one of the study's methods"),
        ("method.lam: {log", "training.lr: {log", "search.methods.Ditto has training.lr, which search.shared has"),
        ("training.lr: {", "data.val_fraction: {", "search has data.val_fraction, which all methods of a"),
        ("{loguniform: [0.001, 1]}", "{grid: [0.1, 1]}", "search.training.lr is a grid, but a study draws its trials"),
        (
            "{loguniform: [0.001, 1]}",
            "{logunif: [0.1, 1]}",
            "'logunif' is not a kind of space; did you mean 'loguniform'?",
        ),
        ("method.lam: {", "method.mu: {", "In trial 1 of Ditto: "),
        ("choose: validation\n", "value: f1\n", "search.value is 'f1', which is not a metric"),
        (", val_fraction: 0.2", "", "on validation data, but data.val_fraction is 0"),
    ],
)
def test_a_mistake_in_a_search_is_refused_before_anything_runs(old: str, new: str, sentence: str):
    assert old in STUDY
    head, search = STUDY.split("search:")
    where = search if old in search else head
    changed = where.replace(old, new)
    if old.startswith(", val_fraction"):
        changed = changed.replace("[local, val]", "[local]").replace(", choose: validation", "")
    Path("tiny.yaml").write_text(f"{head}search:{changed}" if where is search else f"{changed}search:{search}")
    result = command("study", "tiny.yaml")
    assert result.exit_code == 2 and sentence in result.stderr, result.output
    assert not Path("runs").exists()


def test_a_row_whose_label_names_a_value_that_is_searched_is_refused():
    Path("tiny.yaml").write_text(STUDY.replace("Ditto: ", "ditto lam=1.0: "))
    result = command("study", "tiny.yaml")
    assert result.exit_code == 2 and "'ditto lam=1.0' names a value of method.lam" in result.stderr, result.output


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["tiny.yaml", "training.lr=0.1"], "training.lr is set, but the study tiny searches it"),
        (["tiny.yaml", "search.shared.training.lr=1"], "cannot be set in a command, since spaces"),
        (["tiny.yaml", "search.trails=1"], "trails is not a key of what a study has in search; did you mean 'trials'?"),
        (
            ["digits-personal", "--trials", "2"],
            "the study digits-personal has no search; write one into",
        ),
    ],
)
def test_a_mistake_in_the_command_of_a_search_is_a_sentence(words: list[str], sentence: str):
    result = command("study", *words)
    assert result.exit_code == 2 and sentence in result.stderr, result.output


def test_a_new_study_may_have_a_search():
    words = ["methods=[fedavg, local]", "data={name: digits, val_fraction: 0.2}", "search.trials=2"]
    with pytest.raises(ConfigError, match=r"search\.shared"):
        action.new_study(["mine.yaml"], words)
    action.new_study(["mine.yaml"], [*words, "search.shared={training.lr: {loguniform: [0.01, 1]}}"])
    assert len(trials_of("mine.yaml")) == 4
