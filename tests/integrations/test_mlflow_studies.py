"""A study in MLflow: one parent with its table, and below it a run for each cell, however often it was cut off."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from raypfl.cli.app import app
from raypfl.integrations.tracking.listener import MLflowListener
from raypfl.studies import running
from raypfl.studies.worker import run_cell
from tests.studies.test_studies import TINY, Watch
from tests.support.tracking import client_of, events, runs_of, with_database

PARENT = "mlflow.parentRunId"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, mlflow_database: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    tracked = TINY.replace("{mlflow: false}", "{system_metrics: false, models_mb: 0}")
    (tmp_path / "tiny.yaml").write_text(tracked)
    return with_database(tmp_path / "runs", mlflow_database)


def study(*words: str) -> Any:
    return CliRunner().invoke(app, ["study", "tiny.yaml", "seeds=1", "rounds=2", "--quiet", *words])


def family(folder: Path) -> tuple[Any, list[Any]]:
    """The parent, and its children."""
    (parent,) = runs_of(folder, "tags.kind = 'comparison'")
    children = runs_of(folder, "tags.kind = 'run'")
    assert {run.data.tags.get(PARENT) for run in children} == {parent.info.run_id}
    return parent, children


def test_a_study_that_is_cut_off_and_made_larger_stays_below_one_parent(folder: Path, monkeypatch):
    def interrupted(experiment, cell, listeners):
        watch = Watch(cell=0, round=1)
        seen = [*listeners, lambda event: watch(0, event)] if "ditto" in cell.name else listeners
        return run_cell(experiment, cell, seen)

    with monkeypatch.context() as patched:
        patched.setattr(running, "run_cell", interrupted)
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
    kept = {file.path for file in client_of(folder).list_artifacts(parent.info.run_id)}
    assert kept == {"table.md", "table.csv", "table.tex", "table.parquet", "cells.parquet", "table.png"}


@pytest.mark.usefixtures("ray_cluster")
def test_cells_that_go_at_the_same_time_on_ray_are_below_one_parent(folder: Path):
    result = study("engine.backend=ray", "--only", "FedAvg")
    assert result.exit_code == 0, result.output
    parent, children = family(folder)
    assert parent.info.status == "FINISHED" and len(children) == 2


def test_a_parent_that_was_deleted_is_made_anew(folder: Path):
    for name in ("a", "b"):
        with MLflowListener("kept", warn=pytest.fail, kept_in=folder / "kept") as tracked:
            for event in events(folder, name=name):
                tracked(event)
            tracked.describe("line\n" * 2000)
        runs = runs_of(folder, "tags.kind = 'comparison'")
        assert len(runs) == 1 and runs[0].data.tags["mlflow.note.content"].endswith("line\n…")
        client_of(folder).delete_run(runs[0].info.run_id)
