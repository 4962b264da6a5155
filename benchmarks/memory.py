"""What a run's processes hold, by what they are for, from Linux's /proc."""

from __future__ import annotations

import os
from pathlib import Path

PARTS = ("driver", "server", "clients", "store", "ray")
"""This process; the server actor; the client actors; shared memory; Ray's own processes."""


def memory(pid: int | None = None) -> dict[str, float]:
    """MB held by a process (None: this one) and all below it, by :data:`PARTS`.

    Shared pages are shared out among their users (PSS). Pages of shared memory, which is Ray's object store, are
    counted as ``store`` whoever maps them.
    """
    root = os.getpid() if pid is None else pid
    held = dict.fromkeys(PARTS, 0.0)
    for one in _below(root):
        try:
            lines = Path(f"/proc/{one}/smaps_rollup").read_text().splitlines()
            command = Path(f"/proc/{one}/cmdline").read_bytes()
        except OSError:  # it has ended meanwhile
            continue
        sizes = {line.split(":")[0]: int(line.split()[1]) / 1e3 for line in lines if line.startswith("Pss")}
        held["store"] += sizes.get("Pss_Shmem", 0.0)
        held[_part(one == root, command)] += sizes["Pss"] - sizes.get("Pss_Shmem", 0.0)
    return held


def _part(root: bool, command: bytes) -> str:
    if root:
        return "driver"
    if b"ServerActor" in command:
        return "server"
    return "clients" if b"ClientActor" in command else "ray"


def _below(root: int) -> list[int]:
    """A process and its descendants."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(entry.name))
    found, left = [], [root]
    while left:
        found.append(left.pop())
        left += children.get(found[-1], [])
    return found
