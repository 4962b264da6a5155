"""Runs that are cut off as they begin, and what is said when one is asked to stop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from rich.console import Console

import raypfl
from raypfl.common.errors import ConfigError
from raypfl.common.stopping import StopRequest, handlers_restored, interrupting, message_if_killed, undisturbed
from raypfl.engine.events import Progress, RunFinished, Warned
from raypfl.results.display.console import RunLine, View
from tests.support.runs import experiment


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


class Interrupted(raypfl.methods.FedAvg):
    """Is asked to stop in its round, and waits there until the run has said so."""

    heard = threading.Event()

    def round(self, server, cohort):
        os.kill(os.getpid(), signal.SIGINT)
        assert self.heard.wait(timeout=30)


def test_a_run_says_that_it_is_stopping_before_it_has_stopped(tmp_path: Path):
    said = []

    def hear(event):
        said.append(event)
        if isinstance(event, Progress) and event.text.startswith("Stopping"):
            Interrupted.heard.set()

    assert raypfl.run(experiment(tmp_path).replace(method=Interrupted()), listeners=[hear]).status == "stopped"
    assert isinstance(said[-1], RunFinished)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_run_that_is_stopped_before_its_first_round_ends_at_once_and_is_begun_by_resume(tmp_path: Path, number: int):
    def impatient(event):
        os.kill(os.getpid(), number)

    with pytest.raises(KeyboardInterrupt):
        raypfl.run(experiment(tmp_path, rounds=1), listeners=[impatient])
    (folder,) = (tmp_path / "runs").iterdir()
    assert raypfl.resume(folder).status == "finished"


def test_signals_wait_until_what_must_not_be_cut_off_is_done():
    done = False
    with pytest.raises(KeyboardInterrupt), interrupting(), undisturbed():
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
        done = True
    assert done


def test_what_a_library_does_to_handlers_is_undone():
    before = signal.getsignal(signal.SIGTERM)
    for kept in (handlers_restored, undisturbed):
        with kept():
            signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(15))
        assert signal.getsignal(signal.SIGTERM) is before


def test_what_ends_a_process_without_a_word_interrupts_it_unless_the_person_wants_it_ignored():
    with pytest.raises(KeyboardInterrupt), interrupting():
        os.kill(os.getpid(), signal.SIGTERM)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with interrupting(), StopRequest().listening() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
        assert not stop.received
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_command_in_the_background_of_a_script_which_ignores_ctrl_c_is_ended_by_it_too():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with pytest.raises(KeyboardInterrupt), interrupting():
            os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_terminal_that_is_closed_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch):
    def closed(*text, **options):
        raise OSError(5, "Input/output error")

    console = Console()
    monkeypatch.setattr(console, "print", closed)
    View(console, [RunLine("ditto", 3, "cyan")]).listener(0)(Warned("A client actor died."))


@pytest.mark.parametrize(
    ("end", "said"), [("os.kill(os.getpid(), 9)", ["To continue: raypfl resume runs/a"]), ("", [])]
)
def test_a_process_that_is_killed_is_followed_by_how_to_continue(end: str, said: list[str]):
    imports = f"import os\nfrom {message_if_killed.__module__} import message_if_killed\n"
    script = f"{imports}with message_if_killed('To continue: raypfl resume runs/a'):\n    {end or 'pass'}"
    # The pipe ends once the process that says so has ended too.
    told = subprocess.run([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True).stderr.splitlines()
    assert [line[-len(text) :] for line, text in zip(told, said, strict=True)] == said


def test_a_run_cannot_be_made_shorter_than_it_is(tmp_path: Path):
    done = raypfl.run(experiment(tmp_path, rounds=3))
    with pytest.raises(ConfigError, match=r"rounds is 2, but the run in .* has already done 3"):
        raypfl.resume(done.run_dir, overrides=["rounds=2"])
    assert raypfl.resume(done.run_dir).weights_hash == done.weights_hash  # its description is as it was
