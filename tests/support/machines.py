"""Machines without Ray, on this one, for launchers to start it on: namespaces with addresses."""

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
    """A context with machines on one network; `shared` folders are the same on all, and so is what is not in /tmp."""
    visible = [ROOT, *shared]
    with contextlib.ExitStack() as stack:
        outside = Outside(visible)
        stack.callback(outside.end)
        made = []
        for number in range(1, count + 1):
            made.append(Node(outside, number, visible))
            stack.callback(made[-1].end)
            made[-1].network(f"route add default via {NETWORK}.254")  # by which Ray finds its own address
        yield made


def shell(machine: Node, line: str, env: Mapping[str, str] = os.environ, folder: Path = ROOT) -> str:
    """What a line of shell prints on a machine; an AssertionError with all that it said if it fails."""
    done = tried(machine, line, env, folder)
    assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    return done.stdout


def tried(
    machine: Node, line: str, env: Mapping[str, str] = os.environ, folder: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    """A line of shell after it was run on a machine, in a folder."""
    return machine.run(["bash", "-c", f"cd {shlex.quote(str(folder))} && {line}"], env=dict(env), timeout=600)


def eventually(
    machine: Node, line: str, env: Mapping[str, str] = os.environ, folder: Path = ROOT, seconds: float = 300
) -> str:
    """What a line of shell prints on a machine once it succeeds there."""
    until = time.monotonic() + seconds
    while (last := tried(machine, line, env, folder)).returncode:
        assert time.monotonic() < until, f"{line}\n{last.stdout}{last.stderr}"
        time.sleep(1)
    return last.stdout
