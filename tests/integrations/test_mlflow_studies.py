"""A study in MLflow is one parent with the table, and a run for each cell, however often it was interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raypfl.integrations.tracking.listener import MLflowListener
from raypfl.runs.several import processes
from raypfl.runs.several.worker import carry_out
from tests.studies.test_studies import TINY, Watch
from tests.support.command import raypfl
from tests.support.tracking import client_of, events, runs_of, with_database

PARENT = "mlflow.parentRunId"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, mlflow_database: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    tracked = TINY.replace("{mlflow: false}", "{system_metrics: false, models_mb: 0}")
    (tmp_path / "tiny.yaml").write_text(tracked)
    return with_database(tmp_path / "runs", mlflow_database)


def study(*words: str) -> Any:
    return raypfl("study", "tiny.yaml", "seeds=1", "rounds=2", "--quiet", *words)


def family(folder: Path) -> tuple[Any, list[Any]]:
    """The parent run and its children."""
    (parent,) = runs_of(folder, "tags.kind = 'comparison'")
    children = runs_of(folder, "tags.kind = 'run'")
    assert {run.data.tags.get(PARENT) for run in children} == {parent.info.run_id}
    return parent, children


@pytest.mark.thorough
def test_a_study_that_is_interrupted_and_extended_stays_below_one_parent(folder: Path, monkeypatch):
    watch = Watch(cell=0, round=1)

    def interrupted(runs, listeners):
        if "ditto" in runs[0].folder.name:
            listeners = [[*listeners[0], lambda event: watch(0, event)]]
        return carry_out(runs, listeners)

    with monkeypatch.context() as patch:
        patch.setattr(processes, "carry_out", interrupted)
        assert study("--only", "dir0.1").exit_code == 130
    parent, children = family(folder)
    assert parent.info.status == "KILLED" and [run.info.status for run in children] == ["FINISHED", "KILLED"]

    assert study("--only", "dir0.1").exit_code == 0
    parent, children = family(folder)
    assert parent.info.status == "FINISHED" and [run.info.status for run in children] == ["FINISHED"] * 2

    assert study().exit_code == 0
    parent, children = family(folder)
    assert [run.data.tags["cell"] for run in children] == [
        f"{method} · Dir({alpha}) · seed 0" for alpha in ("0.1", "1.0") for method in ("FedAvg", "Ditto")
    ]
    assert "Dir(1.0)" in parent.data.tags["mlflow.note.content"]
    artifacts = {file.path for file in client_of(folder).list_artifacts(parent.info.run_id)}
    assert artifacts == {"table.md", "table.csv", "table.tex", "table.parquet", "cells.parquet", "table.png"}


@pytest.mark.thorough
@pytest.mark.usefixtures("ray_cluster")
def test_concurrent_cells_on_ray_are_below_one_parent(folder: Path):
    result = study("engine.backend=ray", "--only", "FedAvg")
    assert result.exit_code == 0, result.output
    parent, children = family(folder)
    assert parent.info.status == "FINISHED" and len(children) == 2


def test_a_deleted_parent_is_replaced_by_a_new_one(folder: Path):
    for name in ("a", "b"):
        with MLflowListener("kept", warn=pytest.fail, kept_in=folder / "kept") as listener:
            for event in events(folder, name=name):
                listener(event)
            listener.describe("line\n" * 2000)

        runs = runs_of(folder, "tags.kind = 'comparison'")
        assert len(runs) == 1 and runs[0].data.tags["mlflow.note.content"].endswith("line\n…")
        client_of(folder).delete_run(runs[0].info.run_id)


def test_a_studys_runs_are_named_by_their_place_in_the_table_and_what_was_searched(folder: Path):
    assert study("rounds=1").exit_code == 0
    _, children = family(folder)
    places = {run.info.run_name.rpartition(" · seed 0 ")[0] for run in children}
    assert places == {"FedAvg · Dir(0.1)", "Ditto · Dir(0.1)", "FedAvg · Dir(1.0)", "Ditto · Dir(1.0)"}
    assert all(run.info.run_name.endswith(" %") for run in children)


def test_trials_of_a_study_are_named_by_their_number_and_settings(folder: Path):
    Path("searched.yaml").write_text(
        "extends: tiny.yaml\n"
        "experiment: {data: {name: digits, val_fraction: 0.2}, evaluation: {protocols: [local, global, val]}}\n"
        "search: {trials: 2, shared: {training.lr: {choice: [0.5, 0.125]}}}\n"
    )
    words = ("study", "searched.yaml", "seeds=1", "rounds=1", "--quiet", "--only", "FedAvg,Dir(0.1)")
    result = raypfl(*words)
    assert result.exit_code == 0, result.output
    _, children = family(folder)
    names = sorted(run.info.run_name for run in children)
    assert len(names) == 3
    assert [name.rpartition(" · seed 0 ")[0] for name in names] == [
        "FedAvg · Dir(0.1)",
        "FedAvg · Dir(0.1) · trial 1",
        "FedAvg · Dir(0.1) · trial 2",
    ]
    assert {name.rpartition(" ")[2] for name in names[1:]} == {"training.lr=0.5", "training.lr=0.125"}
