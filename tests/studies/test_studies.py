"""Studies: their files, which cells they run, what is not run again, and what their tables say."""

from __future__ import annotations

import csv
import io
import math
import os
import re
import signal
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import matplotlib.image
import pyarrow.parquet as pq
import pytest
import yaml
from rich.console import Console

import raypfl
from raypfl.common.errors import ConfigError
from raypfl.engine.events import Progress, RoundFinished, RunStarted
from raypfl.methods import FedAvg
from raypfl.results.report import find_runs
from raypfl.runs.records import is_finished
from raypfl.runs.several import processes
from raypfl.runs.several.worker import PlannedRun, carry_out
from raypfl.studies import STUDIES, running
from raypfl.studies.cells import choices_with_values, identity, plan, select
from raypfl.studies.description import PublishedNumber, Study, load
from raypfl.studies.deviations import deviations
from raypfl.studies.scaffold import scaffold
from raypfl.studies.search.trials import planned_trials, with_search
from raypfl.studies.table.entries import TableEntry, table_entries
from raypfl.studies.table.formats import as_latex, markdown, show
from raypfl.studies.table.layout import arrange, blocks
from raypfl.studies.table.notes import notes_on
from raypfl.studies.table.picture import draw
from tests.support.command import raypfl as command
from tests.support.command import raypfl_json
from tests.support.pages import ROOT
from tests.support.pages import blocks as yaml_blocks
from tests.support.processes import exit_code
from tests.support.tiers import with_quick

TINY = """\
seeds: 2
experiment:
  rounds: 4
  data: digits
  partition: {clients: 4}
  model: {name: mlp, hidden: [8]}
  evaluation: {every: 0}
  checkpoint: {every: 1}
  engine: {backend: inline}
  tracking: {mlflow: false}
methods:
  FedAvg: fedavg
  Ditto: {name: ditto, lam: 1.0}
across:
  Dir(0.1): {experiment: {partition: {alpha: 0.1}}}
  Dir(1.0): {experiment: {partition: {alpha: 1.0}}, methods: {Ditto: {lam: 2.0}}}
metrics:
  GM: {protocol: global, model: global}
  PM: {protocol: local}
published:
  source: A paper, Table 4
  rows:
    FedAvg: [50.00 ± 1.00, –, 60, –]
"""


@pytest.fixture(autouse=True)
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    (tmp_path / "tiny.yaml").write_text(TINY)
    return tmp_path


def cells_of(source: str, *assignments: str, only: tuple[str, ...] = ()) -> list:
    study, _ = load(source)
    return plan(select(study, only), assignments)


class Watch:
    """A study's listener; sends this process a signal when a cell has finished a round.

    Attributes
    ----------
    first_rounds : cell -> the round after which it started or went on.
    progress : the texts on what is done besides rounds.
    """

    def __init__(self, cell: int = -1, round: int = 0, number: int = signal.SIGINT):
        self.target = (cell, round)
        self.number = number
        self.first_rounds: dict[int, int] = {}
        self.progress: list[str] = []

    def __call__(self, cell: int, event: object) -> None:
        if isinstance(event, RunStarted):
            self.first_rounds[cell] = event.first_round
        if isinstance(event, Progress):
            self.progress.append(event.text)
        if isinstance(event, RoundFinished) and (cell, event.round) == self.target:
            os.kill(os.getpid(), self.number)


class FailsAtStart(FedAvg):
    def start(self, task):
        raise KeyError("theta")


# The grid


def test_cells_are_all_methods_in_all_settings_seed_by_seed():
    cells = cells_of("tiny.yaml")
    order = product((0, 1), ("Dir(0.1)", "Dir(1.0)"), ("FedAvg", "Ditto"))
    assert [(cell.experiment.seed, cell.across, cell.method) for cell in cells] == list(order)
    assert [cell.experiment.method.lam for cell in cells if cell.method == "Ditto"] == [1.0, 2.0, 1.0, 2.0]
    assert [cell.experiment.partition.alpha for cell in cells[:4]] == [0.1, 0.1, 1.0, 1.0]


def test_a_methods_settings_go_before_the_studys_and_may_differ_between_columns(tiny: Path):
    values = yaml.safe_load(TINY)
    values["methods"]["Ditto"] = {"name": "ditto", "settings": {"training.lr": 0.05, "model.hidden": [9]}}
    values["across"]["Dir(1.0)"]["methods"] = {"Ditto": {"settings": {"training.lr": 0.01}}}
    values["experiment"]["training"] = {"lr": 0.3}
    (tiny / "own.yaml").write_text(yaml.safe_dump(values))

    cells = cells_of("own.yaml", "seeds=1")

    assert {cell.experiment.training.lr for cell in cells_of("own.yaml", "training.lr=0.2")} == {0.2}
    assert {(cell.method, cell.across): cell.experiment.training.lr for cell in cells} == {
        ("FedAvg", "Dir(0.1)"): 0.3,
        ("FedAvg", "Dir(1.0)"): 0.3,
        ("Ditto", "Dir(0.1)"): 0.05,
        ("Ditto", "Dir(1.0)"): 0.01,
    }
    assert {cell.method for cell in cells if cell.experiment.model.options.get("hidden") == [9]} == {"Ditto"}


def test_only_matches_labels_whatever_their_case_and_punctuation():
    def positions(source: str, *only: str) -> set[tuple[str, str, str]]:
        return {cell.position for cell in cells_of(source, only=only)}

    assert positions("tiny.yaml", "ditto", "dir 0.1") == {("Ditto", "", "Dir(0.1)")}
    assert {method for method, _, _ in positions("tiny.yaml", "DIR(0.1)")} == {"FedAvg", "Ditto"}
    assert positions("tiny.yaml", "Dir(0", "1)", "ditto") == {("Ditto", "", "Dir(0.1)")}, "as divided at a comma"
    table = positions("fednh-table1", "FedNH", "fedavg", "cifar10")
    assert {(method, down) for method, down, _ in table} == {("FedNH", "CIFAR-10"), ("FedAvg", "CIFAR-10")}

    with pytest.raises(ConfigError, match=r"nor a setting of fednh-table1; did you mean 'FedNH'\?"):
        cells_of("fednh-table1", only=("fednhh",))


def test_a_cells_identity_depends_on_the_settings_that_decide_its_result_alone(monkeypatch: pytest.MonkeyPatch):
    (cell,) = cells_of("tiny.yaml", "seeds=1", only=("FedAvg", "Dir(0.1)"))
    whole = identity(cell.experiment)

    without_effect = ["engine.backend=ray", "ray.cpus_per_actor=2", "checkpoint.every=7", "output=elsewhere"]
    for count in range(1, len(without_effect) + 1):
        assert identity(cell.experiment.override(["name=other", *without_effect[:count]])) == whole

    as_before_a_setting_was_added = cell.experiment.to_dict()
    del as_before_a_setting_was_added["cohort"]["selection"]
    with monkeypatch.context() as patched:
        patched.setattr(raypfl.Experiment, "to_dict", lambda self: as_before_a_setting_was_added)
        assert identity(cell.experiment) == whole

    decisive = ["training.lr=0.5", "seed=1", "rounds=5", "engine.executor=sequential", "data.test_fraction=0.3"]
    assert len({identity(cell.experiment.override([assignment])) for assignment in decisive} | {whole}) == 6


def test_a_task_reserves_what_its_cell_is_set_to_although_its_run_is_one_without_ray(monkeypatch: pytest.MonkeyPatch):
    tasks: list[PlannedRun] = []
    monkeypatch.setattr(running, "run_on_cluster", lambda runs, *_: tasks.extend(runs.values()) or {})
    running.run(cells_of("tiny.yaml", "engine.backend=ray", "ray.cpus_per_actor=0.25"), Watch())
    assert {task.ray_settings.cpus_per_actor for task in tasks} == {0.25}
    assert {task.experiment.engine.backend for task in tasks} == {"inline"}


def test_a_cell_is_another_one_once_the_file_of_its_own_method_is_edited(tiny: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(tiny)
    code = "from raypfl.methods import FedAvg\n\nclass Mine(FedAvg):\n    pass\n"
    (tiny / "method_of_a_study.py").write_text(code)
    (tiny / "tiny.yaml").write_text(TINY.replace("fedavg\n", "method_of_a_study:Mine\n"))
    before = [cell.folder.name for cell in cells_of("tiny.yaml", only=("Dir(0.1)",))]
    assert before == [cell.folder.name for cell in cells_of("tiny.yaml", only=("Dir(0.1)",))]

    (tiny / "method_of_a_study.py").write_text(code + "    weighting = 'uniform'\n")
    # A process goes on with the code that it has imported, under the same names.
    assert before == [cell.folder.name for cell in cells_of("tiny.yaml", only=("Dir(0.1)",))]
    monkeypatch.delitem(sys.modules, "method_of_a_study")  # as in another process
    after = [cell.folder.name for cell in cells_of("tiny.yaml", only=("Dir(0.1)",))]
    changed = [name for name, other in zip(before, after, strict=True) if name != other]
    assert len(changed) == 2 and all(name.startswith("method_of_a_study_Mine") for name in changed)


def test_a_cell_is_another_one_once_a_module_that_its_own_method_imports_is_edited(tiny: Path, monkeypatch):
    monkeypatch.syspath_prepend(tiny)
    (tiny / "method_with_helper.py").write_text(
        "import numpy\nfrom helper_of_a_method import Base\n\nclass Mine(Base):\n    pass\n"
    )
    (tiny / "tiny.yaml").write_text(TINY.replace("fedavg\n", "method_with_helper:Mine\n"))
    names = []
    for end in ("", "\n", "    weighting = 'uniform'\n"):
        code = f"from raypfl.methods import FedAvg\n\nclass Base(FedAvg):\n    rate = 1\n{end}"
        (tiny / "helper_of_a_method.py").write_text(code)
        for name in ("method_with_helper", "helper_of_a_method"):  # as in another process
            sys.modules.pop(name, None)
        names.append({cell.folder.name for cell in cells_of("tiny.yaml", only=("Dir(0.1)",))})
    assert len(set.union(*names)) == 2 * 3 + 2 and len(set.intersection(*names)) == 2, "of two methods, two seeds each"


def test_a_study_that_extends_another_adds_and_drops_methods_and_is_compared_with_it(tiny: Path):
    (tiny / "mine.yaml").write_text(
        "extends: tiny.yaml\nexperiment: {training: {lr: 0.5}}\nmethods: {FedAvg: null, FedPer: fedper}\n"
        "metrics: {PM: {protocol: local}}\n"
    )
    study, reference = load("mine.yaml")
    assert (study.name, list(study.methods), reference.name) == ("mine", ["Ditto", "FedPer"], "tiny")

    lines = deviations(reference, study, plan(study), plan(reference), {})
    assert "training.lr is 0.5, not 0.1." in lines
    assert "FedPer: not in the published table." in lines and "Only 1 of 2 methods; left out: FedAvg." in lines


def test_a_study_that_extends_itself_is_refused_in_a_sentence_that_names_all_files(tiny: Path):
    for name, base in (("first", "second"), ("second", "first")):
        (tiny / f"{name}.yaml").write_text(f"extends: {base}.yaml\n")
    with pytest.raises(ConfigError, match=r"first\.yaml extends second\.yaml extends first\.yaml: .*extend itself"):
        load("first.yaml")


def test_a_study_that_extends_another_keeps_its_metrics_except_those_set_to_null(tiny: Path):
    (tiny / "mine.yaml").write_text("extends: tiny.yaml\nmetrics: {GM: null, WD: {protocol: local, value: std}}\n")
    study, reference = load("mine.yaml")
    assert list(study.metrics) == ["PM", "WD"]
    assert reference.quoted("FedAvg", "", "Dir(1.0)", "GM") == PublishedNumber(60.0)
    assert study.metrics["PM"].value is None


def test_each_data_set_of_a_study_may_have_its_own_folder_and_format():
    words = ["datasets.cifar10={name: parquet, root: /ten}", "datasets.cifar100=/hundred"]
    cell, *_ = cells_of("perada-table1", *words, only=("PerAda", "CIFAR-10"))
    data = cell.experiment.to_dict()["data"]
    assert (data["name"], data["root"]) == ("parquet", "/ten")

    pools = data["pools"]
    assert (pools["auxiliary"]["name"], pools["auxiliary"]["root"]) == ("cifar100", "/hundred")
    assert pools["validation"] == 0.1 and pools["ood/cifar10_1"]["root"] is None

    copy = "datasets.image_folder={name: parquet, root: /domains, group: domain}"
    cell, *_ = cells_of("perada-table1", copy, "data.cache=/cache", only=("PerAda", "Office-Home"))
    data = cell.experiment.to_dict()["data"]
    assert (data["name"], data["root"], data["group"], data["size"]) == ("parquet", "/domains", "domain", 224)
    assert "layout" not in data  # an option of image_folder's alone

    with pytest.raises(ConfigError, match=r"datasets.cifar is set, but no cell reads .* did you mean 'cifar10"):
        cells_of("perada-table1", "datasets.cifar=/x", only=("CIFAR-10",))


def test_missing_data_is_reported_once_for_each_block_before_any_cell_runs(tiny: Path):
    result = command("study", "perada-table1", "data.root=nowhere", "--only", "cifar10,chexpert")
    assert result.exit_code == 2

    lines = [line for line in result.stderr.splitlines() if "cannot run" in line]
    assert len(lines) == 2 and "17 of 34 cells (CIFAR-10) cannot run." in lines[0], result.stderr
    assert "datasets.NAME=FOLDER" in result.stderr
    assert not (tiny / "runs").exists()


def test_published_numbers_may_be_listed_by_metric(tiny: Path):
    columns = load("tiny.yaml")[0].columns
    (tiny / "by_metric.yaml").write_text(TINY.replace("[50.00 ± 1.00, –, 60, –]", "{GM: [50.00 ± 1.00, 60]}"))
    by_column = [load("tiny.yaml")[0].quoted("FedAvg", "", *column) for column in columns]
    by_metric = [load("by_metric.yaml")[0].quoted("FedAvg", "", *column) for column in columns]
    assert by_metric == by_column and by_metric[1] is None


# Refusals


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("metrics:", "metrcs:", "metrcs is not a key of a study; did you mean 'metrics'?"),
        (
            "protocol: local}",
            "protcol: local}",
            "protcol is not a key of what a study has in metrics; did you mean 'proto",
        ),
        ("rounds: 4", "rouns: 4", "rouns is not a setting of an experiment; did you mean 'rounds'?"),
        ("lam: 1.0", "lamb: 1.0", "method.lamb is not an option of ditto; did you mean 'method.lam'?"),
        (
            "lam: 2.0",
            "lamb: 2.0",
            "In across.Dir(1.0): method.lamb is not an option of ditto; did you mean 'method.lam",
        ),
        ("methods: {Ditto:", "methods: {Dito:", "methods.Dito is not one of the study's methods; did you mean 'Ditto'"),
        (
            "60, –]",
            "60]",
            "published.rows.FedAvg has 3 entries; it must have one for each column: Dir(0.1) GM, Dir(0.1) PM",
        ),
        ("50.00 ± 1.00", "fifty", "published.rows.FedAvg has 'fifty'; an entry is a number"),
        (
            "    FedAvg: [",
            "    FedAvgg: [",
            "published.rows.FedAvgg is not one of the study's methods; did you mean 'FedAvg'?",
        ),
        (
            "[50.00 ± 1.00, –, 60, –]",
            "{PMM: [60, –]}",
            "published.rows.FedAvg.PMM is not a metric of the study; did you mean 'PM'?",
        ),
        (
            "[50.00 ± 1.00, –, 60, –]",
            "{PM: [60]}",
            "published.rows.FedAvg.PM has 1 entries; it must have one for each column: Dir(0.1), Dir(1.0).",
        ),
        ("Dir(1.0)", "dir-0.1", "'Dir(0.1)' and 'dir-0.1' must differ in letters or digits"),
        (
            "protocol: local}",
            "protocol: pm_v}",
            "metric PM is of the protocol 'pm_v', but evaluation.protocols is [local,",
        ),
    ],
)
def test_a_mistake_in_a_study_is_refused_with_the_nearest_before_anything_runs(tiny: Path, old, new, sentence):
    (tiny / "tiny.yaml").write_text(TINY.replace(old, new))
    result = command("study", "tiny.yaml")
    assert result.exit_code == 2 and sentence in result.stderr, result.output
    assert ("In across" in result.stderr) == ("In across" in sentence)
    assert not (tiny / "runs").exists()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["fednh-tabel1"], "There is no study called 'fednh-tabel1'; did you mean 'fednh-table1'?"),
        (["tiny.yaml", "training.lrr=1"], "lrr is not a setting of training; did you mean 'training.lr'?"),
        (["tiny.yaml", "method=ditto"], "cannot be set in a study: it has its methods. Choose among them with --only."),
        (["tiny.yaml", "--only", "dito"], "--only names 'dito'"),
        (["tiny.yaml", "--only", ","], "--only is ',', which names nothing; leave it out to run all of the study."),
        (["tiny.yaml", "experiment.rounds=0"], "rounds is 0; it must be at least 1."),
    ],
)
def test_a_mistake_in_the_command_is_a_sentence(words, sentence):
    result = command("study", *words)
    assert result.exit_code == 2 and sentence in result.stderr, result.output


# Running, and not running again


def test_a_stopped_study_goes_on_without_redoing_what_is_finished_and_to_the_same_bits():
    # One after another: cells that differ in their partitions would advance together.
    cells = cells_of("tiny.yaml", "seeds=1", "engine.executor=sequential")
    stopped = running.run(cells, Watch(cell=1, round=2))
    assert [outcome.status for outcome in stopped] == ["finished", "stopped", "stopped", "stopped"]
    before = {file: file.stat().st_mtime_ns for file in cells[0].folder.rglob("*") if file.is_file()}

    watch = Watch()
    assert {outcome.status for outcome in running.run(cells, watch)} == {"finished"}
    assert watch.first_rounds == {1: 2, 2: 0, 3: 0}
    assert {file: file.stat().st_mtime_ns for file in before} == before

    whole = raypfl.run(cells[1].experiment.replace(output="apart"))
    assert raypfl.Result.load(cells[1].folder).weights_hash == whole.weights_hash
    again = Watch()
    running.run(cells, again)
    assert again.first_rounds == {}


def test_a_study_with_other_rounds_says_that_its_runs_begin_anew(tiny: Path):
    words = ("study", "tiny.yaml", "--only", "fedavg,dir0.1", "seeds=1", "--quiet")
    assert "beginning" not in command(*words, "rounds=1").stderr
    assert "beginning" not in command(*words, "rounds=1", "training.lr=0.05").stderr
    warning = " ".join(command(*words, "rounds=2").stderr.split())
    assert "runs with rounds=1, which are not continued: with rounds=2, each cell is another run" in warning


def test_a_study_goes_on_after_its_own_method_lost_an_option_that_earlier_runs_have(tiny: Path, monkeypatch):
    monkeypatch.syspath_prepend(tiny)
    (tiny / "tiny.yaml").write_text(TINY.replace("fedavg\n", "method_with_option:Mine\n"))
    words = ("study", "tiny.yaml", "--only", "fedavg,dir0.1", "seeds=1", "rounds=1", "--quiet")
    for option in ("old", "new"):
        code = f"from raypfl.methods import FedAvg\n\nclass Mine(FedAvg):\n    {option}: float = 0.5\n"
        (tiny / "method_with_option.py").write_text(code)
        sys.modules.pop("method_with_option", None)  # as in another process
        carried_out = command(*words)
        assert carried_out.exit_code == 0, carried_out.output
    assert len(list(Path("runs/cells").iterdir())) == 2


def test_a_cell_that_was_made_longer_is_not_shown_as_the_run_of_the_study(tiny: Path):
    words = ("study", "tiny.yaml", "--only", "fedavg,dir0.1", "seeds=1", "rounds=1")
    command(*words)
    (cell,) = Path("runs/cells").iterdir()
    assert "runs/tiny is a study, not a run: give the command" in " ".join(
        command("resume", "runs/tiny").stderr.split()
    )
    raypfl.resume(cell, overrides=["rounds=2"])
    refused = command(*words)
    assert refused.exit_code == 2
    assert "resumed with rounds=2, where the study has 1." in refused.output


def test_cells_that_advance_together_say_that_they_are_being_stopped():
    cells = cells_of("tiny.yaml", only=("FedAvg", "Dir(0.1)"))
    watch = Watch(cell=0, round=2)
    assert [outcome.status for outcome in running.run(cells, watch)] == ["stopped", "stopped"]
    assert any(text.startswith("Stopping: the finished rounds are being saved") for text in watch.progress)


@pytest.mark.thorough
def test_a_study_whose_process_is_killed_goes_on_from_the_last_checkpoint(tiny: Path):
    cells = cells_of("tiny.yaml", "seeds=1", "engine.executor=sequential")
    watch = Watch(cell=1, round=3, number=signal.SIGKILL)
    assert exit_code(running.run, cells, watch) == -signal.SIGKILL
    assert [is_finished(cell.folder) for cell in cells] == [True, False, False, False]

    watch = Watch()
    running.run(cells, watch)
    assert watch.first_rounds == {1: 2, 2: 0, 3: 0}
    assert all(is_finished(cell.folder) for cell in cells)


@pytest.mark.thorough
@pytest.mark.usefixtures("ray_cluster")
def test_cells_on_ray_are_stopped_with_a_checkpoint_and_end_with_the_bits_of_an_inline_run(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
):
    (tiny / "tiny.yaml").write_text(TINY.replace("FedAvg: fedavg", "FedAvg: tests.support.federated_methods:Slow"))
    # Seeds advance together: here two in one process.
    monkeypatch.setattr(processes, "room_for_runs", lambda ray, settings, runs: 1)
    cells = cells_of("tiny.yaml", "engine.backend=ray", "rounds=20", only=("FedAvg", "Dir(0.1)"))
    stopped = running.run(cells, Watch(cell=0, round=2))
    assert [outcome.status for outcome in stopped] == ["stopped", "stopped"]

    watch = Watch()
    assert [outcome.status for outcome in running.run(cells, watch)] == ["finished", "finished"]
    assert 2 <= watch.first_rounds[0] < 20 and 1 in watch.first_rounds

    whole = raypfl.run(cells[0].experiment.override(["method=ditto", "engine.backend=inline", "output=apart"]))
    assert raypfl.Result.load(cells[0].folder).weights_hash == whole.weights_hash


@pytest.mark.thorough
@pytest.mark.usefixtures("ray_cluster")
def test_cells_on_ray_run_at_the_same_time(tiny: Path):
    meeting = (
        f"FedAvg: {{name: 'tests.support.federated_rendezvous:Rendezvous', marks: {tiny}, groups: 2, patience: 20}}"
    )
    (tiny / "tiny.yaml").write_text(TINY.replace("FedAvg: fedavg", meeting))
    words = ("engine.backend=ray", "ray.cpus_per_actor=0.25", "rounds=2", "cohort.size=1")
    cells = cells_of("tiny.yaml", *words, only=("FedAvg", "Dir(0.1)"))
    assert len(cells) == 2  # each waits for the other, round by round
    assert [outcome.error for outcome in running.run(cells, Watch())] == [None, None]
    assert [raypfl.Result.load(cell.folder).server_state() for cell in cells] == [{"met": 2}, {"met": 2}]


def test_a_cell_that_diverges_is_reported_and_not_trained_again_and_the_other_cells_finish(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
):
    (tiny / "tiny.yaml").write_text(TINY.replace("{name: ditto, lam: 1.0}", "{name: ditto, lam: 1e30}"))
    ends = []
    for _ in range(2):
        result = command("study", "tiny.yaml", "seeds=2", "--only", "dir0.1", "--quiet")
        assert result.exit_code == 1 and "To continue" not in result.stderr
        assert "Ditto · Dir(0.1) · seeds 0 and 1, diverged (" in result.stderr
        assert "2 of 4 cells are finished" in result.stderr
        assert "Diverged, and in no mean: Ditto · Dir(0.1) · seeds 0 and 1." in result.stdout
        (row,) = [line.split() for line in result.stdout.splitlines() if line.split()[:1] == ["Ditto"]]
        assert set(row[2:]) == {"diverged"} and "not finished" not in result.stdout
        ends.append([file.stat().st_mtime_ns for file in sorted(Path("runs").glob("cells/*/summary.json"))])
    assert ends[0] == ends[1] and len(ends[0]) == 4
    _, (note,) = find_runs([Path("runs/tiny")])
    assert note == "Seeds that diverged in the study tiny are not shown: Ditto · Dir(0.1)."

    def interrupted(cells, listen):
        raise KeyboardInterrupt

    monkeypatch.setattr("raypfl.cli.actions.study.run", interrupted)
    result = command("study", "tiny.yaml", "seeds=2", "--only", "dir0.1", "--quiet")
    assert "Diverged, and in no mean: Ditto · Dir(0.1) · seeds 0 and 1." in result.stdout


def test_a_cell_whose_method_fails_must_be_mended_before_the_study_is_continued(tiny: Path):
    (tiny / "tiny.yaml").write_text(TINY.replace("FedAvg: fedavg", f"FedAvg: {__name__}:FailsAtStart"))
    result = command("study", "tiny.yaml", "seeds=1", "--only", "Dir(0.1)", "--quiet")
    assert result.exit_code == 1 and "KeyError: 'theta'" in result.stderr
    advice = "1 of 2 cells are finished. Fix what failed; then, to continue: raypfl study tiny.yaml seeds=1 --only"
    assert advice in result.stderr


def test_ctrl_c_exits_with_130_shows_the_table_so_far_and_the_command_to_continue(monkeypatch: pytest.MonkeyPatch):
    watch = Watch(cell=0, round=1)

    def interrupted(runs, listeners):
        if "ditto" in runs[0].folder.name:
            listeners = [[*listeners[0], lambda event: watch(0, event)]]
        return carry_out(runs, listeners)

    monkeypatch.setattr(processes, "carry_out", interrupted)
    result = command("study", "tiny.yaml", "seeds=1", "training.lr=0.05", "--only", "Dir(0.1)", "--quiet")

    assert result.exit_code == 130
    advice = "1 of 2 cells are finished. To continue: raypfl study tiny.yaml seeds=1 training.lr=0.05 --only 'Dir(0.1)'"
    assert advice in result.stderr
    assert "…" in result.stdout and "training.lr is 0.05, not 0.1." in result.stdout


# What the table says


@pytest.mark.thorough
@pytest.mark.parametrize("across", [("",), ("Dir(0.1)", "Dir(1.0)")])
def test_the_whole_legend_is_in_the_picture(tmp_path: Path, across: tuple[str, ...]):
    metrics = ("global", "personal", "worst decile", "std")
    entries = []
    for column, metric in product(across, metrics):
        over = "seeds" if metric == "global" else "clients"
        entries.append(TableEntry("FedAvg", "", column, metric, (50.0,), (1.0,), 0, None, over))

    pixels = matplotlib.image.imread(draw(entries, "a study", tmp_path / "table.png"))
    for edge in (pixels[:, :8], pixels[:, -8:]):  # a legend that is cut off would reach it
        assert (edge == pixels[0, 0]).all()


def test_the_command_runs_a_study_and_leaves_its_table_in_six_files(tiny: Path):
    study = raypfl_json("study", "tiny.yaml", "--rounds", "1", "--seeds", "1", "--only", "FedAvg,Dir(0.1)")
    folder = Path(study["folder"])
    assert folder == tiny / "runs" / "tiny" and (folder / "table.png").stat().st_size > 10_000

    table = pq.ParquetFile(folder / "table.parquet").read().to_pylist()
    assert table == study["entries"]
    gm, pm = table
    assert (gm["method"], gm["across"], gm["metric"], gm["published"]) == ("FedAvg", "Dir(0.1)", "GM", 50.0)
    assert gm["gap"] == pytest.approx(gm["measured"] - 50.0) and gm["seeds"] == 1 and gm["std_over_seeds"] is None
    assert pm["measured"] is None and pm["published"] is None

    csv_rows = list(csv.DictReader((folder / "table.csv").open()))
    assert len(csv_rows) == 2
    assert float(csv_rows[0]["measured"]) == gm["measured"] and csv_rows[1]["measured"] == ""
    assert f"{gm['measured']:.2f}" in (folder / "table.tex").read_text()

    runs = pq.ParquetFile(folder / "cells.parquet").read().to_pylist()
    accuracies = [row["accuracy"] for row in runs if (row["protocol"], row["model"]) == ("global", "global")]
    assert 100 * accuracies[0] == pytest.approx(gm["measured"]) and {row["rounds"] for row in runs} == {1}

    reported, _ = find_runs([folder])
    assert {str(result.run_dir) for result in reported} == {row["run_dir"] for row in runs}
    (folder / "cells.parquet").write_bytes(b"cut off")
    reported, (note,) = find_runs([folder, reported[0].run_dir])
    assert len(reported) == 1 and str(folder) in note

    assert study["deviations"] == [
        "Only 1 of 2 methods; left out: Ditto.",
        "Only 1 of 2 groups of columns; left out: Dir(1.0).",
        "rounds is 1, not 4.",
        "1 seed, not 2.",
    ]


def entry(method: str, across: str, metric: str, *values: float, **changes) -> TableEntry:
    fields = {"within": (8.0,) * len(values), "missing": 0, "published": None, "spread_over": "seeds"} | changes
    return TableEntry(method, "Set", across, metric, values, **fields)


def test_a_studys_methods_stand_against_the_best_of_their_column_in_every_file(tiny: Path):
    study = raypfl_json("study", "tiny.yaml", "--rounds", "2", "--only", "dir1.0")
    folder = Path(study["folder"])
    by_metric: dict[str, list[dict]] = {}
    for row in study["entries"]:
        by_metric.setdefault(row["metric"], []).append(row)

    for rows in by_metric.values():
        ranked = [row for row in rows if row["rank"]]
        for row in ranked:
            assert row["low"] <= row["measured"] <= row["high"] and row["rank_low"] <= row["rank"] <= row["rank_high"]
            assert row["to_best"] == pytest.approx(row["measured"] - max(other["measured"] for other in ranked))
            assert row["to_best_low"] <= row["to_best"] <= row["to_best_high"] and 0 <= row["chance_better"] <= 1

    fedavg, ditto = by_metric["GM"]
    # Ditto's global model is FedAvg's.
    assert (fedavg["rank"], ditto["rank"], ditto["to_best"], ditto["chance_better"]) == (1, 1, 0, 0.5)
    assert not by_metric["PM"][1]["rank"], "FedAvg has no personal model, so nothing is there to compare"
    page = (folder / "table.md").read_text()
    assert "against the best" in page and "| FedAvg | rank | 1 (1 to 1) |" in page and "Wilcoxon" in page
    assert "P(better)" in (folder / "table.tex").read_text()


def test_a_global_model_with_a_part_that_is_not_trained_is_named_and_not_ranked(tiny: Path):
    file = tiny / "tiny.yaml"
    file.write_text(file.read_text().replace("  Ditto: {name: ditto, lam: 1.0}", "  Local: local\n  FedPer: fedper"))
    file.write_text(re.sub(r", methods: .*}}}", "}", file.read_text()))
    study = raypfl_json("study", "tiny.yaml", "--rounds", "1", "--only", "dir1.0", "seeds=1")
    ranks = {(row["method"], row["metric"]): row["rank"] for row in study["entries"]}
    assert ranks[("FedPer", "GM")] is None and ranks[("FedAvg", "GM")] is None, "nothing is there to compare"
    assert {ranks[("FedPer", "PM")], ranks[("Local", "PM")]} == {1, 2}
    for name in ("table.md", "table.tex"):
        page = (Path(study["folder"]) / name).read_text()
        assert "In the global model of FedPer, what clients keep has its initial values. It is not ranked." in page


def test_a_metric_may_be_of_the_best_round_by_test_or_validation_data_and_of_the_deployed_model(tiny: Path):
    changed = TINY.replace("every: 0", "every: 1, protocols: [local, val]")
    changed = changed.replace("data: digits", "data: {name: digits, val_fraction: 0.2}")
    metrics = {
        "best": {"protocol": "local", "model": "deployed", "choose": "test"},
        "chosen": {"protocol": "local", "model": "deployed", "choose": "validation"},
        "last": {"protocol": "local", "model": "deployed"},
    }
    file = tiny / "chosen.yaml"
    file.write_text(changed.partition("metrics:")[0] + yaml.safe_dump({"metrics": metrics}))
    study, _ = load(str(file))
    cells = plan(study, ["seeds=1"])[:2]
    results = {i: raypfl.run(cell.experiment, run_dir=tiny / str(i)) for i, cell in enumerate(cells)}
    entries = {(e.method, e.metric): e for e in table_entries(study, study, cells, results) if e.values}

    for i, (method, model) in enumerate((("FedAvg", "global"), ("Ditto", "personal"))):
        accuracy = {}
        for round in range(1, 5):
            for row in results[i].summary(round):
                if (row["protocol"], row["model"]) == ("local", model):
                    accuracy[round] = 100 * row["accuracy"]
        assert entries[method, "best"].mean == pytest.approx(max(accuracy.values()))
        assert entries[method, "chosen"].mean == pytest.approx(accuracy[results[i].best_round])
        assert entries[method, "last"].mean == pytest.approx(accuracy[4])

    with pytest.raises(ConfigError, match="round that validation data choose; add val"):
        plan(study, ["evaluation.protocols=[local]"])
    with pytest.raises(ConfigError, match="last has no effect with choose: test"):
        file.write_text(file.read_text().replace("choose: test", "choose: test\n    last: 2"))
        load(str(file))


def test_a_new_study_is_written_checked_and_never_over_another_file(tiny: Path):
    words = ["methods=[fedavg, {name: ditto, lam: 2.0}]", "data=digits", "partition.clients=5", "rounds=3"]
    assert "mine.yaml has 12 runs" in command("study", "new", "mine.yaml", *words).stdout
    study, _ = load("mine.yaml")
    assert list(study.methods) == ["fedavg", "ditto lam=2.0"] and study.seeds == 6
    assert {cell.experiment.partition.clients for cell in plan(study)} == {5}

    # The columns that it offers can be uncommented.
    text = Path("mine.yaml").read_text()
    Path("columns.yaml").write_text(text.replace("# across:", "across:").replace("#   ", "  "))
    assert list(load("columns.yaml")[0].across) == ["IID", "Dir(0.1)"]

    own_method = f"{__name__}:FailsAtStart"
    scaffold(Path("own.yaml"), [f"methods=[fedavg, '{own_method}']"])
    assert load("own.yaml")[0].methods == {"fedavg": "fedavg", "FailsAtStart": own_method}

    with pytest.raises(ConfigError, match=r"mine\.yaml exists"):
        scaffold(Path("mine.yaml"), words)
    with pytest.raises(ConfigError, match="methods has fedavg twice, and each is a row"):
        scaffold(Path("other.yaml"), ["methods=[fedavg,ditto,fedavg]"])
    with pytest.raises(ConfigError, match="needs its methods"):
        scaffold(Path("other.yaml"), ["rounds=3"])
    with pytest.raises(ConfigError, match="needs the spaces that all methods share"):
        scaffold(Path("other.yaml"), ["methods=[fedavg]", "search.trials=3"])
    with pytest.raises(ConfigError, match="did you mean 'partition'"):
        scaffold(Path("other.yaml"), ["methods=[fedavg]", "partitoin.clients=5"])
    assert not Path("other.yaml").exists()


def test_the_table_has_measured_published_and_gap_as_the_paper_lays_it_out():
    entries = [
        entry("A", "x", "GM", 60.0, 62.0, published=PublishedNumber(66.4, 3.13)),
        entry("A", "x", "PM", 70.0, 70.0, missing=1, published=PublishedNumber(70.0)),
        entry("A", "y", "GM", missing=2, published=PublishedNumber(50.0, 1.0)),
        entry("A", "y", "PM"),
        *(entry("B", across, metric, 10.0) for across, metric in product("xy", ("GM", "PM"))),
    ]

    (block,) = blocks(entries)
    assert block.title == "Set" and block.headings == [("x", "GM"), ("x", "PM"), ("y", "GM"), ("y", "PM")]
    assert block.lines == [
        ["A", "here", "61.00±1.41", "70.00±0.00…", "…", "–"],
        ["", "published", "66.40±3.13", "70.00", "50.00±1.00", "–"],
        ["", "gap", "-5.40", "+0.00", "–", "–"],
        ["B", "here", "10.00", "10.00", "10.00", "10.00"],
    ]

    study, _ = load("digits-personal")
    second_block = [replace(cell, down="Other_set") for cell in entries]
    searched = ["Ditto, trial 1, has no score: ValueError\n  in line 1"]
    latex = as_latex(arrange(study, None, [*entries, *second_block], ["Half the data."], searched))
    for line in (
        r"method &  & x GM & x PM & y GM & y PM \\",
        r"\multicolumn{6}{l}{\emph{Other\_set}} \\",
        r"A & here & 61.00 $\pm$ 1.41 & 70.00 $\pm$ 0.00\dots{} & \dots{} & -- \\",
        r" & gap & $-5.40$ & $+0.00$ & -- & -- \\",
        "% Search: Ditto, trial 1, has no score: ValueError\n%   in line 1\n",
        "% Deviations: Half the data.",
    ):
        assert line in latex
    assert latex.count(r"\begin{tabular}{llrrrr}") == 1


def test_a_table_of_measured_numbers_alone_has_a_line_for_each_method_that_does_not_say_here():
    entries = [entry(method, "x", "GM", 61.0, 63.0) for method in ("A", "B")]
    study, _ = load("digits-personal")
    table = arrange(study, None, entries, [])
    console = Console(file=io.StringIO(), width=60)
    show(console, table)

    texts = [markdown(table), as_latex(table), console.file.getvalue()]
    assert "| A | 62.00±1.41 |" in texts[0] and r"A & 62.00 $\pm$ 1.41 \\" in texts[1]
    assert ["A", "62.00±1.41"] in [line.split() for line in texts[2].splitlines()]
    assert not any("here" in text for text in texts)


def test_an_infinite_loss_of_a_seed_is_in_the_table():
    (block,) = blocks([entry("A", "x", "loss", math.inf, 2.0)])
    assert block.lines == [["A", "inf±nan"]]


def test_a_spread_over_clients_is_a_result_with_a_gap_of_its_own():
    published = PublishedNumber(70.0, 5.0)
    (block,) = blocks([entry("A", "x", "PM", 70.0, 72.0, spread_over="clients", published=published)])
    assert [line[2:] for line in block.lines] == [["71.00±8.00"], ["70.00±5.00"], ["+1.00 (+3.00)"]]


def test_the_legend_says_which_columns_have_a_spread_over_clients_if_others_have_one_over_seeds():
    study, _ = load("cifar10-personal")
    over_seeds = entry("A", "x", "GM", 70.0, 72.0)
    over_clients = entry("A", "x", "PM", 70.0, 72.0, spread_over="clients")
    legends = []
    for entries in ([over_seeds], [over_clients], [over_seeds, over_clients]):
        ((_, (legend,)), *_) = notes_on(study, None, entries, [], [])
        legends.append(legend.partition("deviation over ")[2])
    clients = "the clients, averaged over the seeds."
    assert legends == ["the seeds.", clients, f"the seeds or, in PM, over {clients}"]


def test_deviations_say_where_they_hold_and_are_on_the_page():
    study, _ = load("fednh-table1")
    choice = select(study, ("fedavg", "fednh", "cifar10", "tinyimagenet"))
    changes = ["training.precision=bf16", "method.rho=0.5", "training.weight_decay=1e-5", "seeds=2"]

    lines = deviations(study, choice, plan(choice, changes), plan(study), {})

    assert lines == [
        "Only 2 of 10 methods; left out: Local; FedPer; Ditto; FedRep; FedProto; CReFF; FedBABU; FedROD.",
        "Only 2 of 3 blocks; left out: CIFAR-100.",
        "training.precision is bf16, not fp32.",
        "method.rho is 0.5, not 0.9 (FedNH).",
        "training.weight_decay is 1e-05, not 0.001 (TinyImageNet).",
        "2 seeds, not 3.",
        "16 of 16 cells are not finished, so the means do not include them.",
    ]
    page = markdown(arrange(study, study.published, [entry("A", "x", "GM", 1.0)], lines))
    assert "**Deviations from the published protocol**" in page and all(f"- {line}" in page for line in lines)


def test_where_a_pool_or_a_file_of_weights_is_is_no_deviation_and_a_pool_that_is_left_out_is_one():
    reference, _ = load("perada-table1")
    study, _ = load("perada-small")
    file = "/somewhere/body.safetensors"
    changes = [f"model.weights={file}", "datasets.cifar100={name: parquet, root: /data/cifar100, label: fine_label}"]

    lines = deviations(reference, study, plan(study, changes), plan(reference), {})

    assert "model.weights is body.safetensors, not IMAGENET1K_V1." in lines
    assert [line for line in lines if "pools" in line] == [
        "data.pools.auxiliary.name is parquet, not cifar100.",
        "data.pools.unused is 0.9, not the default.",
        "data.pools.validation is left out.",
        "data.pools.ood/cifar10_1 is left out.",
        "data.pools.ood/cifar10_c is left out.",
    ]


def test_the_choices_of_a_study_show_the_values_of_its_cells(tiny: Path):
    choices = "choices: ['lambda is {Ditto method.lam}, lr {FedAvg training.lr}.']\n"
    (tiny / "tiny.yaml").write_text(TINY + choices)
    study, _ = load("tiny.yaml")
    assert choices_with_values(study, plan(study)) == ["lambda is 1.0 or 2.0, lr 0.1."]
    assert choices_with_values(study, plan(select(study, ["Dir(0.1)"]))) == ["lambda is 1.0, lr 0.1."]
    # The sentence also names a value of FedAvg, which is not run.
    assert choices_with_values(study, plan(select(study, ["Ditto"]), ["method.lam=3"])) == []
    assert ("Choices", study.choices) in notes_on(study, None, [], [], []), "also without published numbers"

    (tiny / "tiny.yaml").write_text(TINY + choices.replace("method.lam", "method.lamb"))
    study, _ = load("tiny.yaml")
    with pytest.raises(ConfigError, match=r"choices name the setting method.lamb of Ditto, .* 'method.lam'"):
        choices_with_values(study, plan(study))

    (tiny / "tiny.yaml").write_text(TINY + choices.replace("Ditto", "Dito"))
    with pytest.raises(ConfigError, match=r"has no method 'Dito', which its choices name; did you mean 'Ditto'\?"):
        load("tiny.yaml")
    (tiny / "tiny.yaml").write_text(TINY + choices)
    extending = "extends: tiny.yaml\nmethods: {Ditto: null}\nacross: {Dir(1.0): null}\n"
    (tiny / "smaller.yaml").write_text(extending)
    assert load("smaller.yaml")[0].methods.keys() == {"FedAvg"}, "though inherited choices name Ditto"
    (tiny / "smaller.yaml").write_text(extending + choices)
    with pytest.raises(ConfigError, match="has no method 'Ditto', which its choices name"):
        load("smaller.yaml")


def test_another_format_of_the_data_is_a_deviation_and_another_folder_is_none():
    study, _ = load("fednh-table1")
    choice = select(study, ("cifar10", "fednh", "dir0.3"))
    cells = plan(choice, ["data.name=parquet", "data.root=/somewhere", "engine.threads=2", "data.label=fine"])
    result = SimpleNamespace(round=1, experiment=raypfl.Experiment(rounds=1))

    lines = deviations(study, choice, cells, plan(study), dict.fromkeys(range(3), result))

    assert lines[3:] == ["data.name is parquet, not cifar10."]


def test_the_studies_of_the_guide_can_be_planned(tiny: Path):
    searching, own, extending = yaml_blocks("docs/studies.md", "yaml")
    (tiny / "searching.yaml").write_text(searching)
    (tiny / "own.yaml").write_text(own)
    (tiny / "extending.yaml").write_text(extending)

    study, _ = load("own.yaml")
    assert len(plan(study)) == 12
    assert study.quoted("Ditto", "digits", "Dir(0.1)", "PM(L)") == (95.0, None)

    study, _ = load("searching.yaml")
    assert len(planned_trials(study, plan(study))) == 6 * len(study.methods) * len(study.across)

    study, reference = load("extending.yaml")
    assert reference.name == "fednh-table1" and len(plan(study)) == 180


# The studies that come with the package


@pytest.mark.parametrize("name", with_quick(STUDIES, {"digits-personal", "fednh-table1", "pfllib-small"}))
def test_every_study_has_a_summary_and_distinct_valid_cells(name):
    study, reference = load(name)
    cells = plan(study)
    assert reference is study or (reference.name in STUDIES and not study.published)
    assert STUDIES.summary(name).endswith(".") and len({cell.folder for cell in cells}) == len(cells)
    assert len(cells) == study.seeds * len(study.methods) * max(1, len(study.down)) * max(1, len(study.across))
    if study.search:
        short, _ = with_search(study, ["search.trials=1"])
        assert len(planned_trials(short, cells)) == len(cells) // study.seeds
    choices = choices_with_values(study, cells)
    assert "{" not in "".join(choices) and set(choices) >= {choice for choice in study.choices if "{" not in choice}


def test_the_guide_says_how_many_runs_each_study_has():
    table = (ROOT / "docs/studies.md").read_text().partition("| study | number of runs |\n")[2].partition("\n\n")[0]
    counts = {}
    for studies, numbers in re.findall(r"^\| (.*) \| ([\d, ]+) \|$", table, re.MULTILINE):
        # `2` to `4` is `2`, `3`, `4`; and each of these is a name that begins as the first name in the row.
        for first, last in re.findall(r"`(\d)` to `(\d)`", studies):
            between = " ".join(f"`{number}`" for number in range(int(first), int(last) + 1))
            studies = studies.replace(f"`{first}` to `{last}`", between)
        names = re.findall(r"`([\w-]+)`", studies)
        beginning = re.sub(r"\d+[a-z]?$", "", names[0])
        for name, number in zip(names, numbers.split(", "), strict=True):
            counts[name if "-" in name else beginning + name] = int(number)

    def size(study: Study) -> int:
        return len(study.methods) * max(1, len(study.down)) * max(1, len(study.across))

    described = {name: load(name)[0] for name in STUDIES}
    assert counts == {name: study.seeds * size(study) for name, study in described.items()}
    searched = [size(study) * study.search.trials * study.search.seeds for study in described.values() if study.search]
    assert all(f"of {count:,} more short runs" in table for count in searched)


def test_settings_that_a_study_lacks_may_be_given_on_the_command_line_and_others_are_deviations(tiny: Path):
    people = "age,city,bought\n" + "".join(f"{20 + k % 40},town{k % 4},{k % 2}\n" for k in range(80))
    (tiny / "people").mkdir()
    (tiny / "people" / "people.csv").write_text(people)
    (tiny / "mine.yaml").write_text(TINY.partition("published:")[0].replace("data: digits", "data: table"))

    words = ["mine.yaml", "data.root=people", "data.target=bought", "rounds=1", "seeds=1", "--only", "FedAvg,dir1.0"]
    study = raypfl_json("study", *words)
    assert len(study["entries"]) == 2
    assert [line for line in study["deviations"] if "data" in line or "rounds" in line] == ["rounds is 1, not 4."]
