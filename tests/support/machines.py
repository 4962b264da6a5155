"""Simulated machines on which launchers start Ray: Linux namespaces with addresses."""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests.support.nodes import NETWORK, ROOT, Node, Outside


@contextlib.contextmanager
def machines(count: int, shared: Sequence[Path]) -> Iterator[list[Node]]:
    """Start machines on one network; they share the `shared` folders and everything outside /tmp."""
    visible = [ROOT, *shared]
    with contextlib.ExitStack() as stack:
        outside = Outside(visible)
        stack.callback(outside.end)

        nodes = []
        for number in range(1, count + 1):
            node = Node(outside, number, visible)
            stack.callback(node.end)
            # Ray finds the address of its machine by the default route.
            node.network(f"route add default via {NETWORK}.254")
            nodes.append(node)
        yield nodes


def shell_output(machine: Node, line: str, env: Mapping[str, str] = os.environ, folder: Path = ROOT) -> str:
    """Run a shell line on a machine; returns what it prints. Its failure is an AssertionError with its output."""
    process = run_shell(machine, line, env, folder)
    assert process.returncode == 0, f"{line}\n{process.stdout}{process.stderr}"
    return process.stdout


def run_shell(
    machine: Node, line: str, env: Mapping[str, str] = os.environ, folder: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    """Run a shell line on a machine, in a folder; it may fail."""
    return machine.run(["bash", "-c", f"cd {shlex.quote(str(folder))} && {line}"], env=dict(env), timeout=600)


def eventually(
    machine: Node, line: str, env: Mapping[str, str] = os.environ, folder: Path = ROOT, seconds: float = 300
) -> str:
    """Run a shell line on a machine until it succeeds; returns what it prints then."""
    deadline = time.monotonic() + seconds
    process = run_shell(machine, line, env, folder)
    while process.returncode:
        assert time.monotonic() < deadline, f"{line}\n{process.stdout}{process.stderr}"
        time.sleep(1)
        process = run_shell(machine, line, env, folder)
    return process.stdout
