"""The process of a command ends with its status, after its threads and exit handlers, and with all it has printed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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


def test_a_comparison_whose_reader_goes_is_finished_and_one_that_cannot_be_printed_says_how_to_print_it(
    tmp_path: Path, mlflow_database: Path
):
    folder = with_database(tmp_path / "runs", mlflow_database)
    settings = ["rounds=1", "engine.backend=inline", "tracking.models_mb=0", f"output={folder}"]
    command = [sys.executable, "-m", "raypfl", "run", *settings, "--run-dir", str(folder / "both"), "--quiet"]

    def ended_into(output: int, *words: str) -> tuple[int, str]:
        process = subprocess.run([*command, *words], stdout=output, stderr=subprocess.PIPE, text=True, check=False)
        return process.returncode, process.stderr

    reader, unread = os.pipe()
    os.close(reader)
    with open(unread, "wb"):
        for words in [], ["--json"]:
            assert ended_into(unread, *words) == (0, "")
            (parent,) = runs_of(folder, "tags.kind = 'comparison'")
            assert parent.info.status == "FINISHED"

    if Path("/dev/full").exists():  # on Linux only
        with open("/dev/full", "wb") as full:
            for words in [], ["--json"]:
                status, message = ended_into(full.fileno(), *words)
                assert status == 1
                assert message.startswith("The result cannot be printed: [Errno 28] No space left on device. ")
                assert len(message.splitlines()) == 1
