"""A Ray cluster of several nodes on one machine: each has its own processes, address, /tmp and /dev/shm.

A node is a set of Linux namespaces whose first process waits for the end of its standard input. So a node, with all
that runs in it, ends when its pipe closes, also if the tests are killed; nobody calls `ray stop`. A bridge joins all
nodes. It is in a set of namespaces of its own, `outside`, where no Ray runs: the user's laptop.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
NETWORK = "10.77.0"
PORT = 6379
HEALTH_CHECKS = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "4000",
    "RAY_health_check_failure_threshold": "4",
}
"""Quicker than Ray's own, and slow enough for a busy machine."""


class Namespaces:
    """A set of namespaces: processes, mounts and network of their own.

    Parameters
    ----------
    visible : folders that are seen in it, although they are in /tmp.
    """

    def __init__(self, visible: Sequence[Path]):
        inside = [path for path in map(str, visible) if path.startswith("/tmp/")]
        script = (
            "set -e; ip link set lo up; mount -t tmpfs tmpfs /dev/shm; mount -t tmpfs -o mode=1777 tmpfs /mnt; "
            'for path in "$@"; do mkdir -p "/mnt/${path#/tmp/}"; mount --bind "$path" "/mnt/${path#/tmp/}"; done; '
            "mount --move /mnt /tmp; echo ready; exec cat"
        )
        command = ["unshare", "-pfmn", "--mount-proc", "--kill-child", "sh", "-c", script, "sh", *inside]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "ready\n":
            raise PermissionError("Namespaces cannot be made here.")
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        self.init = int(children.read_text().split()[0])

    def start(self, command: Sequence[str], folder: Path = ROOT, **options: Any) -> subprocess.Popen[str]:
        """Start a command inside, in a folder."""
        enter = ["nsenter", "--target", str(self.init), "--pid", "--mount", "--net"]
        there = ["sh", "-c", 'cd "$0" && exec "$@"', str(folder)]
        return subprocess.Popen([*enter, *there, *command], text=True, **options)

    def run(self, command: Sequence[str], timeout: float = 300, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a command inside to its end."""
        process = self.start(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)
        try:
            told, complained = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        return subprocess.CompletedProcess(command, process.returncode, told, complained)

    def network(self, command: str) -> str:
        """What `ip` says in this network, where it knows processes by their ids outside."""
        done = ["nsenter", "--target", str(self.init), "--net", "ip", *command.split()]
        return subprocess.run(done, check=True, capture_output=True, text=True).stdout

    def disk(self, path: Path) -> Path:
        """A path of this machine, as seen from outside."""
        return Path(f"/proc/{self.init}/root{path}")

    def processes(self) -> list[tuple[int, str]]:
        """Id, as seen from here, and command of each process inside."""
        mine, found = os.readlink(f"/proc/{self.init}/ns/pid"), []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if os.readlink(folder / "ns/pid") == mine and (command := (folder / "cmdline").read_text()):
                    found.append((int(folder.name), command.replace("\0", " ").strip()))
        return found

    def signal(self, name: str, number: int) -> int:
        """Send a signal to all processes whose command has `name` in it; returns how many there are."""
        chosen = [process for process, command in self.processes() if name in command]
        for process in chosen:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, number)
        return len(chosen)

    def end(self) -> None:
        """End all that runs inside, at once."""
        self._process.kill()
        self._process.communicate()


class Outside(Namespaces):
    """A machine whose bridge joins all nodes."""

    def __init__(self, visible: Sequence[Path]):
        super().__init__(visible)
        # With an address of its own, which would otherwise be one of its nodes', and change when that dies.
        for command in (
            "link add bridge address 02:00:00:00:00:fe type bridge",
            f"addr add {NETWORK}.254/24 dev bridge",
            "link set bridge up",
        ):
            self.network(command)


class Node(Namespaces):
    """A machine with an address.

    Attributes
    ----------
    address : of the machine.
    """

    def __init__(self, outside: Outside, number: int, visible: Sequence[Path]):
        super().__init__(visible)
        self.address, self._outside, self._link = f"{NETWORK}.{number}", outside, f"node{number}"
        outside.network(f"link add {self._link} type veth peer name eth0 netns {self.init}")
        outside.network(f"link set {self._link} master bridge up")
        self.network(f"addr add {self.address}/24 dev eth0")
        self.network("link set eth0 up")

    @property
    def received(self) -> int:
        """Bytes that have come over the network."""
        (link,) = json.loads(self.network("-s -j link show eth0"))
        return int(link["stats64"]["rx"]["bytes"])

    def unplug(self) -> None:
        """Cut the node's link."""
        self._outside.network(f"link set {self._link} down")

    def plug(self) -> None:
        """Mend the node's link."""
        self._outside.network(f"link set {self._link} up")


class Nodes:
    """A Ray cluster.

    Parameters
    ----------
    cpus : of each node, the head first. visible : folders that all nodes share. dashboard : whether the head has one,
        which jobs need.

    Attributes
    ----------
    head, workers : its nodes. outside : a machine that is none of them. address : of the cluster.
    """

    def __init__(self, cpus: Sequence[int], visible: Sequence[Path] = (), dashboard: bool = False):
        self._visible = [ROOT, *visible]
        self._dashboard = dashboard
        self._running = contextlib.ExitStack()
        self.environment = (
            os.environ
            | HEALTH_CHECKS
            | {
                "RAY_AUTH_MODE": "token",
                "RAY_AUTH_TOKEN": secrets.token_hex(32),
                "RAYPFL_CACHE": "/tmp/cache",
                "PYTHONPATH": str(ROOT),
                "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            }
        )
        self.environment.pop("RAY_ADDRESS", None)
        self.address = f"{NETWORK}.1:{PORT}"
        try:
            self.outside = self._new(Outside(self._visible))
            self._nodes = [self._new(Node(self.outside, number, self._visible)) for number in range(1, len(cpus) + 1)]
            for node, count in zip(self._nodes, cpus, strict=True):
                self._join(node, count)
        except BaseException:
            self.end()
            raise

    @property
    def head(self) -> Node:
        return self._nodes[0]

    @property
    def workers(self) -> list[Node]:
        return self._nodes[1:]

    def add(self, cpus: int) -> Node:
        """Another node joins."""
        node = self._new(Node(self.outside, len(self._nodes) + 1, self._visible))
        self._nodes.append(node)
        self._join(node, cpus)
        return node

    def python(self, where: Namespaces, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run Python on a machine, with the cluster's token."""
        return where.run([sys.executable, *arguments], env=self.environment, **options)

    def end(self) -> None:
        """End all nodes at once."""
        self._running.close()

    def _new(self, machine: Any) -> Any:
        self._running.callback(machine.end)
        return machine

    def _join(self, node: Node, cpus: int) -> None:
        head = node is self.head
        role = ["--head", f"--port={PORT}"] if head else [f"--address={self.address}"]
        if head:
            role += [f"--include-dashboard={str(self._dashboard).lower()}", "--dashboard-host=0.0.0.0"]
        own = [f"--node-ip-address={node.address}", f"--num-cpus={cpus}", "--object-store-memory=200000000"]
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", *role, *own, "--block"]
        started = node.start(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=self.environment)
        self._running.callback(started.kill)
        assert started.stdout is not None
        told = []
        for line in started.stdout:
            told.append(line)
            if "Ray runtime started" in line:
                return
        raise RuntimeError("".join(told))


def allowed() -> bool:
    """Whether this process may make namespaces."""
    try:
        machine = Namespaces([])
        machine.network("link add bridge type bridge")
    except (OSError, subprocess.CalledProcessError):
        return False
    machine.end()
    return True
