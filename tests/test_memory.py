"""What benchmarks say that processes hold."""

from __future__ import annotations

from pathlib import Path

import pytest

import benchmarks.memory
from benchmarks.memory import PARTS, descendants, memory, proportional

KB = 1000
"""Of the kernel's kB, which are 1024 bytes: 1,024,000 bytes."""


@pytest.fixture(autouse=True)
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(benchmarks.memory, "PROC", tmp_path)
    _process(tmp_path, 1, 0, "init", 7 * KB)
    _process(tmp_path, 10, 1, "python driver.py", 5 * KB, shared=2 * KB)
    _process(tmp_path, 11, 10, "raylet", 3 * KB)
    _process(tmp_path, 12, 11, "ray::ServerActor.run", 4 * KB, shared=1 * KB)
    _process(tmp_path, 13, 11, "ray::ClientActor", 6 * KB)
    return tmp_path


def _process(proc: Path, pid: int, parent: int, command: str, pss: int, shared: int = 0) -> None:
    (proc / str(pid)).mkdir()
    (proc / str(pid) / "stat").write_text(f"{pid} (a (name)) S {parent} " + "0 " * 17 + f"{100 + pid} 0\n")
    (proc / str(pid) / "cmdline").write_bytes(command.replace(" ", "\0").encode())
    (proc / str(pid) / "smaps_rollup").write_text(
        f"0-1 ---p 0 00:00 0 [rollup]\nRss: {9 * pss} kB\nPss: {pss} kB\nPss_Anon: 1 kB\nPss_Shmem: {shared} kB\n"
    )


def test_memory_is_told_by_what_processes_are_for_in_millions_of_bytes() -> None:
    held = memory(10)
    assert held == pytest.approx({"driver": 3.072, "server": 3.072, "clients": 6.144, "store": 3.072, "ray": 3.072})
    assert tuple(held) == PARTS


def test_a_kernels_kb_is_1024_bytes() -> None:
    assert proportional(10)["Pss"] == 5 * KB * 1024


def test_processes_that_are_not_below_the_run_are_not_counted() -> None:
    assert {process.pid for process in descendants(11)} == {11, 12, 13}


def test_a_process_that_has_ended_meanwhile_holds_nothing(proc: Path) -> None:
    (proc / "13" / "smaps_rollup").unlink()
    assert memory(10)["clients"] == 0
