"""The process of a command ends with its status, after its threads and exit handlers, and with all it has printed."""

from __future__ import annotations

import subprocess
import sys

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
