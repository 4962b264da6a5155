"""The memory of a run's processes by their part in it, from Linux's /proc."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PARTS = ("driver", "server", "clients", "store", "ray")
"""This process; the server actor; the client actors; shared memory; Ray's own processes."""

PROC = Path("/proc")


class Process(NamedTuple):
    """A process; its start (in clock ticks) distinguishes it from a later one with the same number."""

    pid: int
    began: int


def memory(pid: int | None = None) -> dict[str, float]:
    """MB (10^6 bytes) held by a process (None: this one) and all below it, by :data:`PARTS`.

    Shared pages are shared out among their users (PSS). Pages of shared memory, which is Ray's object store, are
    counted as ``store`` whoever maps them.
    """
    root = os.getpid() if pid is None else pid
    megabytes = dict.fromkeys(PARTS, 0.0)
    for process in descendants(root):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            sizes = proportional(process.pid)
            command = (PROC / f"{process.pid}/cmdline").read_bytes()
            shared = sizes.get("Pss_Shmem", 0)
            megabytes["store"] += shared / 1e6
            megabytes[_part(process.pid == root, command)] += (sizes.get("Pss", 0) - shared) / 1e6
    return megabytes


class Peak:
    """A context that watches the memory of a process (None: this one) and all below it; `megabytes` is the highest."""

    def __init__(self, pid: int | None = None):
        self.megabytes = dict.fromkeys(PARTS, 0.0)
        self._pid = pid
        self._over = threading.Event()
        self._watcher = threading.Thread(target=self._watch)

    def __enter__(self) -> Peak:
        self._watcher.start()
        return self

    def __exit__(self, *about: object) -> None:
        self._over.set()
        self._watcher.join()

    def _watch(self) -> None:
        while not self._over.wait(1.0):
            self.megabytes = higher(self.megabytes, memory(self._pid))


def higher(a: dict[str, float], b: dict[str, float]) -> dict[str, float]:
    """The one of two measurements of memory, in MB by part, with the larger sum."""
    return max(a, b, key=lambda megabytes: sum(megabytes.values()))


def proportional(pid: int) -> dict[str, int]:
    """``Pss`` and its parts, in bytes: shared pages are divided by those who share them.

    Raises
    ------
    OSError : if they cannot be read, as those of a process that has ended.
    """
    lines = (PROC / f"{pid}/smaps_rollup").read_text().splitlines()
    sizes = {}
    for line in lines:
        if line.startswith("Pss"):
            kilobytes = int(line.split()[1])
            sizes[line.partition(":")[0]] = kilobytes * 1024  # the kernel writes kB, and means 1024 bytes
    return sizes


def descendants(root: int) -> set[Process]:
    """A process and all that descend from it, Ray's daemons among them; none where there is no /proc."""
    running = {process.pid: (process, parent) for process, parent in processes()}
    children: dict[int, list[int]] = {}
    for pid, (_, parent) in running.items():
        children.setdefault(parent, []).append(pid)

    family = set[Process]()
    unvisited = [root]
    while unvisited:
        pid = unvisited.pop()
        if pid in running:
            family.add(running[pid][0])
        unvisited += children.get(pid, [])
    return family


def processes() -> Iterator[tuple[Process, int]]:
    """Every process of the machine, and its parent's number."""
    for stat in PROC.glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            yield Process(int(stat.parent.name), int(fields[19])), int(fields[1])


def _part(root: bool, command: bytes) -> str:
    if root:
        return "driver"
    if b"ServerActor" in command:
        return "server"
    return "clients" if b"ClientActor" in command else "ray"
