"""The process of a command ends with its status, after its threads and exit handlers, and with all it has printed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.support.processes import exit_code
from tests.support.tracking import runs_of, with_database

COMMAND = """
import atexit, sys, threading, time

printed = []

def work():
    time.sleep(0.2)
    printed.append("thread")

atexit.register(lambda: print(*printed, "handler", sep="\\n"))
threading.Thread(target=work).start()
sys.argv = ["raypfl", *sys.argv[1:]]

from raypfl.cli.process import command
command()
"""


def ended(*words: str) -> tuple[int, list[str]]:
    process = subprocess.run([sys.executable, "-c", COMMAND, *words], stdout=subprocess.PIPE, text=True, check=False)
    return process.returncode, process.stdout.splitlines()


def test_a_command_ends_after_its_threads_and_exit_handlers_with_its_status():
    status, lines = ended("--version")
    assert status == 0
    assert lines[0].startswith("raypfl ")
    assert lines[1:] == ["thread", "handler"]

    status, lines = ended("--no-such-option")
    assert status == 2
    assert lines == ["thread", "handler"]


def command_into(output: Path | None, errors: Path, words: Sequence[str]) -> None:
    """Carry out a command as this process; it prints into a file or, without one, a pipe whose reader has gone."""
    from raypfl.cli.process import command

    if output is None:
        reader, writer = os.pipe()
        os.close(reader)
    else:
        writer = os.open(output, os.O_WRONLY)
    os.dup2(writer, 1)
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    sys.argv = ["raypfl", *words]
    command()


def test_a_comparison_whose_reader_goes_is_finished_and_one_that_cannot_be_printed_says_how_to_print_it(
    tmp_path: Path, mlflow_database: Path
):
    folder = with_database(tmp_path / "runs", mlflow_database)
    errors = tmp_path / "errors"
    settings = ["rounds=1", "engine.backend=inline", f"output={folder}", "--quiet"]
    tracked = ["run", *settings, "tracking.models_mb=0", "--run-dir", str(folder / "both")]
    untracked = ["run", *settings, "tracking.mlflow=false", "--run-dir", str(folder / "untracked")]

    for words in [], ["--json"]:
        status = exit_code(command_into, None, errors, [*tracked, *words])
        assert (status, errors.read_text()) == (0, "")
        (parent,) = runs_of(folder, "tags.kind = 'comparison'")
        assert parent.info.status == "FINISHED"

    full = Path("/dev/full")
    if full.exists():  # on Linux only
        for words in [], ["--json"]:
            assert exit_code(command_into, full, errors, [*untracked, *words]) == 1
            message = errors.read_text()
            assert message.startswith("The result cannot be printed: [Errno 28] No space left on device. ")
            assert len(message.splitlines()) == 1
