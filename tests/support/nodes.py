"""A Ray cluster of several nodes on one machine: each node has its own processes, address, /tmp and /dev/shm.

A node is a set of Linux namespaces whose first process waits for the end of its standard input. When its pipe closes,
the node ends with all that runs in it, even if the tests are killed; nobody calls `ray stop`. A bridge joins all
nodes. It has namespaces of its own, `outside`, where no Ray runs: they stand for the user's laptop.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from raypfl.storage.checkpoints import last_round

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
    """A set of namespaces with its own processes, mounts and network.

    Parameters
    ----------
    visible : folders in /tmp that are visible inside, where /tmp is otherwise empty.
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
        change_folder = ["sh", "-c", 'cd "$0" && exec "$@"', str(folder)]
        return subprocess.Popen([*enter, *change_folder, *command], text=True, **options)

    def run(self, command: Sequence[str], timeout: float = 300, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a command inside to its end."""
        process = self.start(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)
        try:
            output, errors = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        return subprocess.CompletedProcess(command, process.returncode, output, errors)

    def network(self, command: str) -> str:
        """Run `ip` in this network, where it knows processes by their ids outside; returns what it prints."""
        line = ["nsenter", "--target", str(self.init), "--net", "ip", *command.split()]
        return subprocess.run(line, check=True, capture_output=True, text=True).stdout

    def disk(self, path: Path) -> Path:
        """Return the path outside of a path inside."""
        return Path(f"/proc/{self.init}/root{path}")

    def processes(self) -> list[tuple[int, str]]:
        """Return the id outside and the command of each process inside."""
        namespace = os.readlink(f"/proc/{self.init}/ns/pid")
        processes = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if os.readlink(folder / "ns/pid") != namespace:
                    continue
                command = (folder / "cmdline").read_text()
                if command:
                    processes.append((int(folder.name), command.replace("\0", " ").strip()))
        return processes

    def signal(self, name: str, number: int) -> int:
        """Send a signal to all processes whose command contains `name`; returns how many there are."""
        targets = [process for process, command in self.processes() if name in command]
        for process in targets:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, number)
        return len(targets)

    def end(self) -> None:
        """Kill all that runs inside, at once."""
        self._process.kill()
        self._process.communicate()


class Outside(Namespaces):
    """A machine whose bridge joins all nodes."""

    def __init__(self, visible: Sequence[Path]):
        super().__init__(visible)
        # A bridge without an address of its own takes that of one of its nodes, and changes it when that node dies.
        for command in (
            "link add bridge address 02:00:00:00:00:fe type bridge",
            f"addr add {NETWORK}.254/24 dev bridge",
            "link set bridge up",
        ):
            self.network(command)


class Node(Namespaces):
    """A machine on the network.

    Attributes
    ----------
    address : the machine's IP address.
    """

    def __init__(self, outside: Outside, number: int, visible: Sequence[Path]):
        super().__init__(visible)
        self.address = f"{NETWORK}.{number}"
        self._outside = outside
        self._link = f"node{number}"

        outside.network(f"link add {self._link} type veth peer name eth0 netns {self.init}")
        outside.network(f"link set {self._link} master bridge up")
        self.network(f"addr add {self.address}/24 dev eth0")
        self.network("link set eth0 up")

    @property
    def received(self) -> int:
        """Bytes received over the network."""
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
    cpus : CPUs of each node, the head first.
    visible : folders that all nodes share.
    dashboard : whether the head has a dashboard, which jobs need.

    Attributes
    ----------
    head : the head node.
    workers : the other nodes.
    outside : a machine that is no node of the cluster.
    address : the cluster's address.
    """

    def __init__(self, cpus: Sequence[int], visible: Sequence[Path] = (), dashboard: bool = False):
        self._visible = [ROOT, *visible]
        self._dashboard = dashboard
        self._running = contextlib.ExitStack()

        settings = {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAYPFL_CACHE": "/tmp/cache",
            "PYTHONPATH": str(ROOT),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }
        self.environment = os.environ | HEALTH_CHECKS | settings
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
        """Add a node to the cluster."""
        node = self._new(Node(self.outside, len(self._nodes) + 1, self._visible))
        self._nodes.append(node)
        self._join(node, cpus)
        return node

    def python(self, machine: Namespaces, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run Python on a machine, with the cluster's token."""
        return machine.run([sys.executable, *arguments], env=self.environment, **options)

    def end(self) -> None:
        """Kill all nodes at once."""
        self._running.close()

    def _new(self, machine: Any) -> Any:
        self._running.callback(machine.end)
        return machine

    def _join(self, node: Node, cpus: int) -> None:
        if node is self.head:
            dashboard = str(self._dashboard).lower()
            role = ["--head", f"--port={PORT}", f"--include-dashboard={dashboard}", "--dashboard-host=0.0.0.0"]
        else:
            role = [f"--address={self.address}"]
        resources = [f"--node-ip-address={node.address}", f"--num-cpus={cpus}", "--object-store-memory=200000000"]
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", *role, *resources, "--block"]

        process = node.start(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=self.environment)
        self._running.callback(process.kill)
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if "Ray runtime started" in line:
                return
        raise RuntimeError("".join(lines))


def can_isolate() -> bool:
    """Return whether this process may make namespaces."""
    try:
        machine = Namespaces([])
        machine.network("link add bridge type bridge")
    except (OSError, subprocess.CalledProcessError):
        return False
    machine.end()
    return True


def wait_for(condition: Callable[[], object], seconds: float = 300) -> None:
    """Wait until a condition holds.

    Raises
    ------
    AssertionError : if it does not within so many seconds.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.2)


def rounds_saved(run_dir: Path) -> int:
    """Return the round of a run's newest checkpoint; 0 if there is none."""
    checkpoints = run_dir / "checkpoints"
    return last_round(str(checkpoints)) if checkpoints.exists() else 0
