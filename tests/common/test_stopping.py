"""Stopping: runs interrupted at the start, signals, and the messages about them."""

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
from raypfl.common.stopping import (
    StopRequest,
    handlers_restored,
    message_if_killed,
    signals_deferred,
    signals_interrupt,
)
from raypfl.engine.events import Progress, RunFinished, Warned
from raypfl.results.display.console import View
from raypfl.results.display.run_line import RunLine
from tests.support.processes import exit_code
from tests.support.runs import experiment


def kill_this_process(event: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_run_killed_at_its_start_is_started_by_resume(tmp_path: Path):
    assert exit_code(raypfl.run, experiment(tmp_path, rounds=1), listeners=[kill_this_process]) == -signal.SIGKILL

    (folder,) = (tmp_path / "runs").iterdir()
    assert [file.name for file in folder.iterdir()] == ["experiment.yaml"]

    resumed = raypfl.resume(folder)
    assert (resumed.status, resumed.round) == ("finished", 1)


def test_a_refused_run_leaves_no_folder(tmp_path: Path):
    with pytest.raises(ConfigError, match="haed"):
        raypfl.run(experiment(tmp_path, method="{name: partial, personal: haed}"))
    assert not list((tmp_path / "runs").iterdir())


def test_a_refused_run_leaves_an_existing_folder_as_it_was(tmp_path: Path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").touch()
    for _ in range(2):
        with pytest.raises(ConfigError, match="haed"):
            raypfl.run(experiment(tmp_path, method="{name: partial, personal: haed}"), run_dir=tmp_path / "mine")
    assert [file.name for file in (tmp_path / "mine").iterdir()] == ["notes.txt"]


def test_a_request_to_stop_is_acknowledged_while_the_main_thread_is_busy():
    stop = StopRequest()
    acknowledged = threading.Event()
    with stop.acknowledged(acknowledged.set), stop.listening():
        assert not acknowledged.is_set()
        os.kill(os.getpid(), signal.SIGINT)
        assert acknowledged.wait(timeout=30)


def test_without_a_request_to_stop_nothing_is_acknowledged():
    acknowledged = []
    with StopRequest().acknowledged(lambda: acknowledged.append(True)):
        pass
    assert not acknowledged


class Interrupted(raypfl.methods.FedAvg):
    """A method that interrupts its run in a round, and waits until the run has acknowledged it."""

    heard = threading.Event()

    def round(self, server, cohort):
        os.kill(os.getpid(), signal.SIGINT)
        assert self.heard.wait(timeout=30)


def test_a_run_says_that_it_is_stopping_before_it_has_stopped(tmp_path: Path):
    events = []

    def hear(event):
        events.append(event)
        if isinstance(event, Progress) and event.text.startswith("Stopping"):
            Interrupted.heard.set()

    assert raypfl.run(experiment(tmp_path).replace(method=Interrupted()), listeners=[hear]).status == "stopped"
    assert isinstance(events[-1], RunFinished)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_run_stopped_before_its_first_round_ends_at_once_and_is_started_by_resume(tmp_path: Path, number: int):
    def impatient(event):
        os.kill(os.getpid(), number)

    with pytest.raises(KeyboardInterrupt):
        raypfl.run(experiment(tmp_path, rounds=1), listeners=[impatient])
    (folder,) = (tmp_path / "runs").iterdir()
    assert raypfl.resume(folder).status == "finished"


def test_signals_wait_until_an_undisturbed_block_is_done():
    finished = False
    with pytest.raises(KeyboardInterrupt), signals_interrupt(), signals_deferred():
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
        finished = True
    assert finished


def test_signal_handlers_that_a_library_changes_are_restored():
    before = signal.getsignal(signal.SIGTERM)
    for guard in (handlers_restored, signals_deferred):
        with guard():
            signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(15))
        assert signal.getsignal(signal.SIGTERM) is before


def test_sigterm_and_sighup_interrupt_a_process_unless_they_are_ignored():
    with pytest.raises(KeyboardInterrupt), signals_interrupt():
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with signals_interrupt(), StopRequest().listening() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
        assert not stop.received
    finally:
        signal.signal(signal.SIGHUP, before)


def test_ctrl_c_ends_a_command_in_a_scripts_background_although_it_is_ignored_there():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with pytest.raises(KeyboardInterrupt), signals_interrupt():
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
    ("end", "expected"), [("os.kill(os.getpid(), 9)", ["To continue: raypfl resume runs/a"]), ("", [])]
)
def test_a_killed_process_is_followed_by_how_to_continue(end: str, expected: list[str]):
    imports = f"import os\nfrom {message_if_killed.__module__} import message_if_killed\n"
    script = f"{imports}with message_if_killed('To continue: raypfl resume runs/a'):\n    {end or 'pass'}"
    # A second process prints the message: the pipe closes when that one ends too.
    lines = subprocess.run([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True).stderr.splitlines()
    assert [line[-len(text) :] for line, text in zip(lines, expected, strict=True)] == expected


def test_a_run_cannot_be_made_shorter_than_it_is(tmp_path: Path):
    finished = raypfl.run(experiment(tmp_path, rounds=3))
    with pytest.raises(ConfigError, match=r"rounds is 2, but the run in .* has already done 3"):
        raypfl.resume(finished.run_dir, overrides=["rounds=2"])
    assert raypfl.resume(finished.run_dir).weights_hash == finished.weights_hash  # its description is as it was
