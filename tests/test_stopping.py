"""Runs that are cut off as they begin, and what is said when one is asked to stop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import raypfl
from raypfl.errors import ConfigError
from raypfl.federation import driver
from raypfl.federation.events import Progress, RunFinished
from raypfl.federation.stopping import StopRequest
from tests.runs import experiment


def test_a_run_killed_as_it_begins_is_begun_by_resume(tmp_path: Path):
    (tmp_path / "experiment.yaml").write_text(experiment(tmp_path, rounds=1).to_yaml())
    script = (
        "import os, signal, sys, raypfl\n"
        "raypfl.run(raypfl.Experiment.from_yaml(sys.argv[1]), listeners=[lambda event: os.kill(os.getpid(), 9)])"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "experiment.yaml")]
    assert subprocess.run(command).returncode == -signal.SIGKILL
    (folder,) = (tmp_path / "runs").iterdir()
    assert [file.name for file in folder.iterdir()] == ["experiment.yaml"]
    resumed = raypfl.resume(folder)
    assert (resumed.status, resumed.round) == ("finished", 1)


def test_a_run_that_is_refused_leaves_no_folder(tmp_path: Path):
    with pytest.raises(ConfigError, match="haed"):
        raypfl.run(experiment(tmp_path, method="{name: partial, personal: haed}"))
    assert not list((tmp_path / "runs").iterdir())


def test_a_refused_run_leaves_a_folder_of_ones_own_as_it_was(tmp_path: Path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").touch()
    for _ in range(2):
        with pytest.raises(ConfigError, match="haed"):
            raypfl.run(experiment(tmp_path, method="{name: partial, personal: haed}"), run_dir=tmp_path / "mine")
    assert [file.name for file in (tmp_path / "mine").iterdir()] == ["notes.txt"]


def test_a_request_to_stop_is_acknowledged_while_the_main_thread_is_busy():
    stop, told = StopRequest(), threading.Event()
    with stop.acknowledged(told.set), stop.listening():
        assert not told.is_set()
        os.kill(os.getpid(), signal.SIGINT)
        assert told.wait(timeout=30)


def test_nothing_is_acknowledged_where_nobody_asked():
    told = []
    with StopRequest().acknowledged(lambda: told.append(True)):
        pass
    assert not told


def test_a_run_says_that_it_is_stopping_before_it_has_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    said, heard, real = [], threading.Event(), driver._inline

    def hear(event):
        said.append(event)
        if isinstance(event, Progress) and event.text.startswith("Stopping"):
            heard.set()

    def pressed(*work):
        os.kill(os.getpid(), signal.SIGINT)
        assert heard.wait(timeout=30)
        return real(*work)

    monkeypatch.setattr(driver, "_inline", pressed)
    assert raypfl.run(experiment(tmp_path), listeners=[hear]).status == "stopped"
    assert isinstance(said[-1], RunFinished)
