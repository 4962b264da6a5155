"""Running the steps of the first hour: one process each, within a budget of time."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu.journal import Journal, Row


@dataclass(frozen=True)
class Options:
    """What all steps are told.

    Attributes
    ----------
    device : ``cuda`` or, to rehearse, ``cpu``.
    quick : whether to measure as little as shows that a step works.
    """

    device: str = "cuda"
    quick: bool = False

    @property
    def processes(self) -> tuple[int, ...]:
        """Numbers of processes that share the card."""
        return (1, 2) if self.quick else (1, 2, 4, 8)

    @property
    def seconds(self) -> float:
        """Seconds of a measurement."""
        return 0.05 if self.quick else 1.5


Measure = Callable[[Options], Iterator[Row]]
"""A step: yields a row for everything that it finds, as soon as it is found."""

DONE = "done"
FAILED = "failed"
CUT_OFF = "cut off"


def run(
    names: Sequence[str],
    budget: float,
    start: Callable[[str, float], str],
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, str]:
    """Run steps one after the other until the time is over; return what became of each: it is missing if not begun.

    A step may take half of the remaining time, the last one all of it, so that one that hangs leaves time for others.

    Parameters
    ----------
    budget : seconds in all.
    start : ``start(name, seconds)`` runs a step for so many seconds at most, and returns how it ended.
    """
    end = clock() + budget
    outcomes = {}
    for name in names:
        remaining = end - clock()
        if remaining <= 0:
            break
        limit = remaining if name == names[-1] else remaining / 2
        outcomes[name] = start(name, limit)
    return outcomes


def run_in_process(measure: Measure, name: str, options: Options, path: Path, seconds: float) -> str:
    """Run a step in a process, which is killed with all that it started when the time is over."""
    process = multiprocessing.get_context("spawn").Process(target=_record, args=(measure, name, options, path))
    process.start()
    try:
        process.join(seconds)
        if process.is_alive():
            return CUT_OFF
        return DONE if process.exitcode == 0 else FAILED
    finally:
        _kill_group(process.pid)
        # It may not have made its group yet.
        process.kill()
        process.join()


def _record(measure: Measure, name: str, options: Options, path: Path) -> None:
    """Append the rows of a step to the file."""
    # A group of its own, so that nothing of it is left behind.
    os.setsid()
    journal = Journal(path)
    try:
        for row in measure(options):
            journal.add(name, row)
    except Exception as error:
        traceback.print_exc()
        journal.add(name, {"failed": f"{type(error).__name__}: {error}"})
        raise SystemExit(1) from error


def _kill_group(leader: int | None) -> None:
    if leader is not None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(leader, signal.SIGKILL)
